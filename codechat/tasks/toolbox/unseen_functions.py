"""Tools that are held out of training: domains and words of names that no other tool has.

Composed tools and services share no word of a name with them either. Renamed and invented tools of training draw their names from common words, and
six of these (back, body, heart, left, light, team) stand in one name each here, too.
"""

from __future__ import annotations

import math
import re

from codechat.tasks.toolbox.tool import ToolError, made, neat, need_within
from codechat.tasks.toolbox.values import (
    chess_field,
    choice,
    formula,
    integer,
    name,
    number,
    numbers,
    phrase,
    strand,
    word,
)

# Domain -> its tools.
DOMAINS: dict[str, frozenset[str]] = {
    domain: frozenset(names.split())
    for domain, names in {
        "chemistry": "molar_mass isotope_left dilution",
        "electronics": "voltage parallel_ohms",
        "astronomy": "orbit_period light_delay planet_pull",
        "biology": "dna_complement amino_acids latin_species",
        "weather": "storm_range",
        "music": "piano_pitch beat_gap transpose",
        "film": "film_frames stage_cue",
        "photography": "crop_focal exposure",
        "sports": "running_pace pool_laps league_score team_chant",
        "cycling": "gear_ratio tyre_pressure",
        "board games": "elo_rating dice_odds scrabble_score knight_reach",
        "knitting": "yarn_balls",
        "gardening": "hedge_shrubs sow_seeds",
        "decorating": "paint_tins",
        "cooking": "recipe_scale",
        "health": "body_mass heart_limit",
        "networks": "subnet_mask download_wait password_bits",
        "elections": "majority droop_quota",
        "queues": "queue_wait",
        "libraries": "dewey_subject",
        "post": "parcel_girth telegram",
        "navigation": "back_bearing compass_rose",
        "printing": "font_leading booklet_sheets",
        "ships": "christen",
    }.items()
}


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


def isotope_left(grams: float, half_life: int, elapsed: int) -> float:
    need_within(0, 10**12, grams=grams, elapsed=elapsed)
    need_within(1, 10**12, half_life=half_life)
    return neat(grams * 2 ** -(elapsed / half_life))


def dilution(acid: float, strength: int, target: int) -> float:
    need_within(0, 10**9, acid=acid)
    need_within(1, 100, strength=strength, target=target)
    if target > strength:
        raise ToolError("target must not be above strength")
    return neat(acid * (strength / target - 1), 2)


def voltage(amperes: float, ohms: float) -> float:
    need_within(0, 10**9, amperes=amperes, ohms=ohms)
    return neat(amperes * ohms)


def parallel_ohms(ohms: list[float]) -> float:
    for value in ohms:
        need_within(0.001, 10**9, ohms=value)
    return neat(1 / sum(1 / value for value in ohms))


def orbit_period(radius: float) -> float:
    need_within(0, 10**6, radius=radius)
    return neat(radius**1.5, 2)


def light_delay(kilometres: float) -> float:
    need_within(0, 10**12, kilometres=kilometres)
    return neat(kilometres / LIGHT_SPEED, 1)


def planet_pull(kilos: float, planet: str) -> float:
    need_within(0, 10**12, kilos=kilos)
    return neat(kilos * GRAVITY[planet], 2)


def dna_complement(strand: str) -> str:
    if not strand or set(strand.upper()) - set("ACGT"):
        raise ToolError("strand must consist of A, C, G and T")
    return strand.translate(COMPLEMENT)


def amino_acids(bases: int) -> int:
    need_within(0, 10**12, bases=bases)
    return bases // BASES_PER_CODON


def latin_species(genus: str, species: str) -> str:
    if not genus.strip():
        raise ToolError("genus must not be empty")
    return f"{genus.strip()[0].upper()}. {species.strip().lower()}"


def storm_range(delay: float) -> float:
    need_within(0, 10**6, delay=delay)
    return neat(delay * SOUND_SPEED, 2)


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


def piano_pitch(key: int) -> float:
    need_within(1, 88, key=key)
    return neat(CONCERT_PITCH * 2 ** ((key - CONCERT_KEY) / 12), 2)


def beat_gap(tempo: int) -> float:
    need_within(1, 10_000, tempo=tempo)
    return neat(60_000 / tempo, 2)


def film_frames(seconds: int) -> int:
    need_within(0, 10**12, seconds=seconds)
    return seconds * FRAMES_PER_SECOND


def crop_focal(focal: int) -> float:
    need_within(1, 10**6, focal=focal)
    return neat(focal * CROP, 1)


def exposure(aperture: float, shutter: int) -> float:
    need_within(0.1, 1000, aperture=aperture)
    need_within(1, 10**6, shutter=shutter)
    return neat(math.log2(aperture**2 * shutter), 1)


