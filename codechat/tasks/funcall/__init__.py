"""Function calling: one request, the tools on offer, one call. The staircase grades the call; data preparation is in
`toolbox.prepare`."""

from codechat.tasks.funcall.task import FuncallTask as FuncallTask
