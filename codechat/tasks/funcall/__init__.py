"""Function calling: one request, the tools that are offered, one call, judged by a staircase of partial credit."""
