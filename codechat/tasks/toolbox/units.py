"""Tools that convert units. Requests say the unit in words; the call has its symbol."""

from __future__ import annotations

from codechat.tasks.toolbox.tool import Tool, ToolError, neat, tool
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


def _conversion(
    name: str,
    description: str,
    units: dict[str, str],
    scale: dict[str, float],
    asks: list[str],
    hard: list[str],
    held_out: bool = False,
) -> Tool:
    """A tool that converts between units. scale: each unit in the base unit."""

    def convert(value: float, unit: str, to: str) -> float:
        return neat(value * scale[unit] / scale[to])

    convert.__name__ = name
    slots = {"value": number(3, 900), "unit": choice(units), "to": choice(units)}
    return tool(description, **slots, answer="That is {result} {to}.", held_out=held_out, asks=asks, hard=hard)(convert)


convert_length = _conversion(
    "convert_length",
    "Convert a length",
    LENGTH,
    METRES,
    asks=[
        "Convert {value} {unit} to {to}.",
        "How many {to} are {value} {unit}?",
        "What is {value} {unit} in {to}?",
        "Express {value} {unit} in {to}.",
        "{value} {unit} into {to}, please.",
    ],
    hard=["I have {value} {unit}; give me {to}.", "Turn {value} {unit} into {to}."],
)

convert_weight = _conversion(
    "convert_weight",
    "Convert a weight",
    WEIGHT,
    KILOGRAMS,
    asks=[
        "Convert {value} {unit} to {to}.",
        "How many {to} are {value} {unit}?",
        "What is {value} {unit} in {to}?",
        "Change {value} {unit} to {to}.",
        "Weight of {value} {unit} in {to}?",
    ],
    hard=["It weighs {value} {unit}; how much in {to}?", "Turn {value} {unit} into {to}."],
)

convert_volume = _conversion(
    "convert_volume",
    "Convert a volume",
    VOLUME,
    LITRES,
    asks=[
        "Convert {value} {unit} to {to}.",
        "How many {to} are {value} {unit}?",
        "What is {value} {unit} in {to}?",
        "Change {value} {unit} to {to}.",
        "Pour {value} {unit}: how many {to}?",
    ],
    hard=["Turn {value} {unit} into {to}."],
    held_out=True,
)

convert_speed = _conversion(
    "convert_speed",
    "Convert a speed",
    SPEED,
    METRES_PER_SECOND,
    asks=[
        "Convert {value} {unit} to {to}.",
        "What is {value} {unit} in {to}?",
        "How fast is {value} {unit} in {to}?",
        "Change {value} {unit} to {to}.",
        "Speed: {value} {unit} in {to}?",
    ],
    hard=["We drive {value} {unit}; what is it in {to}?", "Turn {value} {unit} into {to}."],
)


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


def _to_base(
    name: str,
    description: str,
    base: str,
    units: dict[str, str],
    scale: dict[str, float],
    hard: list[str],
    held_out: bool = False,
) -> Tool:
    """A tool that converts to the base unit."""

    def convert(value: float, unit: str) -> float:
        return neat(value * scale[unit])

    convert.__name__ = name
    asks = [
        f"How many {base} are {{value}} {{unit}}?",
        f"What is {{value}} {{unit}} in {base}?",
        f"{{value}} {{unit}} in {base}?",
        f"Give {{value}} {{unit}} in {base}.",
        f"Change {{value}} {{unit}} to {base}.",
    ]
    slots = {"value": number(3, 900), "unit": choice(units)}
    return tool(description, **slots, answer=f"It is {{result}} {base}.", held_out=held_out, asks=asks, hard=hard)(
        convert
    )


to_metres = _to_base(
    "to_metres",
    "Length in metres",
    "metres",
    {k: v for k, v in LENGTH.items() if k != "m"},
    METRES,
    hard=["Metres in {value} {unit}?", "What length in metres has {value} {unit}?"],
)
to_seconds = _to_base(
    "to_seconds",
    "Time in seconds",
    "seconds",
    TIME,
    SECONDS,
    hard=["Seconds in {value} {unit}?", "How many seconds pass in {value} {unit}?"],
)
to_bytes = _to_base("to_bytes", "Size in bytes", "bytes", SIZE, BYTES, hard=["Bytes in {value} {unit}?"], held_out=True)
