"""Three functions that a model can call:

    codechat tools --ckpt my-tools --tools examples/my_tools.py --user "What is the weather in Beijing?"

Every public function of the file is offered. The first line of its docstring tells the model what it does, a
line `name: text` what a parameter means; type hints become JSON types, Literal an enumeration, and a default
makes a parameter optional. What a function returns goes back to the model as {"result": ...}; an exception as
{"error": ...}.

examples/my_rows.jsonl holds 50 conversations with these functions; docs/first-hour.md trains a model on them.
examples/my_requests.jsonl holds 24 requests with what is right, for RL and evaluation."""

from __future__ import annotations

from typing import Literal


def get_weather(city: str) -> str:
    """Get the weather of a city.

    city: name of the city
    """
    # stands in for a weather service: the same word for a city each time
    return ("sunny", "cloudy", "rainy", "snowy", "windy")[sum(map(ord, city)) % 5]


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
        raise ValueError(
            f"a parcel of {weight_kg} kg cannot be sent; it must weigh more than 0 and at most 30 kg"
        )
    base, per_kg = {"home": (3.5, 0.4), "near": (6.0, 0.9), "far": (11.0, 2.2)}[zone]
    return round(base + per_kg * weight_kg, 2)
