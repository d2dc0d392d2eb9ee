"""Tools for prices, bills and interest; amounts carry no currency."""

from __future__ import annotations

from codechat.tasks.toolbox.tool import ToolError, neat, tool
from codechat.tasks.toolbox.values import integer, number


def _need_count(**counts: int) -> None:
    for name, count in counts.items():
        if not 1 <= count <= 1_000_000:
            raise ToolError(f"{name} must be between 1 and 1000000")


@tool(
    "Tip for a bill",
    amount=number(5, 900),
    percent=integer(5, 40),
    answer="The tip is {result}.",
    asks=[
        "What is a {percent} percent tip on {amount}?",
        "Tip {percent} percent on {amount}.",
        "How much is {percent} percent tip for a bill of {amount}?",
        "The bill is {amount}. Tip {percent} percent?",
        "Work out the tip: {amount} at {percent} percent.",
    ],
    hard=["Dinner cost {amount}; what do I leave at {percent} percent?", "Tip of {percent}% for {amount}?"],
)
def tip(amount: float, percent: int) -> float:
    return neat(amount * percent / 100, 2)


@tool(
    "Share a bill",
    amount=number(5, 900),
    people=integer(2, 40),
    answer="Each pays {result}.",
    asks=[
        "Split {amount} among {people} people.",
        "What does each pay if {people} share {amount}?",
        "Share a bill of {amount} by {people}.",
        "Divide {amount} between {people} friends.",
        "{people} of us pay {amount}. How much each?",
    ],
    hard=["We were {people} and it cost {amount}. What does one owe?"],
)
def split_bill(amount: float, people: int) -> float:
    _need_count(people=people)
    return neat(amount / people, 2)


@tool(
    "Price after a discount",
    price=number(5, 900),
    percent=integer(5, 90),
    answer="It costs {result} now.",
    asks=[
        "What is {price} with {percent} percent off?",
        "Take {percent} percent off {price}.",
        "Price {price}, discount {percent} percent.",
        "How much is {price} after a {percent} percent discount?",
        "A coat costs {price}, {percent} percent off. What do I pay?",
    ],
    hard=["It was {price} and is {percent} percent cheaper today. How much now?"],
)
def discount(price: float, percent: int) -> float:
    return neat(price * (1 - percent / 100), 2)


@tool(
    "Price with tax",
    price=number(5, 900),
    rate=integer(3, 30),
    answer="With tax it is {result}.",
    held_out=True,
    asks=[
        "What is {price} plus {rate} percent tax?",
        "Add {rate} percent tax to {price}.",
        "Price {price}, tax {rate} percent.",
        "How much is {price} with {rate} percent tax?",
        "Tax {price} at {rate} percent.",
    ],
    hard=["The shop adds {rate} percent to {price}. What do I pay?"],
)
def add_tax(price: float, rate: int) -> float:
    return neat(price * (1 + rate / 100), 2)


@tool(
    "Savings with interest",
    amount=integer(50, 5000),
    rate=integer(2, 15),
    years=integer(2, 40),
    answer="You will have {result}.",
    asks=[
        "What are {amount} at {rate} percent worth in {years} years?",
        "Save {amount} at {rate} percent for {years} years.",
        "Interest: {amount}, {rate} percent, {years} years.",
        "How much is {amount} after {years} years at {rate} percent?",
        "Grow {amount} by {rate} percent over {years} years.",
    ],
    hard=["I put away {amount} for {years} years at {rate} percent. What do I get?"],
)
def savings(amount: int, rate: int, years: int) -> float:
    _need_count(years=years)
    return neat(amount * (1 + rate / 100) ** years, 2)


@tool(
    "Monthly loan payment",
    amount=integer(200, 9000),
    rate=integer(2, 15),
    months=integer(6, 90),
    answer="You pay {result} a month.",
    asks=[
        "Monthly payment for a loan of {amount} at {rate} percent over {months} months?",
        "Loan {amount}, rate {rate} percent, {months} months.",
        "Pay back {amount} at {rate} percent in {months} months.",
        "What does a loan of {amount} cost monthly at {rate} percent for {months} months?",
        "I borrow {amount} at {rate} percent for {months} months. What is the payment?",
    ],
    hard=["How much a month for {amount}, {rate} percent a year, {months} months?"],
)
def loan_payment(amount: int, rate: int, months: int) -> float:
    _need_count(months=months)
    monthly = rate / 1200
    return neat(amount / months if not monthly else amount * monthly / (1 - (1 + monthly) ** -months), 2)


@tool(
    "Double an amount",
    amount=number(3, 2000),
    answer="Twice {amount} is {result}.",
    asks=[
        "Double {amount}.",
        "What is twice {amount}?",
        "Two times {amount}?",
        "How much is {amount} doubled?",
        "Give me twice {amount}.",
    ],
    hard=["I get {amount} two times. How much is that?", "{amount} and the same again?"],
)
def double(amount: float) -> float:
    return neat(amount * 2, 2)


@tool(
    "Half of an amount",
    amount=number(3, 2000),
    answer="Half of {amount} is {result}.",
    asks=[
        "What is half of {amount}?",
        "Halve {amount}.",
        "Half of {amount}?",
        "Give me half of {amount}.",
        "How much is {amount} cut in half?",
    ],
    hard=["Two of us share {amount} equally. How much each?", "Divide {amount} in two."],
)
def halve(amount: float) -> float:
    return neat(amount / 2, 2)
