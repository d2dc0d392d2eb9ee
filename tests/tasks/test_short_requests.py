"""Short requests for well-known programs: every program is right, and none is what the natural requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from codechat.core.config import parse
from codechat.data import conversations
from codechat.evaluation import natural
from codechat.tasks.coding import prepare, short_requests

RIGHT = {
    "quicksort": "quicksort([3, 1, 2, 3]) == [1, 2, 3, 3] and quicksort([]) == []",
    "insertion_sort": "insertion_sort([3, 1, 2, 3]) == [1, 2, 3, 3]",
    "selection_sort": "selection_sort([3, 1, 2, 3]) == [1, 2, 3, 3]",
    "linear_search": "linear_search([4, 5], 5) == 1 and linear_search([], 1) == -1",
    "factorial": "factorial(5) == 120 and factorial(0) == 1",
    "is_prime": "[n for n in range(12) if is_prime(n)] == [2, 3, 5, 7, 11]",
    "is_palindrome": "is_palindrome('level') and not is_palindrome('ab')",
    "sum_list": "sum_list([1, 2, 3]) == 6",
    "product": "product([2, 3, 4]) == 24",
    "find_max": "find_max([1, 7, 3]) == 7",
    "find_min": "find_min([4, 1, 3]) == 1",
    "average": "average([1, 2, 3]) == 2",
    "median": "median([3, 1, 2]) == 2 and median([4, 1, 2, 3]) == 2.5",
    "count_vowels": "count_vowels('Apple pie') == 4",
    "remove_vowels": "remove_vowels('Apple pie') == 'ppl p'",
    "capitalize_words": "capitalize_words('a big dog') == 'A Big Dog'",
    "celsius_to_fahrenheit": "celsius_to_fahrenheit(100) == 212",
    "fahrenheit_to_celsius": "fahrenheit_to_celsius(212) == 100",
    "power": "power(2, 10) == 1024",
    "reverse_list": "reverse_list([1, 2, 3]) == [3, 2, 1]",
    "reverse_words": "reverse_words('a b c') == 'c b a'",
    "chunks": "chunks([1, 2, 3], 2) == [[1, 2], [3]]",
    "to_dict": "to_dict(['a'], [1]) == {'a': 1}",
    "invert_dict": "invert_dict({'a': 1}) == {1: 'a'}",
    "merge_dicts": "merge_dicts({'a': 1}, {'b': 2}) == {'a': 1, 'b': 2}",
    "add_matrices": "add_matrices([[1, 2]], [[3, 4]]) == [[4, 6]]",
    "multiply_matrices": "multiply_matrices([[1, 2], [3, 4]], [[5, 6], [7, 8]]) == [[19, 22], [43, 50]]",
    "identity_matrix": "identity_matrix(2) == [[1, 0], [0, 1]]",
    "dot_product": "dot_product([1, 2], [3, 4]) == 11",
    "caesar_cipher": "caesar_cipher('xyz Abc!', 3) == 'abc Def!'",
    "hello": "hello() is None",
    "greet": "greet('Ada') == 'Hello, Ada!'",
    "is_leap_year": "[y for y in (1900, 2000, 2023, 2024) if is_leap_year(y)] == [2000, 2024]",
    "digit_sum": "digit_sum(-123) == 6",
    "count_digits": "count_digits(1005) == 4",
    "binary_to_decimal": "binary_to_decimal('1010') == 10",
    "decimal_to_binary": "decimal_to_binary(10) == '1010' and decimal_to_binary(0) == '0'",
    "is_even": "is_even(4) and not is_even(3)",
    "even_numbers": "even_numbers([1, 2, 4]) == [2, 4]",
    "odd_numbers": "odd_numbers([1, 2, 3]) == [1, 3]",
    "squares": "squares([1, 2, 3]) == [1, 4, 9]",
    "sum_of_squares": "sum_of_squares([1, 2, 3]) == 14",
    "clamp": "[clamp(n, 0, 5) for n in (-1, 3, 9)] == [0, 3, 5]",
    "absolute": "absolute(-3) == 3 == absolute(3)",
    "divisors": "divisors(12) == [1, 2, 3, 4, 6, 12]",
    "prime_factors": "prime_factors(12) == [2, 2, 3]",
    "is_perfect": "[n for n in range(1, 30) if is_perfect(n)] == [6, 28]",
    "lcm": "lcm(4, 6) == 12",
    "triangle_number": "triangle_number(4) == 10",
    "times_table": "times_table(3)[-1] == 30",
    "hamming_distance": "hamming_distance('abc', 'axc') == 1",
    "common_items": "common_items([1, 2, 3], [3, 2]) == [2, 3]",
    "rotate": "rotate([1, 2, 3], 1) == [2, 3, 1]",
    "subsets": "subsets([1, 2]) == [[], [1], [2], [1, 2]]",
    "is_sorted": "is_sorted([1, 1, 2]) and not is_sorted([2, 1])",
    "argmax": "argmax([1, 5, 2]) == 1",
    "count_letter": "count_letter('banana', 'a') == 3",
    "count_words": "count_words('a b c') == 3",
    "distance": "distance(0, 0, 3, 4) == 5",
    "circle_area": "round(circle_area(2), 3) == 12.566",
    "rectangle_area": "rectangle_area(2, 3) == 6",
    "compound_interest": "round(compound_interest(100, 0.1, 2), 6) == 121",
    "running_totals": "running_totals([1, 2, 3]) == [1, 3, 6]",
    "differences": "differences([1, 4, 9]) == [3, 5]",
    "move_zeros": "move_zeros([0, 1, 0, 2]) == [1, 2, 0, 0]",
    "common_prefix": "common_prefix('flower', 'flow') == 'flow'",
    "join_with_commas": "join_with_commas(['a', 'b']) == 'a, b'",
    "to_numbers": "to_numbers('1 2') == [1, 2]",
    "read_lines": "write_file(path, 'a\\nb') is None and read_lines(path) == ['a', 'b']",
    "write_file": "write_file(path, 'x') is None",
    "sort_by_length": "sort_by_length(['bbb', 'a']) == ['a', 'bbb']",
    "group_by_first_letter": "group_by_first_letter(['ab', 'ac', 'b']) == {'a': ['ab', 'ac'], 'b': ['b']}",
    "shared_letters": "shared_letters('abc', 'cb') == ['b', 'c']",
    "to_camel_case": "to_camel_case('a_big_dog') == 'aBigDog'",
    "Stack": "[s := Stack(), s.push(1), s.push(2), s.pop()][-1] == 2",
}


def defined(code: str) -> str:
    return code.split("(")[0].split(":")[0].split()[1]


def test_every_program_is_right(tmp_path: Path) -> None:
    scope = {"path": str(tmp_path / "file.txt")}
    exec(short_requests.PROGRAMS.read_text(encoding="utf-8"), scope)
    found = {defined(code) for _, code in short_requests.programs()}
    assert found == set(RIGHT)
    assert [name for name, claim in RIGHT.items() if not eval(claim, scope)] == []


def test_no_program_is_asked_for_by_the_natural_requests_but_quicksort() -> None:
    texts = [(m["content"], True) for row in short_requests.short_rows() for m in row["messages"]]
    found = natural.find_trained(natural.read_requests(), texts)
    assert {key: how for key, how in found.items() if "function" in how} == {"code-01": found["code-01"]}
    assert set(found) == {"code-01"}  # "write quicksort" itself


def test_requests_of_one_split_are_not_in_another() -> None:
    rows = list(short_requests.short_rows())
    by_split = {
        s: {r["messages"][0]["content"] for r in rows if r["meta"]["split"] == s} for s in ("train", "select", "test")
    }
    assert len(rows) == sum(map(len, by_split.values())) and min(map(len, by_split.values())) > 50
    assert len({r["id"] for r in rows}) == len(rows)


@pytest.mark.parametrize("short", [True, False])
def test_the_data_stage_writes_them_where_asked(short: bool, tmp_path: Path) -> None:
    words = ["--tokenizer", "bytes", "--max-examples", "20", "--out", str(tmp_path), *(["--short"] if short else [])]
    manifest = prepare.prepare_sft(parse(prepare.SftConfig, words))
    assert ("short" in manifest["domains"]) == short
    if short:
        rows = list(conversations.read(tmp_path / "short.train.jsonl"))
        assert all(row["messages"][-1]["content"].startswith(("def ", "class ")) for row in rows)
        assert {row["meta"]["tools_present"] for row in rows} == {True, False}  # code is code, whatever is on offer
