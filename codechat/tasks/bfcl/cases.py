"""Hand-written problems in the leaderboard's format. Each tests one of its type and value rules.

They need no download, so the whole evaluation runs anywhere. A score on them is not a leaderboard score.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
TEXT, WHOLE, REAL, YES = {"type": "string"}, {"type": "integer"}, {"type": "float"}, {"type": "boolean"}
LABELS, REALS = {"type": "array", "items": TEXT}, {"type": "array", "items": REAL}


def _tool(name: str, about: str, required: str = "", /, **properties: Row) -> Row:
    return {
        "name": name,
        "description": about,
        "parameters": {"type": "dict", "properties": properties, "required": required.split()},
    }


WEATHER = _tool(
    "weather.get",
    "Weather of a city on a day",
    "city",
    city=TEXT,
    day=TEXT,
    units={"type": "string", "enum": ["celsius", "kelvin"]},
)
TRANSFER = _tool(
    "bank.transfer", "Move money to an account", "account amount", account=TEXT, amount=REAL, urgent=YES, note=TEXT
)
TIMER = _tool("set_timer", "Start a timer", "minutes", minutes=WHOLE, label=TEXT)
LIGHT = _tool("set_light", "Switch a light", "room on", room=TEXT, on=YES, percent=WHOLE)
MEAN = _tool("stats.mean", "Mean of numbers", "values", values=REALS, digits=WHOLE)
TAGGER = _tool("tag_photo", "Write labels into a photo", "file labels", file=TEXT, labels=LABELS)
AREA = _tool("map.box", "Draw a box on a map", "corner", corner={"type": "tuple", "items": REAL}, title=TEXT)
QUERY = _tool(
    "db.find",
    "Find rows",
    "table where",
    table=TEXT,
    where={"type": "dict", "properties": {"age": WHOLE, "city": TEXT, "active": YES}},
    limit=WHOLE,
)
ORDER = _tool(
    "shop.order",
    "Order goods",
    "lines",
    lines={"type": "array", "items": {"type": "dict", "properties": {"sku": TEXT, "count": WHOLE}}},
)
MATRIX = _tool(
    "matrix.trace",
    "Trace of a square matrix",
    "rows",
    rows={"type": "array", "items": {"type": "array", "items": WHOLE}},
)
PLOT = _tool("plot_column", "Plot a column of a data frame", "column", column=REALS, title=TEXT)
FIND = _tool("contacts.find", "Find a contact", "", name=TEXT, phone=TEXT)
NOTE = _tool("note.save", "Save a note in a folder", "text folder", text=TEXT, folder=TEXT)
SHARE = _tool("file.share", "Share a file", "file", file=TEXT, people=LABELS)


def _row(name: str, category: str, request: str, tools: list[Row], *truth: Row, system: str = "") -> Row:
    given = [{"role": "system", "content": system}] if system else []
    return {
        "id": name,
        "category": category,
        "question": [[*given, {"role": "user", "content": request}]],
        "functions": tools,
        "ground_truth": list(truth),
    }


ROWS = (
    _row(
        "optional",
        "simple",
        "What will the weather be in Oslo?",
        [WEATHER],
        {"weather.get": {"city": ["Oslo", "Oslo, Norway"], "day": ["", "today"], "units": ["", "celsius"]}},
    ),
    _row(
        "due_though_optional",
        "simple",
        "What will the weather be in Oslo, in kelvin?",
        [WEATHER],
        {"weather.get": {"city": ["Oslo"], "day": [""], "units": ["kelvin"]}},
    ),
    _row(
        "int_for_float",
        "simple",
        "Send 50 to account DE-7 without hurry.",
        [TRANSFER],
        {"bank.transfer": {"account": ["DE-7"], "amount": [50.0], "urgent": ["", False], "note": [""]}},
    ),
    _row(
        "float_for_int",
        "simple",
        "Set a timer of 12 minutes.",
        [TIMER],
        {"set_timer": {"minutes": [12], "label": [""]}},
    ),
    _row(
        "bool_is_no_int",
        "simple",
        "Turn the kitchen light on at 1 percent.",
        [LIGHT],
        {"set_light": {"room": ["kitchen"], "on": [True], "percent": [1]}},
    ),
    _row(
        "punctuation",
        "simple",
        "Label the timer 'Dr. O'Neill, 3-4 p.m.' and let it run for 5 minutes.",
        [TIMER],
        {"set_timer": {"minutes": [5], "label": ["Dr. O'Neill, 3-4 p.m."]}},
    ),
    _row(
        "list_of_floats",
        "simple",
        "What is the mean of 1, 2.5 and 4?",
        [MEAN],
        {"stats.mean": {"values": [[1.0, 2.5, 4.0]], "digits": [""]}},
    ),
    _row(
        "list_in_order",
        "simple",
        "Put the labels dog and beach, in this order, into a.jpg.",
        [TAGGER],
        {"tag_photo": {"file": ["a.jpg"], "labels": [["dog", "beach"]]}},
    ),
    _row(
        "list_in_any_order",
        "simple",
        "Put the labels dog and beach into b.jpg.",
        [TAGGER],
        {"tag_photo": {"file": ["b.jpg"], "labels": [["dog", "beach"], ["beach", "dog"]]}},
    ),
    _row(
        "tuple",
        "simple",
        "Draw a box with its corner at 59.9, 10.7.",
        [AREA],
        {"map.box": {"corner": [[59.9, 10.7]], "title": ["", "box"]}},
    ),
    _row(
        "object",
        "simple",
        "Find people of 30 years in Rome or Roma; active or not does not matter.",
        [QUERY],
        {
            "db.find": {
                "table": ["people", "persons"],
                "where": [{"age": [30], "city": ["Rome", "Roma"], "active": ["", False]}],
                "limit": [""],
            }
        },
    ),
    _row(
        "list_of_objects",
        "simple",
        "Order two of A-1 and then one of B-2.",
        [ORDER],
        {"shop.order": {"lines": [[{"sku": ["A-1"], "count": [2]}, {"sku": ["B-2"], "count": [1]}]]}},
    ),
    _row(
        "nested_list",
        "simple",
        "What is the trace of [[1, 2], [3, 4]]?",
        [MATRIX],
        {"matrix.trace": {"rows": [[[1, 2], [3, 4]]]}},
    ),
    _row(
        "variable",
        "simple",
        "Plot the column df['Height'].",
        [PLOT],
        {"plot_column": {"column": ["df['Height']"], "title": [""]}},
    ),
    _row("nothing_due", "simple", "Show me my contacts.", [FIND], {"contacts.find": {"name": [""], "phone": [""]}}),
    _row(
        "required_though_blank",
        "simple",
        "Save the note 'buy milk'.",
        [NOTE],
        {"note.save": {"text": ["buy milk"], "folder": ["", "inbox"]}},
    ),
    _row(
        "optional_list",
        "simple",
        "Share plan.pdf with nobody in particular.",
        [SHARE],
        {"file.share": {"file": ["plan.pdf"], "people": [""]}},
    ),
    _row(
        "choice",
        "multiple",
        "Wake me in 20 minutes.",
        [WEATHER, TIMER, LIGHT],
        {"set_timer": {"minutes": [20], "label": ["", "wake up"]}},
    ),
    _row(
        "choice_by_wording",
        "multiple",
        "Pay 9.5 to account X1, urgently.",
        [LIGHT, TRANSFER],
        {"bank.transfer": {"account": ["X1"], "amount": [9.5], "urgent": [True], "note": ["", "payment"]}},
    ),
    _row(
        "any_order",
        "parallel",
        "Set timers of 3, 5 and 8 minutes.",
        [TIMER],
        *({"set_timer": {"minutes": [n], "label": [""]}} for n in (3, 5, 8)),
    ),
    _row(
        "overlapping_answers",
        "parallel",
        "Weather of Bergen, or Oslo if you like, and then certainly of Oslo.",
        [WEATHER],
        {"weather.get": {"city": ["Oslo", "Bergen"], "day": [""], "units": [""]}},
        {"weather.get": {"city": ["Oslo"], "day": [""], "units": [""]}},
    ),
    _row(
        "the_same_twice",
        "parallel",
        "Start two timers of 10 minutes.",
        [TIMER],
        *({"set_timer": {"minutes": [10], "label": [""]}} for _ in "ab"),
    ),
    _row(
        "two_functions",
        "parallel_multiple",
        "Switch the hall light off and tell me the weather in Rome.",
        [TIMER, WEATHER, LIGHT],
        {"set_light": {"room": ["hall"], "on": [False], "percent": ["", 0]}},
        {"weather.get": {"city": ["Rome"], "day": ["", "today"], "units": [""]}},
    ),
    _row("no_function", "irrelevance", "Translate 'good morning' into Finnish.", [WEATHER, TIMER]),
    _row("no_tools", "irrelevance", "What is the weather in Oslo?", []),
    _row(
        "own_system_text",
        "live_simple",
        "light bath ON pls!!",
        [LIGHT],
        {"set_light": {"room": ["bath", "bathroom"], "on": [True], "percent": [""]}},
        system="You run a house. Be brief.",
    ),
    _row(
        "null",
        "live_multiple",
        "find Ann, phone unknown",
        [TIMER, FIND],
        {"contacts.find": {"name": ["Ann"], "phone": [None, ""]}},
    ),
    _row("any_call", "live_relevance", "Somebody is at home; do what you think fits.", [LIGHT, FIND]),
    _row("no_function_live", "live_irrelevance", "book me a flight 2morrow", [LIGHT]),
)
