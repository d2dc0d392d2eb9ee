"""A catalogue of tools that really run, and conversations in which they are called.

The tools are deterministic and small on purpose: what the policy has to learn is to pick one and to copy its
arguments out of the request, so values are invented and a split never sees another split's (`values`). Some
tools and some phrasings are kept for `test_hard`. Function responses come from executing the tool.

Left out: tools with side effects or a network, and optional parameters, which would make the right call
ambiguous.
"""

from __future__ import annotations

from codechat.tasks.toolbox.catalogue import FAMILIES, THEMES, TOOLS, execute, family, respond
from codechat.tasks.toolbox.conversations import dialogues, neutral_system, probes, problems, tools_system
from codechat.tasks.toolbox.copying import copy_dialogues
from codechat.tasks.toolbox.tool import LEVELS, Tool, ToolError

__all__ = [
    "FAMILIES",
    "LEVELS",
    "THEMES",
    "TOOLS",
    "Tool",
    "ToolError",
    "copy_dialogues",
    "dialogues",
    "execute",
    "family",
    "neutral_system",
    "probes",
    "problems",
    "respond",
    "tools_system",
]
