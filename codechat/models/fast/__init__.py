"""The same numbers, faster: everything here could be deleted without changing a result but for
rounding.

The architecture is in `models.gpt` and `models.attention`. They call this room where one way of
computing is faster on a CPU and another on a GPU, and this room alone asks which of the two it
is (`device.on_cpu`).

    functions     norms and activations whose gradient is written out, on a CPU
    attention     packed rows: pieces on a CPU, flex attention on a GPU
    fused         norms, activation and attention of a training step in C, which `make cpp` builds
    head          loss and log-probabilities of the output head, a chunk of logits at a time
    reader        the model as decoding reads it, with packed or transposed copies of its weights
    shared_prefix a cache whose rows share their prompts
    decode_graph  decoding with static shapes: a GPU replays one token of all rows as one graph
    memory        how many rows decode at a time
"""
