"""Tests that only define what is to be run: the judge runs it, in the program's favour only
where it is right."""

import textwrap
from typing import Any

import pytest

from codechat_lab.sandbox.pool import Pool, Program

RIGHT = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return 'no idea'"

WEAK = "assert add(0, 0) is not None"  # passes for both

# Sources that a right program passes and a wrong one does not.
STYLES = {
    "a function": ["def test_add():\n    assert add(1, 2) == 3"],
    "a function without underscore": ["def test():\n    assert add(1, 2) == 3"],
    "an async function": [
        (
            "import asyncio\nasync def test_add():\n    await "
            "asyncio.sleep(0)\n    assert add(1, 2) == 3"
        )
    ],
    "a function with a default": ["def test_add(a=1, b=2):\n    assert add(a, b) == 3"],
    "functions, the last of which is wrong": [
        "def test_one():\n    pass\ndef test_two():\n    assert add(1, 2) == 3"
    ],
    "a function with hooks": [
        "def setup_module(module):\n    global a\n    a = 1\n"
        "def setup_function():\n    global b\n    b = 2\n"
        "def test_add():\n    assert add(a, b) == 3"
    ],
    "a class": ["class TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3"],
    "a class with hooks": [
        "class TestAdd:\n    @classmethod\n    def setup_class(cls): cls.a = 1\n"
        "    def setup_method(self, method): self.b = 2\n"
        "    def test_add(self):\n        assert add(self.a, self.b) == 3"
    ],
    "a class with an async method": [
        "class TestAdd:\n    async def test_add(self):\n        assert add(1, 2) == 3"
    ],
    "an inherited method": [
        (
            "class Base:\n    def test_add(self):\n        assert add(1, "
            "2) == self.sum\nclass TestAdd(Base):\n    sum = 3"
        )
    ],
    "a TestCase": [
        "import unittest\nclass Sums(unittest.TestCase):\n    def setUp(self): self.a = 1\n"
        "    def test_add(self): self.assertEqual(add(self.a, 2), 3)"
    ],
    "a TestCase with class hooks": [
        "from unittest import TestCase\nclass Sums(TestCase):\n    @classmethod\n    def setUpClass(cls): cls.a = 1\n"
        "    def test_add(self): self.assertEqual(add(self.a, 2), 3)"
    ],
    "a TestCase with subtests": [
        "import unittest\nclass Sums(unittest.TestCase):\n    def test_add(self):\n        for a in (1, 2):\n"
        "            with self.subTest(a=a):\n                self.assertEqual(add(a, 2), a + 2)"
    ],
    "an async TestCase": [
        "import unittest\nclass Sums(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_add(self): self.assertEqual(add(1, 2), 3)"
    ],
    "a TestCase with main": [
        "import unittest\nclass Sums(unittest.TestCase):\n    def test_add(self): self.assertEqual(add(1, 2), 3)\n"
        "if __name__ == '__main__':\n    unittest.main()"
    ],
    "a runner that leaves with its status": [
        "import sys, unittest\nclass Sums(unittest.TestCase):\n    def test_add(self): self.assertEqual(add(1, 2), 3)\n"
        "if __name__ == '__main__':\n"
        "    done = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Sums))\n"
        "    sys.exit(not done.wasSuccessful())"
    ],
    "a body of a script": [
        "def helper():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    helper()"
    ],
    "check alone": ["def check(candidate):\n    assert candidate(1, 2) == 3"],
    "check among two": [
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        "assert add(0, 0) is not None",
    ],
    "check that is called": ["def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"],
    "check with more parameters as a helper": [
        "def check(a, b, c):\n    assert add(a, b) == c",
        "check(1, 2, 3)",
    ],
    "an async check": ["async def check(candidate):\n    assert candidate(1, 2) == 3"],
    "a helper called like a test": [
        "def test_sum(a, b, c):\n    assert add(a, b) == c\ntest_sum(1, 2, 3)"
    ],
    "a helper of tests": [
        "def test_sum(a, b, c):\n    assert add(a, b) == c\ndef test_all():\n"
        "    for i in range(3): test_sum(i, i, 2 * i)"
    ],
    "a skipped test beside another": [
        "import unittest\n@unittest.skip('later')\ndef test_later():\n    1 / 0\ndef test_add():\n"
        "    assert add(1, 2) == 3"
    ],
}

# As above, where the other source or test of each passes for both programs.
STYLES |= {
    "a class in a class": [
        (
            "class TestAdd:\n    class TestSmall:\n        def "
            "test_add(self):\n            assert add(1, 2) == 3"
        ),
        WEAK,
    ],
    "a static method": [
        "class TestAdd:\n    @staticmethod\n    def test_add():\n        assert add(1, 2) == 3",
        WEAK,
    ],
    "a cached function": [
        "import functools\n@functools.cache\ndef test_add():\n    assert add(1, 2) == 3",
        WEAK,
    ],
    "a partial": [
        (
            "import functools\ndef same(c):\n    assert add(1, 2) == "
            "c\ntest_add = functools.partial(same, 3)"
        ),
        WEAK,
    ],
    "a callable object": [
        "class Sum:\n    def __call__(self):\n        assert add(1, 2) == 3\ntest_add = Sum()",
        WEAK,
    ],
    "another name of the program": ["test_one = add\nassert test_one(1, 2) == 3"],
    "a helper in a source of its own": [
        "def same(a, b, c):\n    assert add(a, b) == c",
        "same(1, 2, 3)",
        WEAK,
    ],
    "values in a source of their own": ["c = 3", "assert add(1, 2) == c", WEAK],
}

