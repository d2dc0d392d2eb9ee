"""A checkpoint at work: the OpenAI-compatible server and its page, chat and tool-calling commands, the client.

Sampling itself is in `models.generate`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "api_schema",
        "app",
        "batching",
        "chat_command",
        "client",
        "completion_text",
        "errors",
        "meters",
        "play_appworld",
        "reload",
        "replies",
        "requests",
        "serve",
        "slots",
        "tools_command",
    ],
)
