"""Write `codechat/text/python_merges.txt`: byte-pair merges of the running interpreter's standard
library, its tests left out.

    python tools/python_vocabulary.py merges.txt        a minute; the committed file comes from CPython 3.11.7

The committed file is fixed, so `python:4096` means the same in every checkpoint. It has the
layout of GPT-2's vocab.bpe: a line with its origin, then one merge per line.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from codechat.text.tokenizer import LARGEST

NOT_READ = {"site-packages", "test", "tests", "idle_test"}


def standard_library() -> list[str]:
    """The texts of its modules, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = [
        p for p in sorted(root.rglob("*.py")) if not NOT_READ & set(p.relative_to(root).parts)
    ]
    return [p.read_text("utf-8", errors="ignore") for p in modules]


def train(texts: list[str], size: int) -> list[str]:
    """The merges of a vocabulary of `size` ids, end of text included, most frequent first."""
    bpe = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=letters, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return [" ".join(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]


if __name__ == "__main__":
    head = f"#version: the standard library of CPython {platform.python_version()}"
    Path(sys.argv[1]).write_text(
        "\n".join([head, *train(standard_library(), LARGEST["python"]), ""]), encoding="utf-8"
    )
