"""What the tools that are held out of training compute; held_out_tools.json has their arguments, limits and words. Their
domains and the words of their names are those of no other tool.

Composed tools and services share no word of a name with them either. Renamed and invented tools of training draw their names from common words, and
six of these (back, body, heart, left, light, team) stand in one name each here, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from codechat.tasks.toolbox.tool import ToolError, neat, need_within

ATOMIC_MASSES = {"H": 1.008, "C": 12.011, "N": 14.007, "O": 15.999, "Na": 22.990, "S": 32.06, "Cl": 35.45, "Fe": 55.845}
COMPLEMENT = str.maketrans("ACGTacgt", "TGCAtgca")
# Gravity in metres per second squared.
GRAVITY = {"mercury": 3.70, "mars": 3.71, "venus": 8.87, "jupiter": 24.79, "saturn": 10.44}
LIGHT_SPEED = 0.299792458  # million kilometres per second
BASES_PER_CODON = 3
SOUND_SPEED = 0.343  # kilometres per second


def molar_mass(formula: str) -> float:
    if not re.fullmatch(r"([A-Z][a-z]?[0-9]{0,4})+", formula):
        raise ToolError(f"{formula[:40]!r} is not a formula like C2H6O")
    parts = re.findall(r"([A-Z][a-z]?)([0-9]*)", formula)
    unknown = [element for element, _ in parts if element not in ATOMIC_MASSES]
    if unknown:
        raise ToolError(f"element {unknown[0]!r} is not known; known: {', '.join(ATOMIC_MASSES)}")
    return neat(sum(ATOMIC_MASSES[element] * int(atoms or 1) for element, atoms in parts), 3)


def dilution(acid: float, strength: int, target: int) -> float:
    need_within(0, 10**9, acid=acid)
    need_within(1, 100, strength=strength, target=target)
    if target > strength:
        raise ToolError("target must not be above strength")
    return neat(acid * (strength / target - 1), 2)


def parallel_ohms(ohms: list[float]) -> float:
    for value in ohms:
        need_within(0.001, 10**9, ohms=value)
    return neat(1 / sum(1 / value for value in ohms))


def dna_complement(strand: str) -> str:
    if not strand or set(strand.upper()) - set("ACGT"):
        raise ToolError("strand must consist of A, C, G and T")
    return strand.translate(COMPLEMENT)


def latin_species(genus: str, species: str) -> str:
    if not genus.strip():
        raise ToolError("genus must not be empty")
    return f"{genus.strip()[0].upper()}. {species.strip().lower()}"


NOTES = "C C# D D# E F F# G G# A A# B".split()
CONCERT_KEY, CONCERT_PITCH = 49, 440.0  # the piano key tuned to 440 Hz
FRAMES_PER_SECOND = 24
CROP = 1.5
POOL_METRES = 25
ELO_SPREAD, ELO_STEP = 400, 20
ELO_RESULTS = {"win": 1.0, "draw": 0.5, "loss": 0.0}
TILES = {
    letter: score
    for score, letters in {1: "aeilnorstu", 2: "dg", 3: "bcmp", 4: "fhvwy", 5: "k", 8: "jx", 10: "qz"}.items()
    for letter in letters
}


def running_pace(kilometres: float, minutes: int) -> str:
    need_within(0.001, 10**6, kilometres=kilometres)
    need_within(0, 10**6, minutes=minutes)
    whole, rest = divmod(round(minutes * 60 / kilometres), 60)
    return f"{whole}:{rest:02d}"


def elo_rating(own: int, rival: int, outcome: str) -> int:
    need_within(0, 10_000, own=own, rival=rival)
    expected = 1 / (1 + 10 ** ((rival - own) / ELO_SPREAD))
    return round(own + ELO_STEP * (ELO_RESULTS[outcome] - expected))


def knight_reach(field: str) -> int:
    if len(field) != 2 or field[0] not in "abcdefgh" or field[1] not in "12345678":
        raise ToolError(f"{field[:20]!r} is not a field like e4")
    column, row = "abcdefgh".index(field[0]), int(field[1]) - 1
    jumps = [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2) if abs(a) != abs(b)]
    return sum(0 <= column + a < 8 and 0 <= row + b < 8 for a, b in jumps)


BALL_GRAMS = 50
SHRUBS_PER_METRE = 3
TIN_COVERS = 12  # square metres
PULSE_AT_BIRTH = 220


SUBJECTS = (
    "general works,philosophy,religion,social sciences,language,science,technology,arts,literature,history".split(",")
)
WINDS = "N NE E SE S SW W NW".split()
BITS_PER_BYTE = 8
LEADING = 1.2
PAGES_PER_SHEET = 4


def subnet_mask(hosts: int) -> str:
    need_within(1, 2**30 - 2, hosts=hosts)
    mask = 2**32 - 2 ** (hosts + 1).bit_length()
    return ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))


def password_bits(password: str) -> float:
    kinds = {c: "a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "#" for c in password}
    alphabet = sum({"a": 26, "A": 26, "0": 10, "#": 33}[kind] for kind in set(kinds.values()))
    return neat(len(password) * math.log2(alphabet or 1), 1)


def christen(ship: str) -> str:
    if not ship.strip():
        raise ToolError("ship must not be empty")
    return f"I name this ship MS {ship.strip()}"


# A tool without a line here is the function of its name.
RUN: dict[str, Callable[..., Any]] = {
    "isotope_left": lambda grams, half_life, elapsed: neat(grams * 2 ** (-(elapsed / half_life))),
    "voltage": lambda amperes, ohms: neat(amperes * ohms),
    "orbit_period": lambda radius: neat(radius**1.5, 2),
    "light_delay": lambda kilometres: neat(kilometres / LIGHT_SPEED, 1),
    "planet_pull": lambda kilos, planet: neat(kilos * GRAVITY[planet], 2),
    "amino_acids": lambda bases: bases // BASES_PER_CODON,
    "storm_range": lambda delay: neat(delay * SOUND_SPEED, 2),
    "piano_pitch": lambda key: neat(CONCERT_PITCH * 2 ** ((key - CONCERT_KEY) / 12), 2),
    "beat_gap": lambda tempo: neat(60000 / tempo, 2),
    "transpose": lambda note, semitones: NOTES[(NOTES.index(note) + semitones) % len(NOTES)],
    "film_frames": lambda seconds: seconds * FRAMES_PER_SECOND,
    "stage_cue": lambda actor, scene, side: f"Scene {scene}: {actor.strip()} enters {side}",
    "crop_focal": lambda focal: neat(focal * CROP, 1),
    "exposure": lambda aperture, shutter: neat(math.log2(aperture**2 * shutter), 1),
    "pool_laps": lambda metres: math.ceil(metres / POOL_METRES),
    "league_score": lambda wins, draws, losses: 3 * wins + draws,
    "team_chant": lambda team: f"Go, {team.strip()}, go!",
    "gear_ratio": lambda chainring, cog: neat(chainring / cog, 2),
    "tyre_pressure": lambda kilos: neat(kilos / 10, 1),
    "dice_odds": lambda rolls: neat(100 * (1 - (5 / 6) ** rolls), 2),
    "scrabble_score": lambda tiles: sum((TILES.get(c, 0) for c in tiles.lower())),
    "yarn_balls": lambda grams: math.ceil(grams / BALL_GRAMS),
    "hedge_shrubs": lambda metres: metres * SHRUBS_PER_METRE,
    "sow_seeds": lambda plants, sprout: math.ceil(plants * 100 / sprout),
    "paint_tins": lambda wall: math.ceil(wall / TIN_COVERS),
    "recipe_scale": lambda grams, serves, guests: neat(grams * guests / serves, 1),
    "body_mass": lambda kilos, centimetres: neat(kilos / (centimetres / 100) ** 2, 1),
    "heart_limit": lambda age: PULSE_AT_BIRTH - age,
    "download_wait": lambda megabytes, megabits: neat(megabytes * BITS_PER_BYTE / megabits, 1),
    "majority": lambda ballots: ballots // 2 + 1,
    "droop_quota": lambda votes, mandates: votes // (mandates + 1) + 1,
    "queue_wait": lambda customers, tills, minutes: customers // tills * minutes,
    "dewey_subject": lambda shelf: SUBJECTS[shelf // 100],
    "parcel_girth": lambda depth, breadth, height: neat(2 * sum(sorted((depth, breadth, height))[:2]), 1),
    "telegram": lambda message: f"{message.strip()} STOP",
    "back_bearing": lambda bearing: (bearing + 180) % 360,
    "compass_rose": lambda course: WINDS[round(course / 45) % 8],
    "font_leading": lambda size: neat(size * LEADING, 1),
    "booklet_sheets": lambda pages: math.ceil(pages / PAGES_PER_SHEET),
}
