"""A catalogue of tools that really run, and conversations that call them.

Tools are small and deterministic. The policy has to learn to pick one and to copy its arguments
out of the request, so values are invented, and those of open domains belong to one split each
(`values`). Some tools and some phrasings occur in
`test_hard` only. Function responses come from running the tool. `prepare` writes the data of
`codechat data calls`."""
