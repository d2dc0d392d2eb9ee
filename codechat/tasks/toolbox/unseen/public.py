"""Tools for networks, elections, queues, libraries, post, navigation, printing and ships."""

from __future__ import annotations

import math

from codechat.tasks.toolbox.tool import ToolError, neat, need_within, tool
from codechat.tasks.toolbox.values import integer, name, number, phrase, word

SUBJECTS = (
    "general works,philosophy,religion,social sciences,language,science,technology,arts,literature,history".split(",")
)
WINDS = "N NE E SE S SW W NW".split()
BITS_PER_BYTE = 8
LEADING = 1.2
PAGES_PER_SHEET = 4


@tool(
    "Subnet mask for a network",
    hosts=integer(3, 9000),
    answer="Use the mask {result}.",
    held_out=True,
    asks=[
        "Which subnet mask fits {hosts} hosts?",
        "Subnet mask for {hosts} hosts?",
        "Network of {hosts} hosts: which mask?",
        "Mask a network for {hosts} computers.",
        "Size a subnet for {hosts} devices.",
    ],
    hard=["Our office network has {hosts} machines. What do I type under the IP address?"],
)
def subnet_mask(hosts: int) -> str:
    need_within(1, 2**30 - 2, hosts=hosts)
    mask = 2**32 - 2 ** (hosts + 1).bit_length()
    return ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))


@tool(
    "Download wait for MB at Mbit",
    megabytes=number(3, 9000),
    megabits=integer(3, 900),
    answer="It takes {result} seconds.",
    held_out=True,
    asks=[
        "How long is the wait for {megabytes} MB at {megabits} Mbit?",
        "Download {megabytes} MB at {megabits} Mbit: how long?",
        "Download wait: {megabytes} MB, {megabits} Mbit.",
        "Wait for {megabytes} MB over {megabits} Mbit?",
        "When have {megabytes} megabytes come over {megabits} megabits?",
    ],
    hard=["I stream a film of {megabytes} MB over {megabits} megabits. When is it here?"],
)
def download_wait(megabytes: float, megabits: int) -> float:
    need_within(0, 10**12, megabytes=megabytes)
    need_within(1, 10**9, megabits=megabits)
    return neat(megabytes * BITS_PER_BYTE / megabits, 1)


