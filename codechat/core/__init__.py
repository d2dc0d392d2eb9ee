"""Configuration, errors, files that are never seen half written, processes and locks, HTTP,
provenance, and the registry of what can be run.

Knows nothing of models or training; imports no other room, and no torch.
"""
