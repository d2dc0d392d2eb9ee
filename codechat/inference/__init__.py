"""A checkpoint at work: the OpenAI-compatible server and its page, chat and tool-calling commands, the client.

Sampling itself is in `models.generate`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "api_errors",
        "api_requests",
        "api_responses",
        "api_schema",
        "app",
        "batching",
        "chat_command",
        "client",
        "detokenizer",
        "fitting_tools",
        "page_api",
        "play_appworld",
        "request_body",
        "serve",
        "server_metrics",
        "slot_cache",
        "slot_graph",
        "tools_command",
        "weight_update",
    ],
)
