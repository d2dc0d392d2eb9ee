"""Tools for shapes and distances."""

from __future__ import annotations

import math

from codechat.tasks.toolbox.tool import ToolError, neat, tool
from codechat.tasks.toolbox.values import integer, number


def _need_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if size <= 0:
            raise ToolError(f"{name} must be above 0")


@tool(
    "Area of a circle",
    radius=number(3, 900),
    answer="The area is {result}.",
    asks=[
        "What is the area of a circle with radius {radius}?",
        "Circle area, radius {radius}?",
        "Find the area of a circle of radius {radius}.",
        "Area of a circle, radius {radius}.",
        "A circle has radius {radius}. What is its area?",
    ],
    hard=["How much surface does a disc of radius {radius} cover?", "The radius is {radius}; give the circle area."],
)
def circle_area(radius: float) -> float:
    _need_positive(radius=radius)
    return neat(math.pi * radius**2)


@tool(
    "Length around a circle",
    radius=number(3, 900),
    answer="It is {result} around.",
    asks=[
        "How long is the edge of a circle with radius {radius}?",
        "Circumference for radius {radius}?",
        "Find the circumference of a circle of radius {radius}.",
        "Length around a circle, radius {radius}?",
        "A circle has radius {radius}. What is its circumference?",
    ],
    hard=["How far is it around a pond of radius {radius}?", "Circumference? The radius is {radius}."],
)
def circumference(radius: float) -> float:
    _need_positive(radius=radius)
    return neat(2 * math.pi * radius)


@tool(
    "Volume of a sphere",
    radius=number(3, 900),
    answer="The volume is {result}.",
    held_out=True,
    asks=[
        "What is the volume of a sphere with radius {radius}?",
        "Sphere volume, radius {radius}?",
        "Find the volume of a sphere of radius {radius}.",
        "Volume of a ball, radius {radius}.",
        "A ball has radius {radius}. What is its volume?",
    ],
    hard=["How much space fills a globe of radius {radius}?"],
)
def sphere_volume(radius: float) -> float:
    _need_positive(radius=radius)
    return neat(4 / 3 * math.pi * radius**3)


@tool(
    "Angle of a regular polygon",
    sides=integer(3, 900),
    answer="Each angle has {result} degrees.",
    asks=[
        "What is the angle of a polygon with {sides} sides?",
        "Angle of a regular shape with {sides} sides?",
        "Inner angle, {sides} sides?",
        "Find the angle in a polygon of {sides} sides.",
        "A polygon has {sides} sides. What is its angle?",
    ],
    hard=["How wide is each corner of a shape with {sides} sides?"],
)
def polygon_angle(sides: int) -> float:
    if sides < 3:
        raise ToolError("sides must be at least 3")
    return neat((sides - 2) * 180 / sides)


@tool(
    "Area of a rectangle",
    width=number(3, 900),
    height=number(3, 900),
    answer="The area is {result}.",
    asks=[
        "What is the area of a rectangle {width} by {height}?",
        "Area of a {width} by {height} room?",
        "Rectangle area: width {width}, height {height}.",
        "Find the area of {width} by {height}.",
        "A field is {width} wide and {height} high. What is its area?",
    ],
    hard=["How much floor has a hall of {width} by {height}?", "Surface of a sheet {width} wide, {height} high?"],
)
def rectangle_area(width: float, height: float) -> float:
    _need_positive(width=width, height=height)
    return neat(width * height)


@tool(
    "Area of a triangle",
    base=number(3, 900),
    height=number(3, 900),
    answer="The area is {result}.",
    asks=[
        "What is the area of a triangle with base {base} and height {height}?",
        "Triangle area: base {base}, height {height}.",
        "Find the triangle area for base {base}, height {height}.",
        "A triangle has base {base} and height {height}. What is its area?",
        "Area of a triangle, base {base}, height {height}?",
    ],
    hard=["A sail is {base} at the base and {height} tall. What is its triangle area?"],
)
def triangle_area(base: float, height: float) -> float:
    _need_positive(base=base, height=height)
    return neat(base * height / 2)


@tool(
    "Longest side, right triangle",
    a=number(3, 900),
    b=number(3, 900),
    answer="It is {result} long.",
    asks=[
        "What is the hypotenuse for sides {a} and {b}?",
        "Hypotenuse of {a} and {b}?",
        "A right triangle has sides {a} and {b}. How long is the third?",
        "Find the hypotenuse: {a} and {b}.",
        "Sides {a} and {b}: how long is the hypotenuse?",
    ],
    hard=["Walk {a} east, then {b} north. How far is it straight back?"],
)
def hypotenuse(a: float, b: float) -> float:
    _need_positive(a=a, b=b)
    return neat(math.hypot(a, b))


@tool(
    "Volume of a cylinder",
    radius=number(3, 300),
    height=number(3, 900),
    answer="The volume is {result}.",
    asks=[
        "What is the volume of a cylinder of radius {radius} and height {height}?",
        "Cylinder volume: radius {radius}, height {height}.",
        "A can has radius {radius}, height {height}. Volume?",
        "Find the volume of a cylinder, radius {radius}, height {height}.",
        "Volume of a tube with radius {radius} and height {height}?",
    ],
    hard=["How much goes into a round tank of radius {radius}, height {height}?"],
)
def cylinder_volume(radius: float, height: float) -> float:
    _need_positive(radius=radius, height=height)
    return neat(math.pi * radius**2 * height)


@tool(
    "Volume of a box",
    length=number(3, 300),
    width=number(3, 300),
    height=number(3, 300),
    answer="The volume is {result}.",
    asks=[
        "What is the volume of a box {length} by {width} by {height}?",
        "Box volume: {length} x {width} x {height}.",
        "A box is {length} long, {width} wide and {height} high. What is its volume?",
        "Find the volume of {length} by {width} by {height}.",
        "Volume of a crate, {length} by {width} by {height}?",
    ],
    hard=["How much fits into a case of {length} by {width} by {height}?"],
)
def box_volume(length: float, width: float, height: float) -> float:
    _need_positive(length=length, width=width, height=height)
    return neat(length * width * height)


@tool(
    "Distance of two points",
    x1=integer(2, 300),
    y1=integer(2, 300),
    x2=integer(2, 300),
    y2=integer(2, 300),
    answer="They are {result} apart.",
    asks=[
        "How far is ({x1}, {y1}) from ({x2}, {y2})?",
        "Distance from ({x1}, {y1}) to ({x2}, {y2})?",
        "Distance between ({x1}, {y1}) and ({x2}, {y2})?",
        "How far apart are ({x1}, {y1}) and ({x2}, {y2})?",
        "Measure ({x1}, {y1}) to ({x2}, {y2}).",
    ],
    hard=["A line goes from ({x1}, {y1}) to ({x2}, {y2}). How long is it?"],
)
def point_distance(x1: int, y1: int, x2: int, y2: int) -> float:
    return neat(math.hypot(x2 - x1, y2 - y1))
