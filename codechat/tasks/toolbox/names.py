"""Tools that make something of a person's name."""

from __future__ import annotations

from codechat.tasks.toolbox.tool import ToolError, tool
from codechat.tasks.toolbox.values import choice, integer, name, word

HELLO = {"en": "Hello", "fr": "Bonjour", "de": "Hallo", "es": "Hola", "it": "Ciao"}
LANGUAGES = {"en": "English", "fr": "French", "de": "German", "es": "Spanish", "it": "Italian"}


def _plain(text: str) -> str:
    letters = "".join(c for c in text.lower() if c.isalnum())
    if not letters:
        raise ToolError("a name must have at least one letter")
    return letters


@tool(
    "Greet a person",
    name=name(),
    answer="{result}",
    asks=[
        'Greet "{name}".',
        "Say hello to {name}.",
        'Welcome "{name}".',
        "Say hi to {name}.",
        "Write a greeting for {name}.",
    ],
    hard=['My friend "{name}" is here; be polite.', "{name} is at the door. Say hello."],
)
def greet(name: str) -> str:
    return f"Hello, {name.strip()}!"


@tool(
    "User name for a person",
    name=name(),
    answer="Take {result}.",
    asks=[
        'Make a user name for "{name}".',
        "Which login fits {name}?",
        'User name for "{name}"?',
        "Create a login for {name}.",
        'I need a user name for "{name}".',
    ],
    hard=["{name} wants to sign up. Which login?", 'Suggest an account name for "{name}".'],
)
def user_name(name: str) -> str:
    plain = _plain(name)
    return f"{plain}{sum(map(ord, plain)) % 100:02d}"


@tool(
    "Name tag for a guest",
    name=name(),
    answer="{result}",
    held_out=True,
    asks=[
        'Make a name tag for "{name}".',
        "Name tag for {name}?",
        'Print a tag for "{name}".',
        "I need a badge for {name}.",
        'Write a tag for our guest "{name}".',
    ],
    hard=["{name} needs something to pin on."],
)
def name_tag(name: str) -> str:
    return f"[ {name.strip().upper()} ]"


@tool(
    "Greet in a language",
    name=name(),
    language=choice(LANGUAGES),
    answer="{result}",
    asks=[
        'Greet "{name}" in {language}.',
        "Say hello to {name} in {language}.",
        'Welcome "{name}" in {language}.',
        "Say hi to {name} in {language}.",
        "How do I greet {name} in {language}?",
    ],
    hard=['"{name}" speaks {language}; say hello.', "A {language} hello for {name}, please."],
)
def greet_in(name: str, language: str) -> str:
    return f"{HELLO[language]}, {name.strip()}!"


@tool(
    "Initials of a person",
    first=name(),
    last=name(),
    answer="The initials are {result}.",
    asks=[
        "What are the initials of {first} {last}?",
        "Initials of {first} {last}?",
        "Give the initials for {first} {last}.",
        "Shorten {first} {last} to initials.",
        'First name "{first}", last name "{last}": which initials?',
    ],
    hard=["How does {first} {last} sign a note with two letters?"],
)
def initials(first: str, last: str) -> str:
    return f"{_plain(first)[0]}{_plain(last)[0]}".upper()


@tool(
    "Mail address of a person",
    name=name(),
    domain=word(),
    answer="Write to {result}",
    asks=[
        'Make an address for "{name}" at "{domain}".',
        "Mail address of {name} at {domain}?",
        'What is the email of "{name}" at "{domain}"?',
        "Email for {name}, domain {domain}.",
        "Build the email of {name} at {domain}.",
    ],
    hard=["{name} works for {domain}. Where do I write to?"],
)
def email_for(name: str, domain: str) -> str:
    return f"{_plain(name)}@{_plain(domain)}.com"


@tool(
    "Seat label for a guest",
    name=name(),
    row=integer(2, 90),
    seat=integer(2, 90),
    answer="{result}",
    asks=[
        'Seat "{name}" in row {row}, seat {seat}.',
        "Put {name} in row {row}, seat {seat}.",
        "Book row {row}, seat {seat} for {name}.",
        "Row {row}, seat {seat} goes to {name}.",
        'Reserve row {row} seat {seat} for "{name}".',
    ],
    hard=["{name} would like to sit in row {row} on seat {seat}."],
)
def seat_label(name: str, row: int, seat: int) -> str:
    return f"{row}-{seat} {name.strip()}"