def running_pace(kilometres: float, minutes: int) -> str:
    need_within(0.001, 10**6, kilometres=kilometres)
    need_within(0, 10**6, minutes=minutes)
    whole, rest = divmod(round(minutes * 60 / kilometres), 60)
    return f"{whole}:{rest:02d}"


def pool_laps(metres: int) -> int:
    need_within(0, 10**12, metres=metres)
    return math.ceil(metres / POOL_METRES)


def league_score(wins: int, draws: int, losses: int) -> int:
    need_within(0, 10**9, wins=wins, draws=draws, losses=losses)
    return 3 * wins + draws


def gear_ratio(chainring: int, cog: int) -> float:
    need_within(1, 10_000, chainring=chainring, cog=cog)
    return neat(chainring / cog, 2)


def tyre_pressure(kilos: float) -> float:
    need_within(1, 1000, kilos=kilos)
    return neat(kilos / 10, 1)


def elo_rating(own: int, rival: int, outcome: str) -> int:
    need_within(0, 10_000, own=own, rival=rival)
    expected = 1 / (1 + 10 ** ((rival - own) / ELO_SPREAD))
    return round(own + ELO_STEP * (ELO_RESULTS[outcome] - expected))


def dice_odds(rolls: int) -> float:
    need_within(0, 10_000, rolls=rolls)
    return neat(100 * (1 - (5 / 6) ** rolls), 2)


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


def yarn_balls(grams: int) -> int:
    need_within(0, 10**9, grams=grams)
    return math.ceil(grams / BALL_GRAMS)


def hedge_shrubs(metres: int) -> int:
    need_within(0, 10**9, metres=metres)
    return metres * SHRUBS_PER_METRE


def sow_seeds(plants: int, sprout: int) -> int:
    need_within(0, 10**9, plants=plants)
    need_within(1, 100, sprout=sprout)
    return math.ceil(plants * 100 / sprout)


def paint_tins(wall: float) -> int:
    need_within(0, 10**9, wall=wall)
    return math.ceil(wall / TIN_COVERS)


def recipe_scale(grams: float, serves: int, guests: int) -> float:
    need_within(0, 10**9, grams=grams, guests=guests)
    need_within(1, 10**9, serves=serves)
    return neat(grams * guests / serves, 1)


def body_mass(kilos: float, centimetres: int) -> float:
    need_within(1, 1000, kilos=kilos)
    need_within(30, 300, centimetres=centimetres)
    return neat(kilos / (centimetres / 100) ** 2, 1)


def heart_limit(age: int) -> int:
    need_within(1, 120, age=age)
    return PULSE_AT_BIRTH - age


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


def download_wait(megabytes: float, megabits: int) -> float:
    need_within(0, 10**12, megabytes=megabytes)
    need_within(1, 10**9, megabits=megabits)
    return neat(megabytes * BITS_PER_BYTE / megabits, 1)


