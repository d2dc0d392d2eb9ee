"""Several processes on one model: the process group and its collectives (`dist`), sharded weights
and gradients (`sharding`), ranks that fall out of step (`desync`). And one process on its device:
`hardware`, the dtype of products (`numerics`), GPUs by name (`gpu_specs`).

Not for launching: that is `launch`.
"""
