"""Tools for knitting, gardening, decorating, cooking and health."""

from __future__ import annotations

import math

from codechat.tasks.toolbox.tool import neat, need_within, tool
from codechat.tasks.toolbox.values import integer, number

BALL_GRAMS = 50
SHRUBS_PER_METRE = 3
TIN_COVERS = 12  # square metres
PULSE_AT_BIRTH = 220


@tool(
    "Balls of yarn to knit",
    grams=integer(60, 9000),
    answer="Buy {result} balls.",
    held_out=True,
    asks=[
        "How many balls of yarn are {grams} grams?",
        "Balls of yarn for {grams} grams?",
        "I knit {grams} grams. How many balls?",
        "Yarn to knit {grams} grams?",
        "Wool for a jumper of {grams} grams?",
    ],
    hard=["I knit a blanket of {grams} grams. What is on my shopping list?"],
)
def yarn_balls(grams: int) -> int:
    need_within(0, 10**9, grams=grams)
    return math.ceil(grams / BALL_GRAMS)


@tool(
    "Shrubs to plant a hedge",
    metres=integer(3, 900),
    answer="Plant {result} shrubs.",
    held_out=True,
    asks=[
        "How many shrubs make a hedge of {metres} metres?",
        "Shrubs for a hedge of {metres} metres?",
        "Plant a hedge over {metres} metres.",
        "Hedge of {metres} metres: what do I plant?",
        "How many bushes hide {metres} metres of fence?",
    ],
    hard=["I hide {metres} metres of the street behind a hedge. What do I order?"],
)
def hedge_shrubs(metres: int) -> int:
    need_within(0, 10**9, metres=metres)
    return metres * SHRUBS_PER_METRE


@tool(
    "Seeds to sow for plants",
    plants=integer(3, 900),
    sprout=integer(20, 95),
    answer="Sow {result} seeds.",
    held_out=True,
    asks=[
        "How many seeds for {plants} plants if {sprout} percent sprout?",
        "Seeds for {plants} plants, {sprout} percent sprout?",
        "Sow for {plants} plants at {sprout} percent.",
        "Seeds to sow: {plants} plants, {sprout} percent.",
        "I want {plants} tomatoes and {sprout} percent come up. What do I sow?",
    ],
    hard=["Only {sprout} percent come up and my bed holds {plants} plants. How many go in?"],
)
def sow_seeds(plants: int, sprout: int) -> int:
    need_within(0, 10**9, plants=plants)
    need_within(1, 100, sprout=sprout)
    return math.ceil(plants * 100 / sprout)


@tool(
    "Tins to paint a wall",
    wall=number(9, 900),
    answer="Buy {result} tins.",
    held_out=True,
    asks=[
        "How many tins paint {wall} square metres?",
        "Tins of paint for {wall} square metres?",
        "Paint a wall of {wall} square metres.",
        "Wall of {wall} square metres: how many tins?",
        "How much paint do {wall} square metres need?",
    ],
    hard=["The ceiling has {wall} square metres. How much paint do I carry home?"],
)
def paint_tins(wall: float) -> int:
    need_within(0, 10**9, wall=wall)
    return math.ceil(wall / TIN_COVERS)


@tool(
    "Scale a recipe to guests",
    grams=number(9, 900),
    serves=integer(2, 20),
    guests=integer(3, 300),
    answer="Take {result} grams.",
    held_out=True,
    asks=[
        "Scale {grams} grams from {serves} to {guests} guests.",
        "Recipe with {grams} grams for {serves}: scale it to {guests}.",
        "{grams} grams serve {serves}. How much for {guests} guests?",
        "Recipe: {grams} grams for {serves}. How much for {guests} guests?",
        "{grams} grams of rice feed {serves}. What do {guests} need?",
    ],
    hard=["The book says {grams} grams for {serves}, but {guests} guests come. How much flour?"],
)
def recipe_scale(grams: float, serves: int, guests: int) -> float:
    need_within(0, 10**9, grams=grams, guests=guests)
    need_within(1, 10**9, serves=serves)
    return neat(grams * guests / serves, 1)


@tool(
    "Body mass index (BMI)",
    kilos=number(30, 300),
    centimetres=integer(120, 210),
    answer="The index is {result}.",
    held_out=True,
    asks=[
        "Body mass index of {kilos} kilos, {centimetres} cm?",
        "What is the body mass index at {kilos} kilos and {centimetres} cm?",
        "BMI for {kilos} kilos and {centimetres} cm?",
        "BMI: {kilos} kilos, {centimetres} cm.",
        "I have {kilos} kilos at {centimetres} cm. Is that healthy?",
    ],
    hard=["A body of {centimetres} cm and {kilos} kilos: too much?"],
)
def body_mass(kilos: float, centimetres: int) -> float:
    need_within(1, 1000, kilos=kilos)
    need_within(30, 300, centimetres=centimetres)
    return neat(kilos / (centimetres / 100) ** 2, 1)


@tool(
    "Highest heart rate at an age",
    age=integer(14, 99),
    answer="Stay below {result} beats a minute.",
    held_out=True,
    asks=[
        "What is the highest heart rate at age {age}?",
        "Highest heart rate at {age}?",
        "I am {age}. How fast may my heart beat?",
        "Heart limit at age {age}?",
        "How high can the pulse go at {age}?",
    ],
    hard=["Grandpa is {age} and rows every morning. Which heart rate is too high?"],
)
def heart_limit(age: int) -> int:
    need_within(1, 120, age=age)
    return PULSE_AT_BIRTH - age
