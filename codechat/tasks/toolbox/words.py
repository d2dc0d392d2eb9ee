"""A thousand everyday words for names, invented tools and values; names of people and places for values.

None of the words occurs in the unseen tools of `unseen`, and no name is a value of a natural request: tests compare them.

In a small vocabulary most of them are two or three tokens. Names made of a few common one-token words alone teach a model those words by heart,
and it then copies nothing else (LOG.md).
"""

from pathlib import Path

_SECTIONS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("# ")[1:]  # a title, then its words
WORDS, NAMES, PLACES = (section.split()[1:] for section in _SECTIONS)
