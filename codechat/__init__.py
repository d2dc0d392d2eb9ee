"""CodeChat: a thin library that trains a code-and-tool-calling language model.

Every part lies in a room of its own (`codechat.models`, `codechat.rl`, ...); import from there.
"""

__version__ = "0.2.0"
