"""Tools that read or change a word or a short text."""

from __future__ import annotations

import random
from typing import Any

from codechat.tasks.toolbox.tool import ToolError, tool
from codechat.tasks.toolbox.values import choice, common_word, integer, letter, phrase, word


@tool(
    "Reverse a text",
    text=word(),
    answer="Reversed: {result}",
    asks=[
        'Reverse "{text}".',
        'Spell "{text}" backwards.',
        'Write "{text}" from back to front.',
        "Reverse the word {text}.",
        "What is {text} backwards?",
    ],
    hard=['Turn "{text}" around.', "Read {text} from the end."],
)
def reverse_text(text: str) -> str:
    return text[::-1]


@tool(
    "Count letters of a text",
    text=word(),
    answer="It has {result} letters.",
    asks=[
        'How many letters has "{text}"?',
        'How long is "{text}"?',
        'Count the letters in "{text}".',
        "How many letters are in {text}?",
        'Length of "{text}"?',
    ],
    hard=['Of how many letters is "{text}" made?', "Letters in {text}?"],
)
def count_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


@tool(
    "Write in capitals",
    text=word(),
    answer="In capitals: {result}",
    asks=[
        'Write "{text}" in capitals.',
        'Make "{text}" upper case.',
        'Put "{text}" in capital letters.',
        "Uppercase {text}.",
        'Shout "{text}".',
    ],
    hard=['Give me "{text}" in big letters.', "Capitalise every letter of {text}."],
)
def uppercase(text: str) -> str:
    return text.upper()


@tool(
    "Count vowels of a word",
    word=word(),
    answer="It has {result} vowels.",
    asks=[
        'How many vowels has "{word}"?',
        'Count the vowels in "{word}".',
        "How many vowels are in {word}?",
        'Vowels in "{word}"?',
        "Tell me the number of vowels of {word}.",
    ],
    hard=['How often does "{word}" use a, e, i, o or u?', "Vowel count of {word}?"],
)
def count_vowels(word: str) -> int:
    return sum(c in "aeiou" for c in word.lower())


@tool(
    "Check for a palindrome",
    word=word(),
    answer="Is it a palindrome? {result}.",
    asks=[
        'Is "{word}" a palindrome?',
        "Is {word} a palindrome?",
        'Check if "{word}" is a palindrome.',
        'Does "{word}" read the same backwards?',
        'Palindrome or not: "{word}"?',
    ],
    hard=['Is "{word}" its own mirror image?', "Does {word} stay the same in reverse?"],
)
def is_palindrome(word: str) -> bool:
    letters = [c for c in word.lower() if c.isalnum()]
    return letters == letters[::-1]


@tool(
    "Sort letters of a word",
    word=word(),
    answer="Sorted: {result}",
    held_out=True,
    asks=[
        'Sort the letters of "{word}".',
        'Put the letters of "{word}" in order.',
        "Sort letters: {word}.",
        'Order the letters in "{word}".',
        "Alphabetize the letters of {word}.",
    ],
    hard=['From a to z, which letters has "{word}"?'],
)
def sort_letters(word: str) -> str:
    return "".join(sorted(word))


@tool(
    "Repeat a text",
    text=word(),
    times=integer(2, 60),
    answer="{result}",
    asks=[
        'Repeat "{text}" {times} times.',
        'Write "{text}" {times} times.',
        "Say {text} {times} times.",
        'Print "{text}" {times} times over.',
        'I need "{text}" repeated {times} times.',
    ],
    hard=['{times} copies of "{text}", please.', 'Give me "{text}" again and again, {times} times.'],
)
def repeat_text(text: str, times: int) -> str:
    if not 0 <= times <= 1000:
        raise ToolError("times must be between 0 and 1000")
    return text * times


@tool(
    "Count a letter in text",
    text=word(),
    letter=letter(),
    answer="It occurs {result} times.",
    asks=[
        'How many "{letter}" are in "{text}"?',
        'Count the letter {letter} in "{text}".',
        'How often does {letter} occur in "{text}"?',
        'Letter "{letter}" in "{text}": how many?',
        "Count each {letter} in {text}.",
    ],
    hard=['In "{text}", how many times do you see {letter}?', 'Number of {letter} in "{text}"?'],
)
def count_letter(text: str, letter: str) -> int:
    if len(letter) != 1:
        raise ToolError("letter must be one character")
    return text.lower().count(letter.lower())


@tool(
    "Pad a text to width",
    text=word(),
    width=integer(8, 80),
    answer="Padded: {result}",
    asks=[
        'Pad "{text}" to width {width}.',
        'Fill "{text}" up to {width} characters.',
        "Pad {text} to {width}.",
        'Make "{text}" {width} characters wide.',
        'Set "{text}" in a field of width {width}.',
    ],
    hard=['Stretch "{text}" with dots until it has {width} characters.'],
)
def pad_text(text: str, width: int) -> str:
    if width > 1000:
        raise ToolError("width must be at most 1000")
    return text.ljust(width, ".")