# Sources that no program may pass, beside one that every program passes.
NOT_RUN = {
    "a function that is never called": "def run_tests():\n    assert add(1, 2) == 3",
    "check of another name": "def check_add(candidate):\n    assert candidate(1, 2) == 3",
    "a list of tests": "TESTS = [lambda: add(1, 2) == 3]",
    "a class that no runner knows": (
        "class AddTest:\n    def test_add(self):\n        assert add(1, 2) == 3"
    ),
    "a test that yields": "def test_add():\n    yield\n    assert add(1, 2) == 3",
    "an async test that yields": "async def test_add():\n    yield\n    assert add(1, 2) == 3",
    "a test that yields beside another": "def test_add():\n    yield\n    assert add(1, 2) == 3\n"
    "def test_weak():\n    add(0, 0)",
    "a case that is left out": "if not __name__:\n    assert add(1, 2) == 3",
    "an object that is never run": "import unittest\ndef one():\n    assert add(1, 2) == 3\n"
    "case = unittest.FunctionTestCase(one)",
}

# Sources that no program may pass.
NOTHING = {
    "no statement": ["# assert add(1, 2) == 3"],
    "its own solution": ["def add(a, b):\n    return a + b\nassert add(1, 2) == 3"],
    "a function that is never called": ["def verify():\n    assert add(1, 2) == 3"],
    "a class of another name": [
        "class Sums:\n    def test_add(self):\n        assert add(1, 2) == 3"
    ],
    "every test skipped": [
        "import unittest\n@unittest.skip('later')\ndef test_add():\n    assert add(1, 2) == 3"
    ],
    "a fixture": ["def test_add(three):\n    assert add(1, 2) == three"],
    "a constructor": [
        "class TestAdd:\n    def __init__(self): self.sum = 3\n    def test_add(self):\n"
        "        assert add(1, 2) == self.sum"
    ],
    "several that use nothing": ["x = 1", "assert True", "def test_nothing():\n    assert x"],
}


def judged(pool: Pool, code: str, tests: list[str], **more: Any) -> Any:
    return pool.run(
        Program(
            code=textwrap.dedent(code),
            tests=tests,
            entry_points=("add",),
            timeout_s=4.0,
            **more,
        )
    )


@pytest.mark.parametrize("tests", STYLES.values(), ids=STYLES)
def test_what_a_source_defines_is_run(tests: list[str], pool: Pool) -> None:
    right, wrong = (judged(pool, code, tests) for code in (RIGHT, WRONG))
    assert right.passed, right.reason
    assert not wrong.passed


@pytest.mark.parametrize("tests", NOTHING.values(), ids=NOTHING)
def test_tests_that_use_no_entry_point_pass_nothing(tests: list[str], pool: Pool) -> None:
    verdict = judged(pool, RIGHT, tests)
    assert not any(result.passed for result in verdict.results)
    assert "no test uses add" in verdict.reason or "three" in verdict.reason


@pytest.mark.parametrize("test", NOT_RUN.values(), ids=NOT_RUN)
def test_a_source_whose_tests_are_not_run_passes_for_no_program(test: str, pool: Pool) -> None:
    verdict = judged(pool, RIGHT, [test, WEAK])
    assert [result.passed for result in verdict.results] == [False, True]
    assert "nothing runs" in verdict.reason or "yields" in verdict.reason


def test_a_source_that_needs_no_program_pays_nothing_for_a_wrong_one(pool: Pool) -> None:
    tests = ["c = 3", "assert c == 3", "assert add(1, 2) == c"]
    assert judged(pool, RIGHT, tests).passed
    assert not any(result.passed for result in judged(pool, WRONG, tests).results)


def test_a_constant_of_the_program_counts_as_used(pool: Pool) -> None:
    program = Program(code="LIMIT = 3", tests=["assert LIMIT == 3"], entry_points=("LIMIT",))
    assert pool.run(program).passed


def test_a_value_that_the_set_up_asked_for_counts_as_used(pool: Pool) -> None:
    right, wrong = (
        judged(pool, code, ["assert total == 3"], setup="total = add(1, 2)")
        for code in (RIGHT, WRONG)
    )
    assert right.passed
    assert not wrong.passed


def test_a_timeout_inside_a_test_case_is_one(pool: Pool) -> None:
    tests = [
        (
            "import unittest\nclass T(unittest.TestCase):\n    def "
            "test_add(self): self.assertEqual(add(1, 2), 3)"
        )
    ]
    program = Program(code="def add(a, b):\n    while True: pass", tests=tests, timeout_s=0.5)
    assert pool.run(program).reason == "out of time"


def test_a_lost_process_inside_a_test_case_is_named(pool: Pool) -> None:
    tests = [
        (
            "import unittest\nclass T(unittest.TestCase):\n    def "
            "test_add(self): self.assertEqual(add(1, 2), 3)"
        )
    ]
    verdict = judged(pool, "import os\ndef add(a, b): os._exit(0)", tests)
    assert "lost" in verdict.reason
    assert not verdict.passed
