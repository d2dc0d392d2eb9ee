"""The process group, sharded weights (FSDP), collective desync detection, hardware and GPU
specifications.

Not for launching: that is `launch`.
"""
