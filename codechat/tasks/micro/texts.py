"""Families over text, and over lists of words."""

from __future__ import annotations

from codechat.tasks.micro.family import LETTERS, Family

ENDS = tuple("ing ed er ly s ness able ful less est ish let ism ist age dom hood ship ward like ! ? ... -x _v2".split())
STARTS = tuple(
    """
    un re pre dis mis over sub non anti semi mid co de ex in inter post super trans up out my pro bi tri
    """.split()
)
SEPARATORS = (
    ", ",
    "-",
    " ",
    "_",
    "/",
    " and ",
    " or ",
    "+",
    "; ",
    ":",
    "|",
    ".",
    " -> ",
    " = ",
    "*",
    "#",
    "~",
    " then ",
    " to ",
    "&",
)
COUNTS = tuple(range(2, 13))
WORD, WORDS = ("word",), ("words",)
TWO = {"a": LETTERS, "b": LETTERS}

TEXTS = (
    Family("append", 1, WORD, {"t": ENDS}, ("Put $t after $x.", "Return $x followed by $t.", "Append $t to $x."), "return $x + $t"),
    Family("prepend", 1, WORD, {"t": STARTS}, ("Put $t before $x.", "Return $t followed by $x.", "Prepend $t to $x."), "return $t + $x"),
    Family("starts_with", 1, WORD, {"t": STARTS}, ("Whether $x starts with $t.", "True if $x begins with $t."), "return $x.startswith($t)"),
    Family("ends_with", 1, WORD, {"t": ENDS}, ("Whether $x ends with $t.", "True if $t is at the end of $x."), "return $x.endswith($t)"),
    Family("contains", 1, WORD, {"t": LETTERS}, ("Whether $x contains $t.", "True if $t is in $x."), "return $t in $x"),
    Family("count_letter", 1, WORD, {"t": LETTERS}, ("Count how often $t is in $x.", "The number of times $t occurs in $x."), "return $x.count($t)"),
    Family("remove_letter", 2, WORD, {"t": LETTERS}, ("Remove every $t from $x.", "Return $x without $t."), "return $x.replace($t, '')"),
    Family("replace_letter", 2, WORD, TWO, ("Replace every $a in $x by $b.", "Return $x with $b in place of $a."), "return $x.replace($a, $b)",
           keep=lambda s: s["a"] != s["b"]),
    Family("surround", 2, WORD, {"a": STARTS, "b": ENDS}, ("Put $a before and $b after $x.", "Return $x between $a and $b."), "return $a + $x + $b"),
    Family("shout", 2, WORD, {"t": ENDS}, ("Upper case $x followed by $t.", "Return $x in capitals and then $t."), "return $x.upper() + $t"),
    Family("mirror", 2, WORD, {"t": SEPARATORS}, ("$x, then $t, then $x reversed.", "Return $x and its reverse with $t between."), "return $x + $t + $x[::-1]"),
    Family("repeat_with", 2, WORD, {"c": COUNTS, "t": SEPARATORS}, ("Repeat $x followed by $t, $c times.", "$c copies of $x, $t after each."),
           "return ($x + $t) * $c"),
    Family("join_with", 2, WORDS, {"t": SEPARATORS}, ("Join $x with $t.", "Return the parts of $x with $t between."), "return $t.join($x)"),
    Family("split_on", 2, WORD, {"t": LETTERS}, ("Split $x at every $t.", "Return the parts of $x between $t."), "return $x.split($t)"),
    Family("pad_left", 2, WORD, {"c": tuple(range(8, 18)), "t": ("*", "-", ".", "_", "#", "0", "+", "=")}, ("Pad $x on the left with $t to length $c.",),
           "return $x.rjust($c, $t)"),
    Family("length_times", 2, WORD, {"c": COUNTS}, ("The length of $x times $c.", "Return $c times the length of $x."), "return len($x) * $c"),
    Family("prefix_each", 3, WORDS, {"t": STARTS}, ("Put $t before each of $x.", "Prepend $t to every one of $x."), "return [$t + w for w in $x]"),
    Family("suffix_each", 3, WORDS, {"t": ENDS}, ("Put $t after each of $x.", "Append $t to every one of $x."), "return [w + $t for w in $x]"),
    Family("keep_with_letter", 3, WORDS, {"t": LETTERS}, ("Those of $x that contain $t.", "Keep only what has $t in it from $x."), "return [w for w in $x if $t in w]"),
    Family("keep_starting", 3, WORDS, {"t": STARTS}, ("Those of $x that start with $t.", "Keep only what begins with $t from $x."),
           "return [w for w in $x if w.startswith($t)]"),
    Family("count_ending", 3, WORDS, {"t": ENDS}, ("How many of $x end with $t.", "Count those of $x with $t at the end."), "return sum(w.endswith($t) for w in $x)"),
    Family("either_letter", 3, WORD, TWO, ("Count letters of $x that are $a or $b.", "How many letters of $x are $a or $b."), "return $x.count($a) + $x.count($b)",
           keep=lambda s: s["a"] < s["b"]),
    Family("doubled_letter", 4, WORD, {"t": LETTERS}, ("Write every $t in $x twice.", "Return $x with each $t doubled."),
           "out = ''\nfor v in $x:\n    out += v * 2 if v == $t else v\nreturn out"),
    Family("swap_letters", 4, WORD, TWO, ("Swap $a and $b in $x.", "Exchange the letters $a and $b of $x."),
           "out = ''\nfor v in $x:\n    out += $b if v == $a else $a if v == $b else v\nreturn out", keep=lambda s: s["a"] < s["b"]),
    Family("numbered", 4, WORDS, {"c": COUNTS, "t": (": ", ". ", ") ", " - ", "=", "/")}, ("Number each of $x from $c, with $t after the number.",),
           "out = []\nfor i, w in enumerate($x):\n    out.append(str(i + $c) + $t + w)\nreturn out"),
    Family("shift_letters", 5, WORD, {"c": tuple(range(2, 25))}, ("Move each letter a to z of $x on by $c, round the alphabet; keep the rest.",),
           "out = ''\nfor v in $x:\n    if 'a' <= v <= 'z':\n        v = chr((ord(v) - 97 + $c) % 26 + 97)\n    out += v\nreturn out"),
    # ---- held out
    Family("whisper", 2, WORD, {"t": STARTS}, ("$t followed by $x in capitals.",), "return $t + $x.upper()", held_out=True),
    Family("drop_starting", 3, WORDS, {"t": STARTS}, ("Those of $x that do not start with $t.",), "return [w for w in $x if not w.startswith($t)]", held_out=True),
    Family("join_capitals", 3, WORDS, {"t": SEPARATORS}, ("Join $x in capitals with $t.",), "return $t.join($x).upper()", held_out=True),
)  # fmt: skip
