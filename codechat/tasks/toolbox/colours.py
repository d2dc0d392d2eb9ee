"""Tools for colours, written as #rgb or #rrggbb."""

from __future__ import annotations

import re

from codechat.tasks.toolbox.tool import ToolError, neat, tool
from codechat.tasks.toolbox.values import choice, colour, integer

CHANNELS = {"red": 0, "green": 1, "blue": 2}


def _rgb(text: str) -> list[int]:
    digits = text.strip().removeprefix("#")
    if len(digits) == 3:
        digits = "".join(c * 2 for c in digits)
    if not re.fullmatch(r"[0-9a-fA-F]{6}", digits):
        raise ToolError(f"{text[:20]!r} is not a colour like #3fa or #33ffaa")
    return [int(digits[i : i + 2], 16) for i in (0, 2, 4)]


def _hex(rgb: list[int]) -> str:
    return "#" + "".join(f"{c:02x}" for c in rgb)


@tool(
    "Colour as red green blue",
    color=colour(),
    answer="Red, green, blue: {result}.",
    asks=[
        'What is "{color}" in RGB?',
        "Convert {color} to RGB.",
        "RGB of {color}?",
        'Give me the RGB values of "{color}".',
        "Split {color} into red, green and blue.",
    ],
    hard=['How much red, green and blue has "{color}"?', "Decode the colour {color}."],
)
def hex_to_rgb(color: str) -> list[int]:
    return _rgb(color)


@tool(
    "Opposite of a colour",
    color=colour(),
    answer="The opposite is {result}.",
    asks=[
        'Invert "{color}".',
        "What is the opposite of {color}?",
        "Invert the color {color}.",
        'Find the negative of "{color}".',
        "Which color is opposite to {color}?",
    ],
    hard=['Turn the colour "{color}" inside out.', "Flip {color}."],
)
def invert_color(color: str) -> str:
    return _hex([255 - c for c in _rgb(color)])


@tool(
    "Colour without hue",
    color=colour(),
    answer="In gray: {result}.",
    held_out=True,
    asks=[
        'What gray is "{color}"?',
        "Convert {color} to gray.",
        "Gray version of {color}?",
        'Make "{color}" gray.',
        "Take the hue out of {color}.",
    ],
    hard=['How would "{color}" look on an old screen?'],
)
def to_gray(color: str) -> str:
    red, green, blue = _rgb(color)
    return _hex([round(0.299 * red + 0.587 * green + 0.114 * blue)] * 3)


@tool(
    "One channel of a colour",
    color=colour(),
    channel=choice({c: c for c in CHANNELS}),
    answer="It has {result}.",
    asks=[
        'How much {channel} is in "{color}"?',
        "How {channel} is {color}?",
        'Give the {channel} part of "{color}".',
        "Channel {channel} of {color}?",
        'Read {channel} from "{color}".',
    ],
    hard=['What {channel} value has the colour "{color}"?'],
)
def color_channel(color: str, channel: str) -> int:
    return _rgb(color)[CHANNELS[channel]]


@tool(
    "Brighten a colour",
    color=colour(),
    percent=integer(3, 99),
    answer="Brighter: {result}.",
    asks=[
        'Lighten "{color}" by {percent} percent.',
        "Make {color} {percent} percent brighter.",
        'Brighten "{color}" by {percent} percent.',
        "Lighten {color} by {percent}%.",
        "Color {color}: lighten by {percent} percent.",
    ],
    hard=['"{color}" is too dark; raise it by {percent} percent.'],
)
def lighten(color: str, percent: int) -> str:
    if not 0 <= percent <= 100:
        raise ToolError("percent must be between 0 and 100")
    return _hex([round(c + (255 - c) * percent / 100) for c in _rgb(color)])


@tool(
    "Mix two colours",
    first=colour(),
    second=colour(),
    answer="The mix is {result}.",
    asks=[
        'Mix "{first}" and "{second}".',
        "Blend {first} with {second}.",
        "What do {first} and {second} mix to?",
        'Mix the colors "{first}" and "{second}".',
        "Average {first} and {second} as colors.",
    ],
    hard=['Which colour lies midway from "{first}" to "{second}"?'],
)
def mix_colors(first: str, second: str) -> str:
    return _hex([(a + b) // 2 for a, b in zip(_rgb(first), _rgb(second), strict=True)])


@tool(
    "Colour code from channels",
    red=integer(2, 255),
    green=integer(2, 255),
    blue=integer(2, 255),
    answer="The code is {result}.",
    asks=[
        "Color code for {red}, {green}, {blue}?",
        "What is RGB {red}, {green}, {blue} in hex?",
        "Hex code of red {red}, green {green}, blue {blue}.",
        "Convert RGB {red} {green} {blue} to hex.",
        "Red {red}, green {green}, blue {blue}: which code?",
    ],
    hard=["Write the colour with red {red}, green {green} and blue {blue} as a code."],
)
def rgb_to_hex(red: int, green: int, blue: int) -> str:
    if not all(0 <= c <= 255 for c in (red, green, blue)):
        raise ToolError("red, green and blue must be between 0 and 255")
    return _hex([red, green, blue])


@tool(
    "Contrast of two colours",
    first=colour(),
    second=colour(),
    answer="Their contrast is {result}.",
    held_out=True,
    asks=[
        'What is the contrast of "{first}" and "{second}"?',
        "Contrast of {first} and {second}?",
        'Can I read "{first}" on "{second}"?',
        "Contrast from {first} to {second}?",
        "Compare the colors {first} and {second}.",
    ],
    hard=['How well does "{first}" stand out on "{second}"?'],
)
def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio, 1 to 21."""
    lights = sorted(_luminance(_rgb(color)) for color in (first, second))
    return neat((lights[1] + 0.05) / (lights[0] + 0.05), 2)


def _luminance(rgb: list[int]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
