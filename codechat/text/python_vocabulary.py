"""Where `python_merges.txt` comes from: byte-pair merges of the running interpreter's standard library, its tests left out.

    python -m codechat.text.python_vocabulary merges.txt        a minute; the committed file was made by CPython 3.11.7

The committed file is fixed, so `python:4096` means the same in every checkpoint; another interpreter gives other merges. It has the layout of
GPT-2's vocab.bpe: a line with its origin, then one merge per line. GPT-2's pattern splits the text.

Left out: a vocabulary of your own corpus. The `tokenizers` package trains one, and `hf:DIR` reads it.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from codechat.core.atomic_files import write_atomic
from codechat.core.errors import ConfigError
from codechat.text.tokenizer import LARGEST

NOT_READ = {"site-packages", "test", "tests", "idle_test"}


def standard_library() -> list[str]:
    """The texts of its modules, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        p.read_text("utf-8", errors="ignore")
        for p in sorted(root.rglob("*.py"))
        if not NOT_READ & set(p.relative_to(root).parts)
    ]


def train(texts: list[str], size: int) -> list[str]:
    """The merges of a vocabulary of `size` ids, end of text included, most frequent first."""
    bpe, letters = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=letters, show_progress=False)
    )
    return [" ".join(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]


def main(argv: list[str] | None = None) -> int:
    """`python -m codechat.text.python_vocabulary FILE`."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"got {words or 'no file'}; give one file to write, such as merges.txt")
    found = train(standard_library(), LARGEST["python"])
    head = f"#version: the standard library of CPython {platform.python_version()}"
    write_atomic(Path(words[0]), "\n".join([head, *found, ""]))
    return 0


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
