"""Tools for whole numbers and simple sums."""

from __future__ import annotations

import math

from codechat.tasks.toolbox.tool import ToolError, neat, tool
from codechat.tasks.toolbox.values import integer, number


@tool(
    "Square of a number",
    x=number(3, 900),
    answer="{x} squared is {result}.",
    asks=[
        "Square {x}.",
        "What is {x} squared?",
        "Give me the square of {x}.",
        "Compute {x} times itself.",
        "I need {x} squared.",
    ],
    hard=["Multiply {x} by itself.", "What does {x} to the second power come to?"],
)
def square(x: float) -> float:
    return neat(x * x)


@tool(
    "Square root of a number",
    x=number(3, 9000),
    answer="The square root of {x} is {result}.",
    asks=[
        "What is the square root of {x}?",
        "Take the square root of {x}.",
        "Find the root of {x}.",
        "sqrt of {x}?",
        "Square root of {x}, please.",
    ],
    hard=["Which number squared gives {x}?", "Root of {x}?"],
)
def sqrt(x: float) -> float:
    if x < 0:
        raise ToolError("x must not be negative")
    return neat(math.sqrt(x))


@tool(
    "Check for a prime number",
    n=integer(11, 9999),
    answer="Is {n} prime? {result}.",
    asks=[
        "Is {n} prime?",
        "Is {n} a prime number?",
        "Check whether {n} is prime.",
        "Tell me if {n} is a prime.",
        "Prime or not: {n}?",
    ],
    hard=["Does {n} have only trivial divisors?", "Can you say if the number {n} is prime?"],
)
def is_prime(n: int) -> bool:
    _need_small(n)
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


@tool(
    "Prime factors of a number",
    n=integer(12, 9999),
    answer="The prime factors of {n} are {result}.",
    asks=[
        "Factorize {n}.",
        "What are the prime factors of {n}?",
        "Break {n} into primes.",
        "Find the factors of {n}.",
        "Factor {n} for me.",
    ],
    hard=["Write {n} as a product of primes.", "Which primes divide {n}?"],
)
def factorize(n: int) -> list[int]:
    _need_small(n)
    if n < 2:
        raise ToolError("n must be at least 2")
    factors, d = [], 2
    while d * d <= n:
        while n % d == 0:
            factors.append(d)
            n //= d
        d += 1
    return factors + [n] * (n > 1)


def _need_small(n: int) -> None:
    if abs(n) > 10**12:
        raise ToolError("n must be at most 10^12")


@tool(
    "Sum of the digits",
    n=integer(12, 99999),
    answer="The digits of {n} add up to {result}.",
    asks=[
        "Add the digits of {n}.",
        "What is the digit sum of {n}?",
        "Sum the digits in {n}.",
        "Digit sum of {n}?",
        "Find the sum of the digits of {n}.",
    ],
    hard=["What do the digits of {n} come to?", "Total the single digits of {n}."],
)
def digit_sum(n: int) -> int:
    return sum(map(int, str(abs(n))))


@tool(
    "Add two numbers",
    a=number(3, 2000),
    b=number(3, 2000),
    answer="{a} plus {b} is {result}.",
    asks=[
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Sum {a} and {b}.",
        "{a} + {b} = ?",
        "How much is {a} and {b} together?",
    ],
    hard=["What do {a} and {b} come to?", "Put {a} and {b} together."],
)
def add(a: float, b: float) -> float:
    return neat(a + b)


@tool(
    "Multiply two numbers",
    a=number(3, 900),
    b=number(3, 900),
    answer="{a} times {b} is {result}.",
    asks=[
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "{a} x {b} = ?",
        "Compute {a} times {b}.",
        "Give me the product of {a} and {b}.",
    ],
    hard=["How much is {a} lots of {b}?", "Work out {a} multiplied with {b}."],
)
def multiply(a: float, b: float) -> float:
    return neat(a * b)