def password_bits(password: str) -> float:
    kinds = {c: "a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "#" for c in password}
    alphabet = sum({"a": 26, "A": 26, "0": 10, "#": 33}[kind] for kind in set(kinds.values()))
    return neat(len(password) * math.log2(alphabet or 1), 1)


def majority(ballots: int) -> int:
    need_within(1, 10**12, ballots=ballots)
    return ballots // 2 + 1


def droop_quota(votes: int, mandates: int) -> int:
    need_within(0, 10**12, votes=votes, mandates=mandates)
    return votes // (mandates + 1) + 1


def queue_wait(customers: int, tills: int, minutes: int) -> int:
    need_within(0, 10**9, customers=customers, minutes=minutes)
    need_within(1, 10**9, tills=tills)
    return customers // tills * minutes


def dewey_subject(shelf: int) -> str:
    need_within(0, 999, shelf=shelf)
    return SUBJECTS[shelf // 100]


def parcel_girth(depth: float, breadth: float, height: float) -> float:
    need_within(0, 10**6, depth=depth, breadth=breadth, height=height)
    return neat(2 * sum(sorted((depth, breadth, height))[:2]), 1)


def back_bearing(bearing: int) -> int:
    need_within(0, 360, bearing=bearing)
    return (bearing + 180) % 360


def compass_rose(course: int) -> str:
    need_within(0, 360, course=course)
    return WINDS[round(course / 45) % 8]


def font_leading(size: float) -> float:
    need_within(0.1, 10_000, size=size)
    return neat(size * LEADING, 1)


def booklet_sheets(pages: int) -> int:
    need_within(0, 10**9, pages=pages)
    return math.ceil(pages / PAGES_PER_SHEET)


def christen(ship: str) -> str:
    if not ship.strip():
        raise ToolError("ship must not be empty")
    return f"I name this ship MS {ship.strip()}"


TOOLS = (
    # ---- science
    made("molar_mass", molar_mass, formula=formula()),
    made("isotope_left", isotope_left, grams=number(3, 900), half_life=integer(3, 90), elapsed=integer(3, 300)),
    made("dilution", dilution, acid=number(3, 900), strength=integer(30, 99), target=integer(2, 29)),
    made("voltage", voltage, amperes=number(3, 90), ohms=number(3, 900)),
    made("parallel_ohms", parallel_ohms, ohms=numbers(3, 900)),
    made("orbit_period", orbit_period, radius=number(3, 900)),
    made("light_delay", light_delay, kilometres=number(3, 9000)),
    made(
        "planet_pull",
        planet_pull,
        kilos=number(3, 900),
        planet=choice({planet: planet.capitalize() for planet in GRAVITY}),
    ),
    made("dna_complement", dna_complement, strand=strand()),
    made("amino_acids", amino_acids, bases=integer(9, 9000)),
    made("latin_species", latin_species, genus=name(), species=word()),
    made("storm_range", storm_range, delay=number(3, 300)),
    # ---- leisure
    made("piano_pitch", piano_pitch, key=integer(1, 88)),
    made("beat_gap", beat_gap, tempo=integer(30, 300)),
    made(
        "transpose",
        lambda note, semitones: NOTES[(NOTES.index(note) + semitones) % len(NOTES)],
        note=choice({note: note for note in "CDEFGAB"}),
        semitones=integer(2, 300),
    ),
    made("film_frames", film_frames, seconds=integer(3, 9000)),
    made(
        "stage_cue",
        lambda actor, scene, side: f"Scene {scene}: {actor.strip()} enters {side}",
        actor=name(),
        scene=integer(2, 300),
        side=choice({"left": "left", "right": "right", "back": "back|rear"}),
    ),
    made("crop_focal", crop_focal, focal=integer(9, 900)),
    made("exposure", exposure, aperture=number(3, 30, 0.5), shutter=integer(3, 4000)),
    made("running_pace", running_pace, kilometres=number(3, 90), minutes=integer(9, 600)),
    made("pool_laps", pool_laps, metres=integer(50, 9000)),
    made("league_score", league_score, wins=integer(2, 300), draws=integer(2, 300), losses=integer(2, 300)),
    made("team_chant", lambda team: f"Go, {team.strip()}, go!", team=name()),
    made("gear_ratio", gear_ratio, chainring=integer(20, 120), cog=integer(9, 120)),
    made("tyre_pressure", tyre_pressure, kilos=number(30, 300, 0.5)),
    made(
        "elo_rating",
        elo_rating,
        own=integer(300, 2900),
        rival=integer(300, 2900),
        outcome=choice({"win": "win|victory", "draw": "draw|tie", "loss": "loss|defeat"}),
    ),
    made("dice_odds", dice_odds, rolls=integer(2, 200)),
    made("scrabble_score", lambda tiles: sum(TILES.get(c, 0) for c in tiles.lower()), tiles=word()),
    made("knight_reach", knight_reach, field=chess_field()),
    # ---- household
    made("yarn_balls", yarn_balls, grams=integer(60, 9000)),
    made("hedge_shrubs", hedge_shrubs, metres=integer(3, 900)),
    made("sow_seeds", sow_seeds, plants=integer(3, 900), sprout=integer(20, 95)),
    made("paint_tins", paint_tins, wall=number(9, 900)),
    made("recipe_scale", recipe_scale, grams=number(9, 900), serves=integer(2, 20), guests=integer(3, 300)),
    made("body_mass", body_mass, kilos=number(30, 300), centimetres=integer(120, 210)),
    made("heart_limit", heart_limit, age=integer(14, 99)),
    # ---- public
    made("subnet_mask", subnet_mask, hosts=integer(3, 9000)),
    made("download_wait", download_wait, megabytes=number(3, 9000), megabits=integer(3, 900)),
    made("password_bits", password_bits, password=word()),
    made("majority", majority, ballots=integer(30, 90000)),
    made("droop_quota", droop_quota, votes=integer(100, 90000), mandates=integer(2, 90)),
    made("queue_wait", queue_wait, customers=integer(3, 300), tills=integer(2, 30), minutes=integer(2, 60)),
    made("dewey_subject", dewey_subject, shelf=integer(3, 999)),
    made("parcel_girth", parcel_girth, depth=number(3, 300), breadth=number(3, 300), height=number(3, 300)),
    made("telegram", lambda message: f"{message.strip()} STOP", message=phrase(2, 4)),
    made("back_bearing", back_bearing, bearing=integer(10, 359)),
    made("compass_rose", compass_rose, course=integer(10, 359)),
    made("font_leading", font_leading, size=number(4, 200, 0.3)),
    made("booklet_sheets", booklet_sheets, pages=integer(5, 900)),
    made("christen", christen, ship=name()),
)
