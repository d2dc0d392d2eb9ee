"""Tools that convert units. Requests say the unit in words; the call has its symbol."""

from __future__ import annotations

from codechat.tasks.toolbox.tool import ToolError, neat, tool
from codechat.tasks.toolbox.values import choice, number

METRES = {"m": 1.0, "km": 1000.0, "cm": 0.01, "mi": 1609.344, "ft": 0.3048, "in": 0.0254}
KILOGRAMS = {"kg": 1.0, "g": 0.001, "lb": 0.45359237, "oz": 0.028349523125, "t": 1000.0}
LITRES = {"l": 1.0, "ml": 0.001, "gal": 3.785411784, "pt": 0.473176473, "cup": 0.2365882365}
METRES_PER_SECOND = {"mps": 1.0, "kph": 1000 / 3600, "mph": 1609.344 / 3600, "kn": 1852 / 3600}
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "wk": 604800}
BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}

LENGTH = {
    "m": "metres|meters",
    "km": "kilometres|km",
    "cm": "centimetres|cm",
    "mi": "miles",
    "ft": "feet",
    "in": "inches",
}
WEIGHT = {"kg": "kilograms|kg|kilos", "g": "grams", "lb": "pounds", "oz": "ounces", "t": "tonnes"}
VOLUME = {"l": "litres|liters", "ml": "millilitres|ml", "gal": "gallons", "pt": "pints", "cup": "cups"}
SPEED = {"mps": "metres per second", "kph": "km per hour|kilometres per hour", "mph": "miles per hour", "kn": "knots"}
TIME = {"min": "minutes", "h": "hours", "d": "days", "wk": "weeks"}
SIZE = {"kB": "kilobytes", "MB": "megabytes", "GB": "gigabytes"}
DEGREES = {"C": "Celsius", "F": "Fahrenheit", "K": "kelvin"}


@tool(
    "Convert a length",
    value=number(3, 900),
    unit=choice(LENGTH),
    to=choice(LENGTH),
    answer="That is {result} {to}.",
    asks=[
        "Convert {value} {unit} to {to}.",
        "How many {to} are {value} {unit}?",
        "What is {value} {unit} in {to}?",
        "Express {value} {unit} in {to}.",
        "{value} {unit} into {to}, please.",
    ],
    hard=["I have {value} {unit}; give me {to}.", "Turn {value} {unit} into {to}."],
)
def convert_length(value: float, unit: str, to: str) -> float:
    return neat(value * METRES[unit] / METRES[to])


@tool(
    "Convert a weight",
    value=number(3, 900),
    unit=choice(WEIGHT),
    to=choice(WEIGHT),
    answer="That is {result} {to}.",
    asks=[
        "Convert {value} {unit} to {to}.",
        "How many {to} are {value} {unit}?",
        "What is {value} {unit} in {to}?",
        "Change {value} {unit} to {to}.",
        "Weight of {value} {unit} in {to}?",
    ],
    hard=["It weighs {value} {unit}; how much in {to}?", "Turn {value} {unit} into {to}."],
)
def convert_weight(value: float, unit: str, to: str) -> float:
    return neat(value * KILOGRAMS[unit] / KILOGRAMS[to])


@tool(
    "Convert a volume",
    value=number(3, 900),
    unit=choice(VOLUME),
    to=choice(VOLUME),
    answer="That is {result} {to}.",
    held_out=True,
    asks=[
        "Convert {value} {unit} to {to}.",
        "How many {to} are {value} {unit}?",
        "What is {value} {unit} in {to}?",
        "Change {value} {unit} to {to}.",
        "Pour {value} {unit}: how many {to}?",
    ],
    hard=["Turn {value} {unit} into {to}."],
)
def convert_volume(value: float, unit: str, to: str) -> float:
    return neat(value * LITRES[unit] / LITRES[to])


@tool(
    "Convert a speed",
    value=number(3, 900),
    unit=choice(SPEED),
    to=choice(SPEED),
    answer="That is {result} {to}.",
    asks=[
        "Convert {value} {unit} to {to}.",
        "What is {value} {unit} in {to}?",
        "How fast is {value} {unit} in {to}?",
        "Change {value} {unit} to {to}.",
        "Speed: {value} {unit} in {to}?",
    ],
    hard=["We drive {value} {unit}; what is it in {to}?", "Turn {value} {unit} into {to}."],
)
def convert_speed(value: float, unit: str, to: str) -> float:
    return neat(value * METRES_PER_SECOND[unit] / METRES_PER_SECOND[to])


@tool(
    "Convert a temperature",
    value=number(3, 900),
    unit=choice(DEGREES),
    to=choice(DEGREES),
    answer="That is {result} {to}.",
    asks=[
        "Convert {value} degrees {unit} to {to}.",
        "What is {value} {unit} in {to}?",
        "{value} {unit} to {to}?",
        "How warm is {value} {unit} in {to}?",
        "Give me {value} degrees {unit} in {to}.",
    ],
    hard=["It has {value} degrees {unit} here; what is it in {to}?", "Turn {value} {unit} into {to}."],
)
def convert_degrees(value: float, unit: str, to: str) -> float:
    kelvin = {"C": value + 273.15, "F": (value - 32) / 1.8 + 273.15, "K": value}[unit]
    if kelvin < 0:
        raise ToolError("value is below absolute zero")
    return neat({"C": kelvin - 273.15, "F": (kelvin - 273.15) * 1.8 + 32, "K": kelvin}[to])


@tool(
    "Length in metres",
    value=number(3, 900),
    unit=choice({k: v for k, v in LENGTH.items() if k != "m"}),
    answer="It is {result} metres.",
    asks=[
        "How many metres are {value} {unit}?",
        "What is {value} {unit} in metres?",
        "{value} {unit} in metres?",
        "Give {value} {unit} in metres.",
        "Change {value} {unit} to metres.",
    ],
    hard=["Metres in {value} {unit}?", "What length in metres has {value} {unit}?"],
)
def to_metres(value: float, unit: str) -> float:
    return neat(value * METRES[unit])


@tool(
    "Time in seconds",
    value=number(3, 900),
    unit=choice(TIME),
    answer="It is {result} seconds.",
    asks=[
        "How many seconds are {value} {unit}?",
        "What is {value} {unit} in seconds?",
        "{value} {unit} in seconds?",
        "Give {value} {unit} in seconds.",
        "Change {value} {unit} to seconds.",
    ],
    hard=["Seconds in {value} {unit}?", "How many seconds pass in {value} {unit}?"],
)
def to_seconds(value: float, unit: str) -> float:
    return neat(value * SECONDS[unit])


@tool(
    "Size in bytes",
    value=number(3, 900),
    unit=choice(SIZE),
    answer="It is {result} bytes.",
    held_out=True,
    asks=[
        "How many bytes are {value} {unit}?",
        "What is {value} {unit} in bytes?",
        "{value} {unit} in bytes?",
        "Give {value} {unit} in bytes.",
        "Change {value} {unit} to bytes.",
    ],
    hard=["Bytes in {value} {unit}?"],
)
def to_bytes(value: float, unit: str) -> float:
    return neat(value * BYTES[unit])