@tool(
    "Remainder of a division",
    a=integer(20, 9999),
    b=integer(2, 99),
    answer="{a} mod {b} is {result}.",
    asks=[
        "What is {a} mod {b}?",
        "Remainder of {a} divided by {b}?",
        "What is left when {a} is divided by {b}?",
        "Compute {a} modulo {b}.",
        "Find the remainder of {a} over {b}.",
    ],
    hard=["Divide {a} by {b} and keep the rest.", "What remains of {a} after division by {b}?"],
)
def modulo(a: int, b: int) -> int:
    return a % b


@tool(
    "Raise to a power",
    base=integer(2, 400),
    exponent=integer(2, 9),
    answer="It is {result}.",
    asks=[
        "What is {base} to the power {exponent}?",
        "Raise {base} to {exponent}.",
        "{base} ^ {exponent} = ?",
        "Compute {base} to the power of {exponent}.",
        "Power: base {base}, exponent {exponent}.",
    ],
    hard=["Multiply {base} by itself {exponent} times.", "Take power {exponent} of {base}."],
)
def power(base: int, exponent: int) -> float:
    if abs(exponent) > 100:
        raise ToolError("exponent must be between -100 and 100")
    return neat(base**exponent)


@tool(
    "Greatest common divisor",
    a=integer(12, 2000),
    b=integer(12, 2000),
    answer="Their common divisor is {result}.",
    asks=[
        "What is the gcd of {a} and {b}?",
        "Greatest common divisor of {a} and {b}?",
        "Find gcd {a} {b}.",
        "Which largest number divides {a} and {b}?",
        "gcd of {a} and {b}, please.",
    ],
    hard=["What is the biggest factor shared by {a} and {b}?", "Common divisor of {a} and {b}?"],
)
def gcd(a: int, b: int) -> int:
    return math.gcd(a, b)


@tool(
    "Least common multiple",
    a=integer(12, 900),
    b=integer(4, 900),
    answer="Their common multiple is {result}.",
    held_out=True,
    asks=[
        "What is the lcm of {a} and {b}?",
        "Least common multiple of {a} and {b}?",
        "Find lcm {a} {b}.",
        "Smallest number that {a} and {b} divide?",
        "lcm of {a} and {b}, please.",
    ],
    hard=["Which is the first multiple of both {a} and {b}?"],
)
def lcm(a: int, b: int) -> int:
    return math.lcm(a, b)


@tool(
    "Cube of a number",
    x=number(3, 500),
    answer="{x} cubed is {result}.",
    held_out=True,
    asks=[
        "Cube {x}.",
        "What is {x} cubed?",
        "Give me the cube of {x}.",
        "Compute the cube of {x}.",
        "I need {x} cubed.",
    ],
    hard=["Raise {x} to the third power."],
)
def cube(x: float) -> float:
    return neat(x**3)


@tool(
    "Round to some decimals",
    value=number(3, 99, 1.0),
    digits=integer(0, 5),
    answer="Rounded, it is {result}.",
    asks=[
        "Round {value} to {digits} digits.",
        "Round {value} to {digits} places.",
        "Give {value} with {digits} decimals.",
        "Shorten {value} to {digits} decimals.",
        "Round off {value}, {digits} digits.",
    ],
    hard=["Cut {value} down to {digits} decimal places.", "Write {value} using {digits} decimals."],
)
def round_to(value: float, digits: int) -> float:
    if abs(digits) > 12:
        raise ToolError("digits must be between -12 and 12")
    return neat(round(value, digits), 12)


@tool(
    "Keep within bounds",
    value=integer(3, 900),
    low=integer(2, 90),
    high=integer(91, 900),
    answer="Within the bounds it is {result}.",
    asks=[
        "Clamp {value} between {low} and {high}.",
        "Keep {value} between {low} and {high}.",
        "Limit {value} to the range {low} to {high}.",
        "Clamp {value}: low {low}, high {high}.",
        "Force {value} into {low} to {high}.",
    ],
    hard=["Make sure that {value} stays from {low} up to {high}.", "Bound {value} by {low} and {high}."],
)
def clamp(value: int, low: int, high: int) -> int:
    if low > high:
        raise ToolError("low must not be above high")
    return max(low, min(value, high))
