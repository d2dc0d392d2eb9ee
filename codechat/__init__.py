"""CodeChat: a laboratory for training a small code-and-tool-calling language model from scratch."""

__version__ = "0.1.0"