@tool(
    "Strength of a password",
    password=word(),
    answer="It has {result} bits.",
    held_out=True,
    asks=[
        'How strong is the password "{password}"?',
        'Strength of the password "{password}"?',
        "Is {password} a safe password?",
        'Rate "{password}" against hackers.',
        "Password strength: {password}",
    ],
    hard=['Would anybody guess the password "{password}"?'],
)
def password_bits(password: str) -> float:
    kinds = {c: "a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "#" for c in password}
    alphabet = sum({"a": 26, "A": 26, "0": 10, "#": 33}[kind] for kind in set(kinds.values()))
    return neat(len(password) * math.log2(alphabet or 1), 1)


@tool(
    "Votes for a majority",
    ballots=integer(30, 90000),
    answer="{result} votes win.",
    held_out=True,
    asks=[
        "How many votes are a majority of {ballots}?",
        "Majority of {ballots} votes?",
        "There are {ballots} ballots. What is a majority?",
        "{ballots} people vote. How many must say yes?",
        "Votes to win with {ballots} ballots?",
    ],
    hard=["The club has {ballots} votes. When is a motion carried?"],
)
def majority(ballots: int) -> int:
    need_within(1, 10**12, ballots=ballots)
    return ballots // 2 + 1


@tool(
    "Election quota for a mandate",
    votes=integer(100, 90000),
    mandates=integer(2, 90),
    answer="The quota is {result} votes.",
    held_out=True,
    asks=[
        "What is the quota for {mandates} mandates and {votes} votes?",
        "Election quota: {votes} votes, {mandates} mandates.",
        "Quota of {votes} votes for {mandates} mandates?",
        "Droop quota for {votes} votes, {mandates} places?",
        "{mandates} councillors, {votes} votes: who is in?",
    ],
    hard=["Our election has {votes} votes for {mandates} councillors. When is one in for sure?"],
)
def droop_quota(votes: int, mandates: int) -> int:
    need_within(0, 10**12, votes=votes, mandates=mandates)
    return votes // (mandates + 1) + 1


@tool(
    "Wait in a queue at tills",
    customers=integer(3, 300),
    tills=integer(2, 30),
    minutes=integer(2, 60),
    answer="You wait {result} minutes.",
    held_out=True,
    asks=[
        "Wait in a queue of {customers}, {tills} tills, {minutes} minutes each?",
        "Queue of {customers} at {tills} tills, {minutes} minutes each: how long?",
        "Queue wait: {customers} customers, {tills} tills, {minutes} minutes.",
        "How long do {customers} wait at {tills} tills, {minutes} minutes each?",
        "I am behind {customers} people, {tills} tills, {minutes} minutes each. How long?",
    ],
    hard=["There are {customers} ahead of me and {tills} desks; each takes {minutes} minutes. Do I wait?"],
)
def queue_wait(customers: int, tills: int, minutes: int) -> int:
    need_within(0, 10**9, customers=customers, minutes=minutes)
    need_within(1, 10**9, tills=tills)
    return customers // tills * minutes


@tool(
    "Subject of a library shelf",
    shelf=integer(3, 999),
    answer="You find {result} there.",
    held_out=True,
    asks=[
        "Which subject is on library shelf {shelf}?",
        "Subject of shelf {shelf}?",
        "What do I find in the library at {shelf}?",
        "Books under Dewey {shelf} are about what?",
        "Library shelf {shelf}: which books?",
    ],
    hard=["A library book has {shelf} on its back. What is it about?"],
)
def dewey_subject(shelf: int) -> str:
    need_within(0, 999, shelf=shelf)
    return SUBJECTS[shelf // 100]


@tool(
    "Girth of a parcel",
    depth=number(3, 300),
    breadth=number(3, 300),
    height=number(3, 300),
    answer="The girth is {result} cm.",
    held_out=True,
    asks=[
        "What is the girth of a parcel {depth} by {breadth} by {height}?",
        "Parcel girth: {depth}, {breadth}, {height} cm.",
        "Girth of {depth} x {breadth} x {height} cm?",
        "Measure the girth of {depth} by {breadth} by {height}.",
        "Does the post take a parcel of {depth} by {breadth} by {height}?",
    ],
    hard=["I tie a string around my parcel, {depth} by {breadth} by {height} cm. How long?"],
)
def parcel_girth(depth: float, breadth: float, height: float) -> float:
    need_within(0, 10**6, depth=depth, breadth=breadth, height=height)
    return neat(2 * sum(sorted((depth, breadth, height))[:2]), 1)


@tool(
    "Telegram of a message",
    message=phrase(2, 4),
    answer="{result}",
    held_out=True,
    asks=[
        'Send "{message}" as a telegram.',
        'Telegram: "{message}"',
        'Wire the message "{message}".',
        'Put "{message}" on a telegram.',
        'Cable "{message}" to my aunt.',
    ],
    hard=['How did one send the message "{message}" in 1920?'],
)
def telegram(message: str) -> str:
    return f"{message.strip()} STOP"


@tool(
    "Bearing to sail back",
    bearing=integer(10, 359),
    answer="Steer {result} degrees.",
    held_out=True,
    asks=[
        "We sailed on bearing {bearing}. Which bearing leads back?",
        "Back bearing of {bearing}?",
        "What is the way back from bearing {bearing}?",
        "Sail back: we came on {bearing} degrees.",
        "Which course is opposite to {bearing} degrees?",
    ],
    hard=["We steer {bearing} and want to sail home. Which course?"],
)
def back_bearing(bearing: int) -> int:
    need_within(0, 360, bearing=bearing)
    return (bearing + 180) % 360


@tool(
    "Compass direction of a course",
    course=integer(10, 359),
    answer="The compass shows {result}.",
    held_out=True,
    asks=[
        "Which compass direction is a course of {course}?",
        "Compass direction of {course} degrees?",
        "Our course is {course} degrees. Is that north or south?",
        "Name the wind that blows from {course} degrees.",
        "Course {course}: where does the compass point?",
    ],
    hard=["The compass needle stands at {course}. Which way do I walk?"],
)
def compass_rose(course: int) -> str:
    need_within(0, 360, course=course)
    return WINDS[round(course / 45) % 8]


@tool(
    "Leading of a font in points",
    size=number(4, 200, 0.3),
    answer="Set {result} points of leading.",
    held_out=True,
    asks=[
        "What leading does a font of {size} points need?",
        "Leading for {size} points?",
        "Font of {size} points: which leading?",
        "Leading of a {size} point font?",
        "How far apart are lines at {size} points?",
    ],
    hard=["The rows of my font touch at {size} points. How much room do I give?"],
)
def font_leading(size: float) -> float:
    need_within(0.1, 10_000, size=size)
    return neat(size * LEADING, 1)


@tool(
    "Sheets to print a booklet",
    pages=integer(5, 900),
    answer="You need {result} sheets.",
    held_out=True,
    asks=[
        "How many sheets does a booklet of {pages} pages take?",
        "Sheets for {pages} pages of a booklet?",
        "Print a booklet of {pages} pages: how many sheets?",
        "I staple {pages} pages in the middle. How much paper is that?",
        "Booklet with {pages} pages: how many sheets?",
    ],
    hard=["Our booklet has {pages} pages, folded once. What do I put in the tray?"],
)
def booklet_sheets(pages: int) -> int:
    need_within(0, 10**9, pages=pages)
    return math.ceil(pages / PAGES_PER_SHEET)


@tool(
    "Christen a ship",
    ship=name(),
    answer="{result}",
    held_out=True,
    asks=[
        'Christen the ship "{ship}".',
        "Christen our new ship {ship}.",
        "We launch the ship {ship} today.",
        'Break the bottle on "{ship}".',
        "Baptise the ship {ship}.",
    ],
    hard=['The mayor throws champagne at the ship "{ship}". What does she say?'],
)
def christen(ship: str) -> str:
    if not ship.strip():
        raise ToolError("ship must not be empty")
    return f"I name this ship MS {ship.strip()}"
