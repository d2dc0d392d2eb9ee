"""Pocket apps: the tools, what counts as a change, and experts that solve every problem."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from raising import raising

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.tasks import apps, base, check_reference_solutions, load
from codechat.tasks.apps import catalogue, generator, store
from codechat.tasks.apps.catalogue import TOOLS, Desk
from codechat.tasks.apps.store import AppError, Store, compare
from codechat.text import chat

WORLD: dict[str, list[dict[str, Any]]] = {
    "contacts": [{"id": 10, "name": "Ann", "phone": "12", "email": "ann@home.org"}, {"id": 11, "name": "Bo"}],
    "mails": [{"id": 20, "sender": "bo@work.org", "subject": "tea", "body": "at four", "unread": 1}],
    "events": [{"id": 30, "title": "walk", "day": "2030-01-02", "start": "09:00", "guests": "Ann"}],
    "notes": [{"id": 40, "title": "list", "text": "milk"}, {"id": 41, "title": "Listen", "text": "bird"}],
    "products": [{"id": 50, "name": "lamp", "price": 700, "stock": 5}],
    "orders": [
        {"id": 60, "product": 50, "quantity": 1},
        {"id": 61, "product": 50, "quantity": 1, "status": "delivered"},
    ],
    "files": [{"id": 70, "path": "a/b.txt", "text": "hello"}],
}

# A call, and what it changes.
CHANGES: list[tuple[str, dict[str, Any], list[list[Any]]]] = [
    ("contacts_set_phone", {"id": 10, "phone": "99"}, [["set", "contacts", 10, "phone", "99"]]),
    ("contacts_delete", {"id": 11}, [["removed", "contacts", 11]]),
    ("contacts_set_circle", {"id": 11, "circle": "x"}, [["set", "contacts", 11, "circle", "x"]]),
    ("contacts_set_email", {"id": 11, "email": "x@y"}, [["set", "contacts", 11, "email", "x@y"]]),
    ("contacts_set_birthday", {"id": 11, "day": "2030-01-01"}, [["set", "contacts", 11, "birthday", "2030-01-01"]]),
    ("contacts_rename", {"id": 11, "name": "Cy"}, [["set", "contacts", 11, "name", "Cy"]]),
    ("mail_star", {"id": 20}, [["set", "mails", 20, "starred", 1]]),
    ("mail_mark_read", {"id": 20}, [["set", "mails", 20, "unread", 0]]),
    ("mail_mark_unread", {"id": 20}, []),
    ("mail_unstar", {"id": 20}, []),
    ("mail_move", {"id": 20, "folder": "trash"}, [["set", "mails", 20, "folder", "trash"]]),
    ("mail_delete", {"id": 20}, [["removed", "mails", 20]]),
    ("calendar_move", {"id": 30, "day": "2031-02-03"}, [["set", "events", 30, "day", "2031-02-03"]]),
    ("calendar_set_start", {"id": 30, "start": "10:00"}, [["set", "events", 30, "start", "10:00"]]),
    ("calendar_set_length", {"id": 30, "minutes": 5}, [["set", "events", 30, "minutes", 5]]),
    ("calendar_set_place", {"id": 30, "place": "park"}, [["set", "events", 30, "place", "park"]]),
    ("calendar_rename", {"id": 30, "title": "run"}, [["set", "events", 30, "title", "run"]]),
    ("calendar_invite", {"id": 30, "guest": "Bo"}, [["set", "events", 30, "guests", "Ann, Bo"]]),
    ("calendar_uninvite", {"id": 30, "guest": "Ann"}, [["set", "events", 30, "guests", ""]]),
    ("calendar_delete", {"id": 30}, [["removed", "events", 30]]),
    ("notes_append", {"id": 40, "text": "eggs"}, [["set", "notes", 40, "text", "milk eggs"]]),
    ("notes_replace", {"id": 40, "text": "eggs"}, [["set", "notes", 40, "text", "eggs"]]),
    ("notes_rename", {"id": 40, "title": "x"}, [["set", "notes", 40, "title", "x"]]),
    ("notes_set_tag", {"id": 40, "tag": "x"}, [["set", "notes", 40, "tag", "x"]]),
    ("notes_pin", {"id": 40}, [["set", "notes", 40, "pinned", 1]]),
    ("notes_unpin", {"id": 40}, []),
    ("notes_delete", {"id": 40}, [["removed", "notes", 40]]),
    ("shop_cancel_order", {"id": 60}, [["set", "orders", 60, "status", "cancelled"]]),
    ("shop_return_order", {"id": 61}, [["set", "orders", 61, "status", "returned"]]),
    ("shop_add_to_cart", {"product": 50, "quantity": 2}, [["added", "cart", {"product": 50, "quantity": 2}]]),
    ("shop_wish", {"product": 50}, [["added", "wishes", {"product": 50}]]),
    ("files_write", {"path": "c", "text": "x"}, [["added", "files", {"path": "c", "text": "x", "shared": ""}]]),
    ("files_copy", {"path": "a/b.txt", "to": "c"}, [["added", "files", {"path": "c", "text": "hello", "shared": ""}]]),
    ("files_move", {"path": "a/b.txt", "to": "c"}, [["set", "files", 70, "path", "c"]]),
    ("files_append", {"path": "a/b.txt", "text": "x"}, [["set", "files", 70, "text", "hello x"]]),
    ("files_replace", {"path": "a/b.txt", "text": "x"}, [["set", "files", 70, "text", "x"]]),
    ("files_share", {"path": "a/b.txt", "guest": "Bo"}, [["set", "files", 70, "shared", "Bo"]]),
    ("files_unshare", {"path": "a/b.txt"}, []),
    ("files_delete", {"path": "a/b.txt"}, [["removed", "files", 70]]),
    ("task_answer", {"text": " A  B. "}, [["added", "outcome", {"kind": "answer", "text": "a b"}]]),
    ("task_decline", {}, [["added", "outcome", {"kind": "declined", "text": ""}]]),
]
# A call that changes nothing, and what it returns.
SHOWN: list[tuple[str, dict[str, Any], Any]] = [
    ("contacts_search", {"query": "AN"}, [{"id": 10, "name": "Ann"}]),
    ("contacts_list", {}, [{"id": 10, "name": "Ann"}, {"id": 11, "name": "Bo"}]),
    ("contacts_get", {"id": 11}, {"id": 11, "name": "Bo"}),
    ("contacts_count", {}, 2),
    ("mail_list", {}, [{"id": 20, "sender": "bo@work.org", "subject": "tea"}]),
    ("mail_list", {"folder": "spam"}, []),
    ("mail_search", {"query": "TEA"}, [{"id": 20, "subject": "tea"}]),
    ("mail_read", {"id": 20}, {"sender": "bo@work.org", "subject": "tea", "body": "at four"}),
    ("mail_count", {}, 1),
    ("calendar_list", {"day": "2030-01-02"}, [{"id": 30, "title": "walk", "start": "09:00"}]),
    ("calendar_search", {"query": "%"}, []),
    (
        "calendar_get",
        {"id": 30},
        {"id": 30, "title": "walk", "day": "2030-01-02", "start": "09:00", "minutes": 60, "guests": "Ann"},
    ),
    ("calendar_count", {"day": "2030-01-03"}, 0),
    ("notes_list", {}, [{"id": 40, "title": "list"}, {"id": 41, "title": "Listen"}]),
    ("notes_search", {"query": "list"}, [{"id": 40, "title": "list"}, {"id": 41, "title": "Listen"}]),
    ("notes_read", {"id": 41}, "bird"),
    ("notes_count", {}, 2),
    ("shop_search", {"query": "amp"}, [{"id": 50, "name": "lamp"}]),
    ("shop_get", {"id": 50}, {"id": 50, "name": "lamp", "price": 700, "stock": 5}),
    ("shop_cart", {}, []),
    (
        "shop_orders",
        {},
        [{"id": 60, "product": 50, "status": "placed"}, {"id": 61, "product": 50, "status": "delivered"}],
    ),
    ("shop_get_order", {"id": 61}, {"id": 61, "product": 50, "quantity": 1, "status": "delivered"}),
    ("shop_wishes", {}, []),
    ("files_list", {"folder": "a/"}, ["a/b.txt"]),
    ("files_search", {"query": "B.T"}, ["a/b.txt"]),
    ("files_read", {"path": "a/b.txt"}, "hello"),
    ("files_size", {"path": "a/b.txt"}, 5),
    ("files_count", {}, 1),
]
REJECTED: list[tuple[str, Any, tuple[object, ...]]] = [
    ("notes_read", {"id": 99}, (99, "notes")),
    ("notes_read", {}, ("id",)),
    ("notes_read", {"id": "40"}, ("id", "integer")),
    ("notes_read", {"id": True}, ("id", "integer")),
    ("notes_read", {"id": 40.0}, ("id", "integer")),
    ("notes_read", {"id": 2**70}, ("id",)),
    ("notes_read", {"id": 40, "self": 1}, ("'self'",)),
    ("notes_add", {"title": "x" * 3000, "text": ""}, ("title", 3000, 2000)),
    ("notes_add", {"title": "\ud800", "text": ""}, ("title",)),
    ("notes_read", 40, ("int", "object")),
    ("notes_read", None, ("NoneType", "object")),
    ("notes_read", ["id"], ("list", "object")),
    ("notes_read", "id", ("str", "object")),
    ("shop_checkout", [], ("list", "object")),
    ("notes_fly", {}, ("'notes_fly'",)),
    ("notes__find", {"query": ""}, ("'notes__find'",)),
    ("mail_move", {"id": 20, "folder": "nowhere"}, ("folder", "inbox", "trash")),
    ("mail_send", {"to": "Bo", "subject": "", "body": ""}, ("'Bo'",)),
    ("calendar_set_length", {"id": 30, "minutes": 0}, (0, "minutes", 1, 1440)),
    ("calendar_uninvite", {"id": 30, "guest": "Bo"}, ("'Bo'", "guest")),
    ("calendar_invite", {"id": 30, "guest": "Ann"}, ("'Ann'", "guest")),
    ("shop_add_to_cart", {"product": 50, "quantity": 6}, ("quantity", 6, 5)),
    ("shop_add_to_cart", {"product": 50, "quantity": -1}, ("quantity", -1, 5)),
    ("shop_checkout", {}, ("cart",)),
    ("shop_return_order", {"id": 60}, (60, "placed", "delivered")),
    ("shop_unwish", {"product": 50}, (50, "wishes")),
    ("files_write", {"path": "a/b.txt", "text": ""}, ("'a/b.txt'",)),
    ("files_write", {"path": " ", "text": ""}, ("' '",)),
    ("files_move", {"path": "nope", "to": "x"}, ("'nope'",)),
]


@pytest.fixture
def desk() -> Desk:
    made = Store()
    made.reset(WORLD)
    return Desk(made)


def diff(desk: Desk) -> list[list[Any]]:
    return desk.apps["notes"].store.diff()


def test_there_are_enough_tools_and_each_has_a_schema() -> None:
    assert len(TOOLS) >= 60 and len({tool.app for tool in TOOLS.values()}) == 7
    for name, tool in TOOLS.items():
        assert tool.schema["name"] == name and tool.schema["description"]
        assert all(p["type"] in catalogue.KINDS for p in tool.schema["parameters"]["properties"].values())
    assert "self" not in json.dumps([t.schema for t in TOOLS.values()])


@pytest.mark.parametrize(("name", "arguments", "changes"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_tool_makes_its_change_and_no_other(
    desk: Desk, name: str, arguments: dict[str, Any], changes: list[list[Any]]
) -> None:
    desk.call(name, arguments)
    assert diff(desk) == changes


@pytest.mark.parametrize(("name", "arguments", "result"), SHOWN, ids=[f"{s[0]}-{i}" for i, s in enumerate(SHOWN)])
def test_reading_changes_nothing(desk: Desk, name: str, arguments: dict[str, Any], result: Any) -> None:
    assert desk.call(name, arguments) == result and diff(desk) == []


@pytest.mark.parametrize(("name", "arguments", "named"), REJECTED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REJECTED)])
def test_an_invalid_call_names_what_is_wrong_and_changes_nothing(
    desk: Desk, name: str, arguments: Any, named: tuple[object, ...]
) -> None:
    with raising(AppError, *named):
        desk.call(name, arguments)
    assert diff(desk) == []


def test_every_tool_is_tried_here() -> None:
    tried = {row[0] for row in (*CHANGES, *SHOWN)} | {
        "contacts_add",
        "mail_send",
        "mail_reply",
        "mail_forward",
        "calendar_add",
        "notes_add",
    }
    assert tried | {"shop_remove_from_cart", "shop_set_quantity", "shop_checkout", "shop_unwish"} == set(TOOLS)


def test_new_rows_have_the_given_values(desk: Desk) -> None:
    made = {
        "contacts_add": {"name": "Cy", "phone": "1"},
        "mail_send": {"to": "a@b", "subject": "s", "body": "t"},
        "mail_reply": {"id": 20, "body": "yes"},
        "mail_forward": {"id": 20, "to": "c@d"},
        "calendar_add": {"title": "t", "day": "d", "start": "s"},
        "notes_add": {"title": "t", "text": "x"},
    }
    for name, arguments in made.items():
        assert isinstance(desk.call(name, arguments), int)
    rows = [c[2] for c in diff(desk)]
    assert [r["recipient"] for r in rows if "recipient" in r] == ["a@b", "bo@work.org", "c@d"]
    assert [r["subject"] for r in rows if "recipient" in r] == ["s", "Re: tea", "Fwd: tea"]
    assert {r["minutes"] for r in rows if "minutes" in r} == {60}


def test_an_order_takes_the_cart_and_the_stock(desk: Desk) -> None:
    for name, arguments in [
        ("shop_add_to_cart", {"product": 50}),
        ("shop_add_to_cart", {"product": 50, "quantity": 2}),
        ("shop_set_quantity", {"product": 50, "quantity": 4}),
    ]:
        desk.call(name, arguments)
    assert desk.call("shop_checkout", {}) == 1
    assert diff(desk) == [
        ["set", "products", 50, "stock", 1],
        ["added", "orders", {"product": 50, "quantity": 4, "status": "placed"}],
    ]
    desk.call("shop_wish", {"product": 50})
    desk.call("shop_unwish", {"product": 50})
    desk.call("shop_add_to_cart", {"product": 50})
    desk.call("shop_remove_from_cart", {"product": 50})
    assert len(diff(desk)) == 2


def test_restore_returns_to_the_snapshot(desk: Desk) -> None:
    held = desk.apps["notes"].store
    desk.call("notes_pin", {"id": 40})
    held.snapshot()
    before = held.dump()
    desk.call("notes_delete", {"id": 40})
    desk.call("notes_add", {"title": "a", "text": "b"})
    held.snapshot()
    desk.call("notes_delete", {"id": 41})
    held.restore()
    assert len(diff(desk)) == 2
    held.restore()
    assert held.dump() == before and diff(desk) == [["set", "notes", 40, "pinned", 1]]
    held.reset(WORLD)
    assert diff(desk) == []


def test_changes_are_compared_as_a_multiset_and_named() -> None:
    a, b, c = (
        ["removed", "notes", 4],
        ["set", "mails", 2, "starred", 1],
        ["added", "notes", {"title": "x", "text": "", "tag": "", "pinned": 0}],
    )
    assert compare([a, b], [b, a]) == (2, [], [])
    assert compare([a], [a, b, c]) == (1, [], ["mails 2: starred = 1", "notes added: title 'x'"])
    assert compare([c, c], [c]) == (1, ["notes added: title 'x'"], []) and compare([c], [c, c])[2] == [
        "notes added: title 'x'"
    ]


def test_rewards_rise_with_the_tiers() -> None:
    a, b, c, d = (["removed", "notes", i] for i in range(4))
    found = [apps.score_changes([a, b], changes) for changes in ([c], [], [a, c], [a], [a, b, c, d], [a, b, c], [b, a])]
    assert [s.tier for s in found] == ["harm", "idle", "partial", "partial", "collateral", "collateral", "done"]
    assert [s.reward for s in found] == [0, 0, 0.125, 0.25, 0.125, 0.25, 1] and [s.correct for s in found] == [
        False
    ] * 6 + [True]
    assert found[2].parts == {
        "matched": 1,
        "required": 2,
        "missing": ["notes 1 removed"],
        "collateral": ["notes 2 removed"],
    }


# ------------------------------------------------------------------ problems


@pytest.mark.parametrize("level", apps.LEVELS)
def test_every_expert_solves_its_problem(level: int) -> None:
    task = apps.AppsTask(levels=[level])
    found = task.problems("train", 40)
    assert (
        check_reference_solutions(task, found).ok
        and {p.meta["level"] for p in found} == {level}
        and len({p.id for p in found}) == 40
    )
    world = task.environment()
    for problem in found:
        messages = apps.trajectory(problem, world)
        assert (
            world.score().correct
            and world.state_diff() == problem.gold["changes"]
            and messages[: len(problem.messages)] == problem.messages
        )
        assert not any("error" in m["content"] for m in messages if m["role"] == "function")
        declined = any(c["name"] == "task_decline" for c in problem.gold["calls"])
        assert declined == (level == 5) and set(TOOLS) >= set(problem.meta["tools"]) >= {
            c["name"] for c in problem.gold["calls"]
        }


def test_each_level_has_its_kind_of_request() -> None:
    calls = {level: [len(p.gold["calls"]) for p in apps.problems("select", 20, 1, [level])] for level in (1, 2)}
    calls[3] = [len(p.gold["calls"]) for p in apps.problems("select", 40, 1, [3])]
    assert set(calls[1]) == {1} and min(calls[2]) >= 2 and min(calls[3]) >= 2 and max(calls[3]) >= 4
    spread = [{c["name"].partition("_")[0] for c in p.gold["calls"]} for p in apps.problems("select", 40, 1, [3])]
    assert all(len(names) == 2 for names in spread)
    assert all(len(p.meta["tools"]) >= 10 for p in apps.problems("select", 10, 1, [4]))


def test_problems_depend_on_the_seed_alone_and_a_shorter_list_begins_a_longer_one() -> None:
    found = apps.problems("train", 60, 3)
    assert apps.problems("train", 12, 3) == found[:12] != apps.problems("train", 12, 4)
    assert not {m["id"].removeprefix("episodes-") for m in apps.dialogues("train", 20, 3)} & {p.id for p in found}


def test_levels_1_and_2_can_be_limited_to_some_apps() -> None:
    for problem in load('apps:levels=[1,2],apps=["notes","contacts"]').problems("train", 20):
        assert {name.partition("_")[0] for name in problem.meta["tools"]} <= {"notes", "contacts", "task"}


def test_test_requests_share_no_word_with_training() -> None:
    def words(split: str) -> set[str]:
        problems = apps.problems(split, 40, 0, [1, 2])
        return {
            str(v).lower()
            for p in problems
            for c in p.gold["calls"]
            for k, v in c["arguments"].items()
            if k in ("query", "title", "name", "phone", "day")
        }

    assert len(words("test")) > 20 and not words("test") & words("train")


def test_the_gold_answer_is_not_in_the_prompt() -> None:
    for problem in apps.problems("train", 100, 0, [2, 3]):
        said = "".join(m["content"] for m in problem.messages)
        assert "functioncall" not in said and "changes" not in said


def test_a_conversation_reads_as_an_episode_and_ends_with_the_assistant() -> None:
    for row in apps.dialogues("train", 20):
        roles = [m["role"] for m in row["messages"]]
        assert roles[:3] == ["system", "user", "assistant"] and roles[-1] == "assistant" and row["domain"] == "episodes"
        assert all(a != b for a, b in zip(roles, roles[1:]))


def test_invalid_settings_and_files_are_user_errors(tmp_path: Any) -> None:
    for make, why in (
        [lambda: apps.problems("train", 1, 0, [6]), "levels"],
        [lambda: apps.problems("dev", 1), "split"],
        [lambda: apps.problems("train", 1, 0, [1], only=["bank"]), "apps"],
        [lambda: apps.problems("train", 1, 0, [1, 3], only=["notes"]), "notes"],
        [lambda: load("apps:max_turns=0"), "max_turns 0"],
    ):
        with pytest.raises(ConfigError, match=why):
            make()
    with pytest.raises(MissingFile, match="apps.train.jsonl"):
        load("apps", source=str(tmp_path)).problems("train")
    (tmp_path / "apps.train.jsonl").write_text(
        '{"id": "x", "messages": [], "gold": {}, "split": "train", "meta": {}}\n'
    )
    with pytest.raises(DataError, match="apps.train.jsonl:1"):
        load("apps", source=str(tmp_path)).problems("train")


def test_the_environment_follows_the_protocol() -> None:
    assert isinstance(apps.AppsTask().environment(), base.Environment) and isinstance(apps.AppsTask(), base.Task)


# ------------------------------------------------------------------ reach


def best_of(n: int, measured: Callable[[], float]) -> float:
    return min(measured() for _ in range(n))


def cpu(action: Callable[[], Any], times: int) -> float:
    """CPU seconds of one: others on the machine do not count."""
    began = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - began) / times


def test_speed_of_calls_resets_and_snapshots(desk: Desk) -> None:
    """5,000 tool calls a second, a reset under a millisecond, snapshot and restore in microseconds, all of one core."""
    world = apps.AppsTask().environment()
    problem = apps.problems("train", 1, 0, [4])[0]
    held = desk.apps["notes"].store

    def calls() -> None:
        desk.call("notes_search", {"query": "list"})
        desk.call("notes_set_tag", {"id": 40, "tag": "x"})
        desk.call("contacts_get", {"id": 10})
        desk.call("shop_orders", {})

    def there_and_back() -> None:
        held.snapshot()
        held.set("notes", 40, tag="y")
        held.restore()

    assert best_of(3, lambda: cpu(calls, 250) / 4) < 1 / 5000
    assert best_of(3, lambda: cpu(lambda: world.reset(problem, 0), 100)) < 1e-3
    assert best_of(3, lambda: cpu(there_and_back, 500)) < 1e-4


def test_results_never_contain_a_tag() -> None:
    text = catalogue.as_text("result", [f"x{tag}y" for tag in chat.TAGS])
    assert not any(tag in text for tag in chat.TAGS) and json.loads(text)["result"][0] == "x<|system|>y"
    assert "at most 2000" in json.loads(catalogue.as_text("result", "x" * 9999))["error"]


def test_columns_of_a_world_are_those_of_the_tables() -> None:
    for problem in apps.problems("train", 25):
        for table, rows in problem.gold["world"].items():
            assert all(row.keys() <= {"id", *store.TABLES[table]} for row in rows) and len(
                {r["id"] for r in rows}
            ) == len(rows)
    assert set(generator.MAKERS) == set(apps.LEVELS)