@tool(
    "Check for anagrams",
    a=word(),
    b=word(),
    answer="Are they anagrams? {result}.",
    asks=[
        'Are "{a}" and "{b}" anagrams?',
        "Is {a} an anagram of {b}?",
        'Check anagrams "{a}" and "{b}".',
        'Do "{a}" and "{b}" use the same letters?',
        "Anagrams or not: {a} and {b}?",
    ],
    hard=['Can "{a}" be shuffled into "{b}"?'],
)
def are_anagrams(a: str, b: str) -> bool:
    return sorted(a.lower()) == sorted(b.lower())


@tool(
    "Edits between two words",
    a=word(),
    b=word(),
    answer="They differ by {result} edits.",
    asks=[
        'How far is "{a}" from "{b}"?',
        'Edit distance of "{a}" and "{b}"?',
        "How many edits from {a} to {b}?",
        'Compare the spelling of "{a}" and "{b}".',
        "Edit distance between {a} and {b}?",
    ],
    hard=['How many letters must change to make "{b}" of "{a}"?', 'Levenshtein "{a}" "{b}"?'],
)
def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


@tool(
    "Change the case",
    text=word(),
    style=choice(
        {"upper": "capitals|upper case", "lower": "small letters|lower case", "title": "title case|a leading capital"}
    ),
    answer="Changed: {result}",
    asks=[
        'Write "{text}" in {style}.',
        'Put "{text}" into {style}.',
        "Set {text} in {style}.",
        'Change "{text}" to {style}.',
        "I want {text} in {style}.",
    ],
    hard=['Please show "{text}" with {style}.'],
)
def change_case(text: str, style: str) -> str:
    return {"upper": text.upper(), "lower": text.lower(), "title": text.title()}[style]


@tool(
    "Count words of a text",
    text=phrase(),
    answer="It has {result} words.",
    asks=[
        'How many words are in "{text}"?',
        'Count the words in "{text}".',
        'Words in "{text}"?',
        'Count words: "{text}"',
        'Tell me the number of words of "{text}".',
    ],
    hard=['How many words does "{text}" have?'],
)
def count_words(text: str) -> int:
    return len(text.split())


@tool(
    "First letters of words",
    text=phrase(3, 4),
    answer="The acronym is {result}.",
    asks=[
        'Make an acronym of "{text}".',
        'What is the acronym of "{text}"?',
        'Abbreviate "{text}".',
        'Shorten "{text}" to its initials.',
        'Acronym for "{text}"?',
    ],
    hard=['Take the first letter of each word: "{text}"'],
)
def acronym(text: str) -> str:
    return "".join(w[0].upper() for w in text.split())


@tool(
    "Text for a web address",
    text=phrase(),
    answer="The slug is {result}",
    held_out=True,
    asks=[
        'Make a slug of "{text}".',
        'Slug for "{text}"?',
        'Turn "{text}" into a slug.',
        'Write "{text}" as a slug.',
        'I need a slug for "{text}".',
    ],
    hard=['Which web address part fits "{text}"?'],
)
def slug(text: str) -> str:
    return "-".join("".join(c for c in w if c.isalnum()) for w in text.lower().split())


def _old_from_text(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"old": rng.choice(arguments["text"].split())}


@tool(
    "Replace a word in text",
    text=phrase(),
    old=common_word(),
    new=word(),
    answer="Now it reads: {result}",
    adjust=_old_from_text,
    asks=[
        'In "{text}", replace {old} with {new}.',
        'Replace {old} by {new} in "{text}".',
        'Change {old} to {new} in "{text}".',
        'Swap {old} for {new} in "{text}".',
        'Text "{text}": put {new} for {old}.',
    ],
    hard=['Wherever "{text}" has {old}, write {new}.'],
)
def replace_word(text: str, old: str, new: str) -> str:
    if not old:
        raise ToolError("old must not be empty")
    if len(text) // len(old) * len(new) > 10_000:
        raise ToolError("the result would be too long")
    return text.replace(old, new)


@tool(
    "Join two words",
    first=word(),
    second=word(),
    mark=choice({"-": "a dash|a hyphen", "_": "an underscore", ".": "a dot", "/": "a slash"}),
    answer="{result}",
    asks=[
        'Join "{first}" and "{second}" with {mark}.',
        "Join {first} and {second} by {mark}.",
        'Put {mark} between "{first}" and "{second}".',
        'Link "{first}" to "{second}" with {mark}.',
        "Connect {first} and {second} using {mark}.",
    ],
    hard=['Write "{first}", {mark} and then "{second}".'],
)
def join_words(first: str, second: str, mark: str) -> str:
    return first + mark + second


@tool(
    "Cut a text short",
    text=phrase(3, 4),
    length=integer(4, 40),
    answer="Cut: {result}",
    asks=[
        'Cut "{text}" to {length} characters.',
        'Shorten "{text}" to {length} letters.',
        'Keep {length} characters of "{text}".',
        'Trim "{text}" at {length}.',
        'Truncate "{text}" to {length}.',
    ],
    hard=['Only the first {length} characters of "{text}", please.'],
)
def cut_text(text: str, length: int) -> str:
    if length < 0:
        raise ToolError("length must not be negative")
    return text[:length]
