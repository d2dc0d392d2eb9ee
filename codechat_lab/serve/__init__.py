"""A checkpoint at work: the OpenAI-compatible server and its page, chat and tool-calling
commands, the client."""
