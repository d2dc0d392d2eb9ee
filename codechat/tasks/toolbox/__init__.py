"""A catalogue of tools that really run, and conversations that call them.

Tools are small and deterministic. The policy has to learn to pick one and to copy its arguments out of the request, so
values are invented, and those of open domains belong to one split each (`values`). Some tools and some phrasings occur in
`test_hard` only; the edition of the catalogue says which tools. Function responses come from running the tool.
`prepare` writes the data of `codechat data calls`.

Left out: tools with side effects or a network, and optional parameters, which would make the correct call ambiguous.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    [
        "catalogue",
        "conversations",
        "copying",
        "functions",
        "generated",
        "lookups",
        "prepare",
        "reading",
        "tool",
        "unseen_functions",
        "values",
    ],
    {
        "catalogue": ["EDITIONS", "FAMILIES", "TOOLS", "execute", "family", "respond", "tools_of"],
        "conversations": ["dialogues", "neutral_system", "probes", "problems", "tools_system"],
        "copying": ["copy_dialogues"],
        "lookups": ["lookup_dialogues"],
        "tool": ["LEVELS", "Tool", "ToolError"],
    },
)
