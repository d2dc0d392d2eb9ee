"""The laboratory on top of `codechat`: tasks and their data, the sandbox, the server,
instruments, recipes, reports and released models."""
