"""Which split a row belongs to: a function of its text, so that more rows or another order move none."""

from collections.abc import Callable

from codechat.data.sources import Row, digest, fraction

SPLITS = ("train", "select", "test")  # select: the validation split


def split_of(name: str) -> str:
    """train, select or test, 90 : 5 : 5, by a hash in hex."""
    return next(split for split, below in zip(SPLITS, (0.9, 0.95, 1.0)) if fraction(name) < below)


def spread(rows: list[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Split -> rows, by their `meta`; a split that a small file leaves empty takes a tenth of the training rows.

    key: what rows of one split may share and rows of two may not. The rows with the largest hashes of it move."""
    parts = {split: [row for row in rows if row["meta"]["split"] == split] for split in SPLITS}
    for split in SPLITS[1:]:
        names = sorted({key(row) for row in parts["train"]}, key=digest)
        if not parts[split] and len(names) >= 10:  # of fewer requests no row leaves training
            moved, rows = set(names[-(len(names) // 10) :]), parts["train"]
            parts[split] = [row | {"meta": row["meta"] | {"split": split}} for row in rows if key(row) in moved]
            parts["train"] = [row for row in rows if key(row) not in moved]
    return parts
