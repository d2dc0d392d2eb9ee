"""Requests of levels 3 to 5: across apps, with distractors, and impossible requests that must be declined."""

from __future__ import annotations

from typing import Any

from codechat.tasks.apps.easy import Caller, Draft, look_up
from codechat.tasks.apps.store import Row
from codechat.tasks.apps.world import Draw, Rows

TALK = (
    "It rains and I slept badly.",
    "My sister says hello.",
    "Yesterday I lost my keys, but that is another story.",
    "I am on the train.",
    "Do not worry about the shop today.",
    "First coffee, then work.",
)


def _id(call: Caller, tool: str, query: str) -> int:
    return call(tool, query=query)[0]["id"]


# ------------------------------------------------------------------ level 3


def mail_a_contact(draw: Draw, rows: Rows) -> Draft:
    name, subject, body = rows.pick("contacts")["name"], draw.word(), draw.phrase()

    def expert(call: Caller) -> None:
        shown = call("contacts_get", id=_id(call, "contacts_search", name))
        call("mail_send", to=shown["email"], subject=subject, body=body)

    return Draft(f"Mail {name}, subject {subject}: {body}", ("contacts_search", "contacts_get", "mail_send"), expert)


def place_from_note(draw: Draw, rows: Rows) -> Draft:
    note, event = rows.pick("notes")["title"], rows.pick("events")["title"]

    def expert(call: Caller) -> None:
        place = call("notes_read", id=_id(call, "notes_search", note))
        call("calendar_set_place", id=_id(call, "calendar_search", event), place=place)

    return Draft(
        f"The note {note} says where the event {event} is. Set its place.",
        ("notes_search", "notes_read", "calendar_search", "calendar_set_place"),
        expert,
    )


def mail_to_file(draw: Draw, rows: Rows) -> Draft:
    subject, path = rows.pick("mails")["subject"], draw.path()

    def expert(call: Caller) -> None:
        call("files_write", path=path, text=call("mail_read", id=_id(call, "mail_search", subject))["body"])

    return Draft(
        f"Save the text of the mail about {subject} as {path}", ("mail_search", "mail_read", "files_write"), expert
    )


def file_to_note(draw: Draw, rows: Rows) -> Draft:
    path, title = rows.pick("files")["path"], draw.word()

    def expert(call: Caller) -> None:
        call("notes_add", title=title, text=call("files_read", path=path))

    return Draft(f"Make a note {title} with the text of the file {path}", ("files_read", "notes_add"), expert)


def invite_a_contact(draw: Draw, rows: Rows) -> Draft:
    name, event = rows.pick("contacts")["name"], rows.pick("events")["title"]

    def expert(call: Caller) -> None:
        email = call("contacts_get", id=_id(call, "contacts_search", name))["email"]
        call("calendar_invite", id=_id(call, "calendar_search", event), guest=email)

    return Draft(
        f"Invite {name} to the event {event}, by mail address.",
        ("contacts_search", "contacts_get", "calendar_search", "calendar_invite"),
        expert,
    )


def wish_what_a_note_says(draw: Draw, rows: Rows) -> Draft:
    note, product = rows.pick("notes"), rows.pick("products")["name"]
    note["text"] = product

    def expert(call: Caller) -> None:
        name = call("notes_read", id=_id(call, "notes_search", note["title"]))
        call("shop_wish", product=_id(call, "shop_search", name))

    return Draft(
        f"The note {note['title']} names a product. Put it on my wish list.",
        ("notes_search", "notes_read", "shop_search", "shop_wish"),
        expert,
    )


def keep_a_sender(draw: Draw, rows: Rows) -> Draft:
    subject, name, phone = rows.pick("mails")["subject"], draw.name(), draw.phone()

    def expert(call: Caller) -> None:
        sender = call("mail_read", id=_id(call, "mail_search", subject))["sender"]
        call("contacts_add", name=name, phone=phone, email=sender)

    return Draft(
        f"The mail about {subject} is from {name}, phone {phone}. Add the sender to my contacts, with the mail address.",
        ("mail_search", "mail_read", "contacts_add"),
        expert,
    )


ACROSS = (
    mail_a_contact,
    place_from_note,
    mail_to_file,
    file_to_note,
    invite_a_contact,
    wish_what_a_note_says,
    keep_a_sender,
)


def across(draw: Draw, rows: Rows) -> Draft:
    """Level 3: what one app shows is needed in another."""
    return draw.rng.choice(ACROSS)(draw, rows)


