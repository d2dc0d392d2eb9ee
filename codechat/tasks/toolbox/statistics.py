"""Tools over a short list of numbers."""

from __future__ import annotations

import math
import statistics

from codechat.tasks.toolbox.tool import ToolError, neat, tool
from codechat.tasks.toolbox.values import choice, integer, numbers


@tool(
    "Mean of numbers",
    numbers=numbers(2, 300),
    answer="The mean is {result}.",
    asks=[
        "What is the mean of {numbers}?",
        "Average {numbers}.",
        "Find the average of {numbers}.",
        "Mean of {numbers}?",
        "Compute the mean: {numbers}",
    ],
    hard=["On average, how much are {numbers}?", "Take the arithmetic mean over {numbers}."],
)
def mean(numbers: list[float]) -> float:
    return neat(statistics.fmean(numbers))


@tool(
    "Middle of numbers",
    numbers=numbers(2, 300),
    answer="The median is {result}.",
    asks=[
        "What is the median of {numbers}?",
        "Median of {numbers}?",
        "Find the median: {numbers}",
        "Find the middle value of {numbers}.",
        "Which is the middle one of {numbers}?",
    ],
    hard=["Half of {numbers} lie below which value?", "Give me the middle of {numbers}."],
)
def median(numbers: list[float]) -> float:
    return neat(statistics.median(numbers))


@tool(
    "Total of numbers",
    numbers=numbers(2, 300),
    answer="The total is {result}.",
    asks=[
        "Add up {numbers}.",
        "What is the total of {numbers}?",
        "Sum up {numbers}.",
        "Total of {numbers}?",
        "Compute the sum: {numbers}",
    ],
    hard=["All together, how much are {numbers}?", "What do {numbers} total?"],
)
def total(numbers: list[float]) -> float:
    return neat(math.fsum(numbers))


@tool(
    "Largest of numbers",
    numbers=numbers(2, 300),
    answer="The largest is {result}.",
    asks=[
        "Which is the largest of {numbers}?",
        "Find the maximum of {numbers}.",
        "Max of {numbers}?",
        "What is the biggest number in {numbers}?",
        "Pick the largest: {numbers}",
    ],
    hard=["Out of {numbers}, which tops the others?"],
)
def largest(numbers: list[float]) -> float:
    return neat(max(numbers))


@tool(
    "Smallest of numbers",
    numbers=numbers(2, 300),
    answer="The smallest is {result}.",
    held_out=True,
    asks=[
        "Which is the smallest of {numbers}?",
        "Find the minimum of {numbers}.",
        "Min of {numbers}?",
        "What is the least number in {numbers}?",
        "Pick the smallest: {numbers}",
    ],
    hard=["Out of {numbers}, which is lowest?"],
)
def smallest(numbers: list[float]) -> float:
    return neat(min(numbers))


@tool(
    "Standard deviation of numbers",
    numbers=numbers(2, 300),
    answer="The standard deviation is {result}.",
    asks=[
        "What is the standard deviation of {numbers}?",
        "Standard deviation: {numbers}",
        "How much do {numbers} spread?",
        "Find the deviation of {numbers}.",
        "Deviation of {numbers}?",
    ],
    hard=["How widely are {numbers} scattered?"],
)
def deviation(numbers: list[float]) -> float:
    return neat(statistics.pstdev(numbers))


@tool(
    "Sort numbers",
    numbers=numbers(2, 300),
    order=choice({"up": "rising order|upward", "down": "falling order|downward"}),
    answer="Sorted: {result}",
    asks=[
        "Sort {numbers} in {order}.",
        "Put {numbers} in {order}.",
        "Order {numbers}, {order}.",
        "Arrange {numbers} in {order}.",
        "Sort: {numbers} ({order})",
    ],
    hard=["Line up {numbers} in {order}."],
)
def sort_numbers(numbers: list[float], order: str) -> list[float]:
    return sorted(numbers, reverse=order == "down")


@tool(
    "Share of a whole",
    part=integer(3, 900),
    whole=integer(11, 2000),
    answer="It is {result} percent.",
    asks=[
        "What percentage is {part} of {whole}?",
        "{part} of {whole} in percent?",
        "How many percent of {whole} are {part}?",
        "{part} out of {whole}: what percentage?",
        "Express {part} of {whole} as a percentage.",
    ],
    hard=["Of {whole} people {part} came. What percentage is that?", "Which share of {whole} is {part}?"],
)
def percentage(part: int, whole: int) -> float:
    return neat(100 * part / whole)


@tool(
    "Ways to choose",
    n=integer(10, 400),
    k=integer(2, 9),
    answer="There are {result} ways.",
    held_out=True,
    asks=[
        "How many ways to choose {k} from {n}?",
        "{n} choose {k}?",
        "Combinations of {k} out of {n}?",
        "In how many ways can I pick {k} of {n}?",
        "Choose {k} of {n}: how many ways?",
    ],
    hard=["From {n} players, how many teams of {k} are possible?"],
)
def combinations(n: int, k: int) -> int:
    if not 0 <= k <= n <= 1000:
        raise ToolError("0 <= k <= n <= 1000 is required")
    return math.comb(n, k)
