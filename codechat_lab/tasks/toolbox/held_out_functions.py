"""What the tools of test_hard compute; each function has the name of its tool in
held_out_tools.json."""

import math
import re

from codechat_lab.tasks.toolbox.functions import TABLES, neat

ATOMIC_MASSES: dict[str, float] = TABLES["ATOMIC_MASSES"]
GRAVITY: dict[str, float] = TABLES["GRAVITY"]
NOTES: list[str] = TABLES["NOTES"]
SUBJECTS: list[str] = TABLES["SUBJECTS"]
WINDS: list[str] = TABLES["WINDS"]
TILES: dict[str, int] = TABLES["TILES"]
# characters of each kind in ASCII, blanks included
KIND_SIZES = {
    "small": 26,
    "capital": 26,
    "digit": 10,
    "mark": 33,
}


def molar_mass(formula: str) -> float:
    elements = re.findall("([A-Z][a-z]?)([0-9]*)", formula)
    return neat(sum(ATOMIC_MASSES[element] * int(atoms or 1) for element, atoms in elements), 3)


def isotope_left(grams: float, half_life: int, elapsed: int) -> float:
    return neat(grams * 2 ** (-(elapsed / half_life)))


def dilution(acid: float, strength: int, target: int) -> float:
    return neat(acid * (strength / target - 1), 2)


def voltage(amperes: float, ohms: float) -> float:
    return neat(amperes * ohms)


def parallel_ohms(ohms: list[float]) -> float:
    return neat(1 / sum(1 / value for value in ohms))


def orbit_period(radius: float) -> float:
    return neat(radius**1.5, 2)


def light_delay(kilometres: float) -> float:
    return neat(kilometres / 0.299792458, 1)


def planet_pull(kilos: float, planet: str) -> float:
    return neat(kilos * GRAVITY[planet], 2)


def dna_complement(strand: str) -> str:
    return strand.translate(str.maketrans("ACGTacgt", "TGCAtgca"))


def amino_acids(bases: int) -> int:
    return bases // 3


def latin_species(genus: str, species: str) -> str:
    return f"{genus.strip()[0].upper()}. {species.strip().lower()}"


def storm_range(delay: float) -> float:
    return neat(delay * 0.343, 2)


def piano_pitch(key: int) -> float:
    return neat(440 * 2 ** ((key - 49) / 12), 2)


def beat_gap(tempo: int) -> float:
    return neat(60000 / tempo, 2)


def transpose(note: str, semitones: int) -> str:
    return NOTES[(NOTES.index(note) + semitones) % len(NOTES)]


def film_frames(seconds: int) -> int:
    return seconds * 24


def stage_cue(actor: str, scene: int, side: str) -> str:
    return f"Scene {scene}: {actor.strip()} enters {side}"


def crop_focal(focal: int) -> float:
    return neat(focal * 1.5, 1)


def exposure(aperture: float, shutter: int) -> float:
    return neat(math.log2(aperture**2 * shutter), 1)


def running_pace(kilometres: float, minutes: int) -> str:
    minute, second = divmod(round(minutes * 60 / kilometres), 60)
    return f"{minute}:{second:02d}"


def pool_laps(metres: int) -> int:
    return math.ceil(metres / 25)


def league_score(wins: int, draws: int, losses: int) -> int:
    return 3 * wins + draws


def team_chant(team: str) -> str:
    return f"Go, {team.strip()}, go!"


def gear_ratio(chainring: int, cog: int) -> float:
    return neat(chainring / cog, 2)


def tyre_pressure(kilos: float) -> float:
    return neat(kilos / 10, 1)


def elo_rating(own: int, rival: int, outcome: str) -> int:
    score = {"win": 1.0, "draw": 0.5, "loss": 0.0}[outcome]
    return round(own + 20 * (score - 1 / (1 + 10 ** ((rival - own) / 400))))


def dice_odds(rolls: int) -> float:
    return neat(100 * (1 - (5 / 6) ** rolls), 2)


def scrabble_score(tiles: str) -> int:
    return sum(TILES.get(c, 0) for c in tiles.lower())


def knight_reach(field: str) -> int:
    column = "abcdefgh".index(field[0])
    row = int(field[1]) - 1
    jumps = [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2) if abs(a) != abs(b)]
    return sum(0 <= column + a < 8 and 0 <= row + b < 8 for a, b in jumps)


def yarn_balls(grams: int) -> int:
    return math.ceil(grams / 50)


def hedge_shrubs(metres: int) -> int:
    return metres * 3


def sow_seeds(plants: int, sprout: int) -> int:
    return math.ceil(plants * 100 / sprout)


def paint_tins(wall: float) -> int:
    return math.ceil(wall / 12)


def recipe_scale(grams: float, serves: int, guests: int) -> float:
    return neat(grams * guests / serves, 1)


def body_mass(kilos: float, centimetres: int) -> float:
    return neat(kilos / (centimetres / 100) ** 2, 1)


def heart_limit(age: int) -> int:
    return 220 - age


def subnet_mask(hosts: int) -> str:
    mask = 2**32 - 2 ** (hosts + 1).bit_length()
    return ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))


def download_wait(megabytes: float, megabits: int) -> float:
    return neat(megabytes * 8 / megabits, 1)


def password_bits(password: str) -> float:
    """The entropy of a password whose characters are drawn from all of the kinds that occur in
    it."""
    kinds = {_kind(character) for character in password}
    return neat(len(password) * math.log2(sum(KIND_SIZES[kind] for kind in kinds) or 1), 1)


def _kind(character: str) -> str:
    if character.islower():
        return "small"
    if character.isupper():
        return "capital"
    return "digit" if character.isdigit() else "mark"


def majority(ballots: int) -> int:
    return ballots // 2 + 1


def droop_quota(votes: int, mandates: int) -> int:
    return votes // (mandates + 1) + 1


def queue_wait(customers: int, tills: int, minutes: int) -> int:
    return customers // tills * minutes


def dewey_subject(shelf: int) -> str:
    return SUBJECTS[shelf // 100]


def parcel_girth(depth: float, breadth: float, height: float) -> float:
    return neat(2 * sum(sorted((depth, breadth, height))[:2]), 1)


def telegram(message: str) -> str:
    return f"{message.strip()} STOP"


def back_bearing(bearing: int) -> int:
    return (bearing + 180) % 360


def compass_rose(course: int) -> str:
    return WINDS[round(course / 45) % 8]


def font_leading(size: float) -> float:
    return neat(size * 1.2, 1)


def booklet_sheets(pages: int) -> int:
    return math.ceil(pages / 4)


def christen(ship: str) -> str:
    return f"I name this ship MS {ship.strip()}"
