"""Which split a row belongs to: a function of its text, so that more rows or another order move
none."""

from collections.abc import Callable

from codechat.data.sources import Row, digest, fraction

SPLITS = ("train", "select", "test")  # select: the validation split


def split_of(name: str) -> str:
    """train, select or test, 90 : 5 : 5, by a hash in hex."""
    at = fraction(name)
    if at < 0.9:
        return "train"
    return "select" if at < 0.95 else "test"


def spread(rows: list[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Split -> rows, by their `meta`; a split that a small file leaves empty takes a tenth of
    the training rows.

    key: rows with the same key stay in one split, such as those of one request. Keys with the
    largest hashes move."""
    parts = {split: _of_split(rows, split) for split in SPLITS}
    for split in SPLITS[1:]:
        train = parts["train"]
        keys = sorted({key(row) for row in train}, key=digest)
        if parts[split] or len(keys) < 10:  # of fewer keys no row leaves training
            continue
        moved = set(keys[-(len(keys) // 10) :])
        parts[split] = [_moved(row, split) for row in train if key(row) in moved]
        parts["train"] = [row for row in train if key(row) not in moved]
    return parts


def _of_split(rows: list[Row], split: str) -> list[Row]:
    return [row for row in rows if row["meta"]["split"] == split]


def _moved(row: Row, split: str) -> Row:
    return row | {"meta": row["meta"] | {"split": split}}
