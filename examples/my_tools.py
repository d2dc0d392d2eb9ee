"""Two functions that a model can call:

    codechat tools --ckpt nano/rl --executors examples/my_tools.py --user "Count the words in 'to be or not'"

Every public function of the file is offered. The first line of its docstring tells the model what it does, a
line `name: text` what a parameter means; type hints become JSON types, Literal an enumeration, and a default
makes a parameter optional. What a function returns goes back to the model as {"result": ...}; an exception as
{"error": ...}."""

from __future__ import annotations

from typing import Literal


def count_words(text: str, unique: bool = False) -> int:
    """Count the words in a text.

    text: the text to count in
    unique: count each word once
    """
    words = text.lower().split()
    return len(set(words) if unique else words)


def shipping_cost(weight_kg: float, zone: Literal["home", "near", "far"]) -> float:
    """Price of sending a parcel, in euros.

    weight_kg: up to 30
    zone: where it goes
    """
    if not 0 < weight_kg <= 30:
        raise ValueError(f"a parcel of {weight_kg} kg cannot be sent; it must weigh more than 0 and at most 30 kg")
    base, per_kg = {"home": (3.5, 0.4), "near": (6.0, 0.9), "far": (11.0, 2.2)}[zone]
    return round(base + per_kg * weight_kg, 2)