# ------------------------------------------------------------------ level 4


def _act_on_twin(
    request: str, tools: tuple[str, str, str], row: Row, key: str, column: str, by: str = "id", **arguments: Any
) -> Draft:
    """Search by the row's key, show each row found, and call the last tool on the one whose `column` has the row's
    value."""
    search, get, act = tools
    query, value = row[key], row[column]

    def expert(call: Caller) -> None:
        found = next(r["id"] for r in call(search, query=query) if call(get, id=r["id"])[column] == value)
        call(act, **{by: found}, **arguments)

    return Draft(request, tools, expert)


def one_of_two_events(draw: Draw, rows: Rows) -> Draft:
    event, _ = rows.twin("events", day=draw.day(), start=draw.clock())
    return _act_on_twin(
        f"Delete the event {event['title']} that is on {event['day']}.",
        ("calendar_search", "calendar_get", "calendar_delete"),
        event,
        "title",
        "day",
    )


def one_of_two_contacts(draw: Draw, rows: Rows) -> Draft:
    (contact, _), phone = rows.twin("contacts", phone=draw.phone(), email=draw.email()), draw.phone()
    return _act_on_twin(
        f"{contact['name']} with the address {contact['email']} has the new phone {phone}.",
        ("contacts_search", "contacts_get", "contacts_set_phone"),
        contact,
        "name",
        "email",
        phone=phone,
    )


def one_of_two_mails(draw: Draw, rows: Rows) -> Draft:
    (mail, _), body = rows.twin("mails", sender=draw.email(), body=draw.phrase()), draw.phrase()
    request = f"Answer the mail about {mail['subject']} from {mail['sender']}: {body}"
    return _act_on_twin(request, ("mail_search", "mail_read", "mail_reply"), mail, "subject", "sender", body=body)


def one_of_two_products(draw: Draw, rows: Rows) -> Draft:
    product, _ = rows.twin("products", price=draw.rng.randint(1000, 9999))
    request = f"Put the {product['name']} that costs {product['price']} on my wish list, not the other one."
    return _act_on_twin(request, ("shop_search", "shop_get", "shop_wish"), product, "name", "price", by="product")


def talk(draw: Draw, rows: Rows) -> Draft:
    draft = look_up(draw, rows)
    first, last = draw.rng.sample(TALK, 2)
    return draft._replace(request=f"{first} {draft.request} {last}")


DISTRACTED = (one_of_two_events, one_of_two_contacts, one_of_two_mails, one_of_two_products, talk)


def distracted(draw: Draw, rows: Rows) -> Draft:
    """Level 4: twins that differ in one detail, small talk around the request, and more tools than needed."""
    return draw.rng.choice(DISTRACTED)(draw, rows)


# ------------------------------------------------------------------ level 5


def not_there(draw: Draw, rows: Rows) -> Draft:
    return look_up(draw, rows, there=False)


def too_many(draw: Draw, rows: Rows) -> Draft:
    product = rows.pick("products")
    quantity = product["stock"] + draw.rng.randint(1, 40)

    def expert(call: Caller) -> None:
        if call("shop_get", id=_id(call, "shop_search", product["name"]))["stock"] < quantity:
            call("task_decline")

    return Draft(
        f"Put {quantity} {product['name']} into the cart.", ("shop_search", "shop_get", "shop_add_to_cart"), expert
    )


def nothing_known(draw: Draw, rows: Rows) -> Draft:
    contact = rows.pick("contacts")
    contact["phone"] = ""

    def expert(call: Caller) -> None:
        if "phone" not in call("contacts_get", id=_id(call, "contacts_search", contact["name"])):
            call("task_decline")

    return Draft(f"What is the phone of {contact['name']}?", ("contacts_search", "contacts_get"), expert)


def no_file(draw: Draw, rows: Rows) -> Draft:
    path, title = draw.path(), draw.word()

    def expert(call: Caller) -> None:
        if not call("files_search", query=path):
            call("task_decline")

    return Draft(
        f"Make a note {title} with the text of the file {path}", ("files_search", "files_read", "notes_add"), expert
    )


IMPOSSIBLE = (not_there, not_there, too_many, nothing_known, no_file)


def impossible(draw: Draw, rows: Rows) -> Draft:
    """Level 5: what the request names is missing, unknown or out of stock. The tools are those that the request would
    need."""
    return draw.rng.choice(IMPOSSIBLE)(draw, rows)
