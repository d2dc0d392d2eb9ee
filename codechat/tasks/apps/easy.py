"""Requests of levels 1 and 2: one call, and a look-up before the call.

A draft is a request before its problem is built: its text, the tools that it needs, and an expert that solves it with
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from codechat.tasks.apps.world import Draw, Rows


class Caller(Protocol):
    """Runs a call and returns its result."""

    def __call__(self, tool: str, /, **arguments: Any) -> Any: ...


class Draft(NamedTuple):
    """tools: those that the expert calls, besides `task_answer` and `task_decline`."""

    request: str
    tools: tuple[str, ...]
    expert: Callable[[Caller], None]


class Direct(NamedTuple):
    """One call; the request holds its arguments. slots: argument -> a method of Draw, or "table.column" of an existing
    row."""

    tool: str
    says: tuple[str, ...]
    slots: dict[str, str]


class Lookup(NamedTuple):
    """The request names a row by its key. The tool `act` takes the row's id as the argument `by`. slots: further
    arguments."""

    search: str
    key: str  # table.column
    act: str
    says: tuple[str, ...]
    slots: dict[str, str]
    by: str = "id"


class Ask(NamedTuple):
    """The request names a row by its key and asks for one column of what `read` shows; None = all of it."""

    search: str
    key: str
    read: str
    column: str | None
    says: tuple[str, ...]


DIRECT = (
    Direct(
        "contacts_add",
        ("Add {name} with phone {phone} to my contacts.", "New contact: {name}, phone {phone}."),
        {"name": "name", "phone": "phone"},
    ),
    Direct(
        "contacts_set_phone",
        ("Contact {id} has the new phone {phone}.", "Set the phone of contact {id} to {phone}."),
        {"id": "contacts.id", "phone": "phone"},
    ),
    Direct("contacts_delete", ("Delete contact {id}.", "Remove contact {id}."), {"id": "contacts.id"}),
    Direct(
        "notes_add",
        ("Write a note {title}: {text}", "New note with title {title} and text {text}"),
        {"title": "word", "text": "phrase"},
    ),
    Direct("notes_delete", ("Delete note {id}.", "Throw note {id} away."), {"id": "notes.id"}),
    Direct("notes_pin", ("Pin note {id}.", "Note {id} should be pinned."), {"id": "notes.id"}),
    Direct(
        "notes_set_tag",
        ("Tag note {id} with {tag}.", "Give note {id} the tag {tag}."),
        {"id": "notes.id", "tag": "word"},
    ),
    Direct(
        "calendar_add",
        ("Add {title} on {day} at {start} to my calendar.", "New event: {title}, {day}, {start}."),
        {"title": "word", "day": "day", "start": "clock"},
    ),
    Direct("calendar_delete", ("Delete event {id}.", "Cancel event {id}."), {"id": "events.id"}),
    Direct(
        "calendar_move", ("Move event {id} to {day}.", "Event {id} is on {day} now."), {"id": "events.id", "day": "day"}
    ),
    Direct(
        "calendar_set_place",
        ("Event {id} is at {place}.", "Set the place of event {id} to {place}."),
        {"id": "events.id", "place": "name"},
    ),
    Direct(
        "mail_send",
        ("Mail to {to}, subject {subject}: {body}", "Send {to} a mail about {subject} that says {body}"),
        {"to": "email", "subject": "word", "body": "phrase"},
    ),
    Direct("mail_star", ("Star mail {id}.", "Put a star on mail {id}."), {"id": "mails.id"}),
    Direct("mail_delete", ("Delete mail {id}.", "Throw mail {id} away."), {"id": "mails.id"}),
    Direct(
        "mail_move",
        ("Move mail {id} to {folder}.", "Mail {id} belongs into {folder}."),
        {"id": "mails.id", "folder": "folder"},
    ),
    Direct(
        "shop_add_to_cart",
        ("Put {quantity} of product {product} into the cart.", "Add product {product} to my cart, {quantity} of it."),
        {"product": "products.id", "quantity": "quantity"},
    ),
    Direct(
        "shop_wish",
        ("Put product {product} on my wish list.", "I wish for product {product}."),
        {"product": "products.id"},
    ),
    Direct("shop_cancel_order", ("Cancel order {id}.", "I do not want order {id} any more."), {"id": "orders.id"}),
    Direct(
        "files_write",
        ("Write {text} into the new file {path}", "New file {path} with the text {text}"),
        {"path": "path", "text": "phrase"},
    ),
    Direct("files_delete", ("Delete the file {path}", "Remove {path}"), {"path": "files.path"}),
    Direct(
        "files_move", ("Move {path} to {to}", "Rename the file {path} to {to}"), {"path": "files.path", "to": "path"}
    ),
)

LOOKUPS = (
    Lookup(
        "contacts_search",
        "contacts.name",
        "contacts_set_phone",
        ("{key} has the new phone {phone}.", "Set the phone of {key} to {phone}."),
        {"phone": "phone"},
    ),
    Lookup(
        "contacts_search",
        "contacts.name",
        "contacts_delete",
        ("Delete my contact {key}.", "Remove {key} from my contacts."),
        {},
    ),
    Lookup(
        "contacts_search",
        "contacts.name",
        "contacts_set_circle",
        ("Put {key} into the circle {circle}.", "{key} belongs to the circle {circle}."),
        {"circle": "word"},
    ),
    Lookup("notes_search", "notes.title", "notes_delete", ("Delete the note {key}.", "Throw the note {key} away."), {}),
    Lookup("notes_search", "notes.title", "notes_pin", ("Pin the note {key}.", "The note {key} should be pinned."), {}),
    Lookup(
        "notes_search",
        "notes.title",
        "notes_set_tag",
        ("Tag the note {key} with {tag}.", "Give the note {key} the tag {tag}."),
        {"tag": "word"},
    ),
    Lookup(
        "notes_search",
        "notes.title",
        "notes_append",
        ("Add to the note {key}: {text}", "The note {key} should also say {text}"),
        {"text": "phrase"},
    ),
    Lookup(
        "calendar_search", "events.title", "calendar_delete", ("Delete the event {key}.", "Cancel the event {key}."), {}
    ),
    Lookup(
        "calendar_search",
        "events.title",
        "calendar_move",
        ("Move the event {key} to {day}.", "The event {key} is on {day} now."),
        {"day": "day"},
    ),
    Lookup(
        "calendar_search",
        "events.title",
        "calendar_set_place",
        ("The event {key} is at {place}.", "Set the place of the event {key} to {place}."),
        {"place": "name"},
    ),
    Lookup(
        "calendar_search",
        "events.title",
        "calendar_set_length",
        ("The event {key} takes {minutes} minutes.", "Make the event {key} {minutes} minutes."),
        {"minutes": "minutes"},
    ),
    Lookup(
        "mail_search",
        "mails.subject",
        "mail_star",
        ("Star the mail about {key}.", "Put a star on the mail about {key}."),
        {},
    ),
    Lookup(
        "mail_search",
        "mails.subject",
        "mail_delete",
        ("Delete the mail about {key}.", "Throw the mail about {key} away."),
        {},
    ),
    Lookup(
        "mail_search",
        "mails.subject",
        "mail_reply",
        ("Answer the mail about {key}: {body}", "Reply {body} to the mail about {key}"),
        {"body": "phrase"},
    ),
    Lookup(
        "mail_search",
        "mails.subject",
        "mail_move",
        ("Move the mail about {key} to {folder}.", "The mail about {key} belongs into {folder}."),
        {"folder": "folder"},
    ),
    Lookup(
        "shop_search",
        "products.name",
        "shop_add_to_cart",
        ("Put {quantity} {key} into the cart.", "Add {key} to my cart, {quantity} of it."),
        {"quantity": "quantity"},
        "product",
    ),
    Lookup(
        "shop_search", "products.name", "shop_wish", ("Put {key} on my wish list.", "I wish for {key}."), {}, "product"
    ),
)

ASKS = (
    Ask(
        "contacts_search",
        "contacts.name",
        "contacts_get",
        "phone",
        ("What is the phone of {key}?", "Which phone does {key} have?"),
    ),
    Ask(
        "calendar_search",
        "events.title",
        "calendar_get",
        "day",
        ("On which day is the event {key}?", "When is the event {key}? Give the day."),
    ),
    Ask(
        "notes_search", "notes.title", "notes_read", None, ("What does the note {key} say?", "Read me the note {key}.")
    ),
    Ask(
        "mail_search",
        "mails.subject",
        "mail_read",
        "sender",
        ("Who wrote the mail about {key}?", "Who sent me the mail about {key}?"),
    ),
    Ask("shop_search", "products.name", "shop_get", "price", ("What does {key} cost?", "What is the price of {key}?")),
)


def filled(slots: dict[str, str], draw: Draw, rows: Rows) -> dict[str, Any]:
    """Arguments for the slots: sampled, or taken from an existing row."""
    found = {}
    for argument, kind in slots.items():
        table, _, column = kind.partition(".")
        found[argument] = rows.pick(table)[column] if column else getattr(draw, kind)()
    return found


Kind = TypeVar("Kind", Direct, Lookup | Ask)


def within(kinds: Sequence[Kind], apps: Collection[str]) -> list[Kind]:
    """The kinds of some apps; of all where none is named."""
    return [kind for kind in kinds if not apps or kind[0].partition("_")[0] in apps]


def one_call(draw: Draw, rows: Rows, apps: Collection[str] = ()) -> Draft:
    """Level 1: a call whose arguments are all in the request."""
    kind = draw.rng.choice(within(DIRECT, apps))
    arguments = filled(kind.slots, draw, rows)
    return Draft(
        draw.rng.choice(kind.says).format(**arguments), (kind.tool,), lambda call: call(kind.tool, **arguments)
    )


def look_up(draw: Draw, rows: Rows, apps: Collection[str] = (), *, there: bool = True) -> Draft:
    """Level 2: find a row by its name, then act on its id or answer with its content. there=False: the row is missing,
    decline."""
    kind = draw.rng.choice(within((*LOOKUPS, *ASKS), apps))
    table, _, column = kind.key.partition(".")
    key = rows.pick(table)[column] if there else (draw.name() if table == "contacts" else draw.word())
    return (_ask if isinstance(kind, Ask) else _act)(kind, key, draw, rows)


def _act(kind: Lookup, key: str, draw: Draw, rows: Rows) -> Draft:
    arguments = filled(kind.slots, draw, rows)

    def expert(call: Caller) -> None:
        found = call(kind.search, query=key)
        if found:
            call(kind.act, **{kind.by: found[0]["id"]}, **arguments)
        else:
            call("task_decline")

    return Draft(draw.rng.choice(kind.says).format(key=key, **arguments), (kind.search, kind.act), expert)


def _ask(kind: Ask, key: str, draw: Draw, rows: Rows) -> Draft:
    def expert(call: Caller) -> None:
        found = call(kind.search, query=key)
        if not found:
            return call("task_decline")
        shown = call(kind.read, id=found[0]["id"])
        call("task_answer", text=str(shown if kind.column is None else shown[kind.column]))

    return Draft(draw.rng.choice(kind.says).format(key=key), (kind.search, kind.read), expert)
