"""Checks by JSON schemas import no package that only formats need."""

import os
import subprocess
import sys
from pathlib import Path

from codechat.text import json_schemas

PROGRAM = """
from codechat.text import json_schemas
print(json_schemas.fits(1, {"type": "integer"}))
import rfc3987_syntax
"""


def test_the_parser_of_formats_is_not_imported_but_by_others(tmp_path: Path) -> None:
    (tmp_path / "rfc3987_syntax.py").write_text("print('imported')\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert (done.returncode, done.stdout) == (0, "True\nimported\n"), done.stderr


def test_the_worst_error_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    error = json_schemas.error_of({"a": 1}, schema)
    assert error is not None
    assert error.message == "1 is not of type 'string'"
    assert json_schemas.error_of({"a": "1"}, schema) is None
