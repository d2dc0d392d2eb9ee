"""Tools for chemistry, electronics, astronomy, biology and weather."""

from __future__ import annotations

import re

from codechat.tasks.toolbox.tool import ToolError, neat, need_within, tool
from codechat.tasks.toolbox.values import choice, formula, integer, name, number, numbers, strand, word

ATOMIC_MASSES = {"H": 1.008, "C": 12.011, "N": 14.007, "O": 15.999, "Na": 22.990, "S": 32.06, "Cl": 35.45, "Fe": 55.845}
COMPLEMENT = str.maketrans("ACGTacgt", "TGCAtgca")
# Gravity in metres per second squared.
GRAVITY = {"mercury": 3.70, "mars": 3.71, "venus": 8.87, "jupiter": 24.79, "saturn": 10.44}
LIGHT_SPEED = 0.299792458  # million kilometres per second
BASES_PER_CODON = 3
SOUND_SPEED = 0.343  # kilometres per second


@tool(
    "Molar mass of a molecule",
    formula=formula(),
    answer="A mole has {result} grams.",
    held_out=True,
    asks=[
        "What is the molar mass of {formula}?",
        "Molar mass of {formula}?",
        "How heavy is a mole of {formula}?",
        "Find the mass of the molecule {formula}.",
        "Grams per mole of {formula}?",
    ],
    hard=["Which mass has one mole of {formula}?"],
)
def molar_mass(formula: str) -> float:
    if not re.fullmatch(r"([A-Z][a-z]?[0-9]{0,4})+", formula):
        raise ToolError(f"{formula[:40]!r} is not a formula like C2H6O")
    parts = re.findall(r"([A-Z][a-z]?)([0-9]*)", formula)
    unknown = [element for element, _ in parts if element not in ATOMIC_MASSES]
    if unknown:
        raise ToolError(f"element {unknown[0]!r} is not known; known: {', '.join(ATOMIC_MASSES)}")
    return neat(sum(ATOMIC_MASSES[element] * int(atoms or 1) for element, atoms in parts), 3)


@tool(
    "Isotope left by half-life decay",
    grams=number(3, 900),
    half_life=integer(3, 90),
    elapsed=integer(3, 300),
    answer="{result} grams are left.",
    held_out=True,
    asks=[
        "Isotope of {grams} grams, half-life {half_life}: what is left after {elapsed}?",
        "Let {grams} grams decay for {elapsed} at half-life {half_life}.",
        "Decay of {grams} grams, half-life {half_life}, over {elapsed}?",
        "What is left of {grams} grams after {elapsed} at half-life {half_life}?",
        "How much of {grams} grams is there after {elapsed}, half-life {half_life}?",
    ],
    hard=["A sample of {grams} grams falls by half every {half_life}. How much stays after {elapsed}?"],
)
def isotope_left(grams: float, half_life: int, elapsed: int) -> float:
    need_within(0, 10**12, grams=grams, elapsed=elapsed)
    need_within(1, 10**12, half_life=half_life)
    return neat(grams * 2 ** -(elapsed / half_life))


@tool(
    "Water to dilute an acid",
    acid=number(3, 900),
    strength=integer(30, 99),
    target=integer(2, 29),
    answer="Pour in {result} ml of water.",
    held_out=True,
    asks=[
        "Dilute {acid} ml of acid from {strength} to {target} percent.",
        "Water to dilute {acid} ml of acid, {strength} to {target} percent?",
        "How much water takes {acid} ml of acid from {strength} to {target} percent?",
        "Dilution of {acid} ml from {strength} to {target} percent?",
        "Thin {acid} ml of acid from {strength} to {target} percent.",
    ],
    hard=["My {acid} ml of acid are {strength} percent and should be {target}. What do I pour in?"],
)
def dilution(acid: float, strength: int, target: int) -> float:
    need_within(0, 10**9, acid=acid)
    need_within(1, 100, strength=strength, target=target)
    if target > strength:
        raise ToolError("target must not be above strength")
    return neat(acid * (strength / target - 1), 2)


@tool(
    "Volts across a resistor",
    amperes=number(3, 90),
    ohms=number(3, 900),
    answer="The voltage is {result} volts.",
    held_out=True,
    asks=[
        "What is the voltage at {amperes} amps and {ohms} ohms?",
        "Voltage across {ohms} ohms at {amperes} amps?",
        "{amperes} amps in a resistor of {ohms} ohms: how many volts?",
        "How many volts drive {amperes} amps through {ohms} ohms?",
        "Resistor of {ohms} ohms, {amperes} amps: which voltage?",
    ],
    hard=["How many volts has a battery that pushes {amperes} amps through {ohms} ohms?"],
)
def voltage(amperes: float, ohms: float) -> float:
    need_within(0, 10**9, amperes=amperes, ohms=ohms)
    return neat(amperes * ohms)


@tool(
    "Resistors in parallel",
    ohms=numbers(3, 900),
    answer="Together they have {result} ohms.",
    held_out=True,
    asks=[
        "What do {ohms} ohms have in parallel?",
        "Resistors of {ohms} ohms in parallel?",
        "Wire {ohms} ohms in parallel.",
        "Parallel resistors: {ohms}",
        "Resistance of {ohms} ohms side by side?",
    ],
    hard=["Wire {ohms} ohms side by side. What does the current meet?"],
)
def parallel_ohms(ohms: list[float]) -> float:
    for value in ohms:
        need_within(0.001, 10**9, ohms=value)
    return neat(1 / sum(1 / value for value in ohms))


@tool(
    "Period of a planet orbit",
    radius=number(3, 900),
    answer="One orbit takes {result} Earth years.",
    held_out=True,
    asks=[
        "What is the period of an orbit at {radius} au?",
        "Orbit of {radius} au: which period?",
        "Period of a planet at {radius} au?",
        "How long is an orbit at {radius} au?",
        "When is a planet at {radius} au round the sun?",
    ],
    hard=["By Kepler, what period has a comet at {radius} au?"],
)
def orbit_period(radius: float) -> float:
    need_within(0, 10**6, radius=radius)
    return neat(radius**1.5, 2)


@tool(
    "Light delay in space, million km",
    kilometres=number(3, 9000),
    answer="The light needs {result} seconds.",
    held_out=True,
    asks=[
        "What is the delay of light over {kilometres} million km?",
        "Light delay for {kilometres} million km?",
        "How long does light take over {kilometres} million km?",
        "A probe is {kilometres} million km away. Which delay?",
        "How late do we hear from {kilometres} million km away?",
    ],
    hard=["A star {kilometres} million km from here dims. When do we see it?"],
)
def light_delay(kilometres: float) -> float:
    need_within(0, 10**12, kilometres=kilometres)
    return neat(kilometres / LIGHT_SPEED, 1)


@tool(
    "Pull of gravity on a planet",
    kilos=number(3, 900),
    planet=choice({planet: planet.capitalize() for planet in GRAVITY}),
    answer="The pull is {result} newtons.",
    held_out=True,
    asks=[
        "What is the pull of gravity on {kilos} kilos on {planet}?",
        "Gravity pull on {kilos} kilos, planet {planet}?",
        "How strong is the pull of {planet} on {kilos} kilos?",
        "Gravity of {planet} for {kilos} kilos?",
        "How many newtons have {kilos} kilos on {planet}?",
    ],
    hard=["An astronaut lifts {kilos} kilos on {planet}. Which gravity holds them?"],
)
def planet_pull(kilos: float, planet: str) -> float:
    need_within(0, 10**12, kilos=kilos)
    return neat(kilos * GRAVITY[planet], 2)


@tool(
    "Complement of a DNA strand",
    strand=strand(),
    answer="The other strand is {result}.",
    held_out=True,
    asks=[
        "What is the complement of {strand}?",
        "Complement of DNA {strand}?",
        "Which strand pairs with {strand}?",
        'Pair the DNA strand "{strand}".',
        "Write the complement strand for {strand}.",
    ],
    hard=["One strand of the helix is {strand}. What is opposite?"],
)
def dna_complement(strand: str) -> str:
    if not strand or set(strand.upper()) - set("ACGT"):
        raise ToolError("strand must consist of A, C, G and T")
    return strand.translate(COMPLEMENT)


@tool(
    "Amino acids of a gene",
    bases=integer(9, 9000),
    answer="They code {result} amino acids.",
    held_out=True,
    asks=[
        "How many amino acids has a gene of {bases} bases?",
        "Amino acids for {bases} bases?",
        "A gene has {bases} bases. How many amino acids?",
        "How big is the protein of {bases} bases?",
        "{bases} bases of a gene: how many amino acids?",
    ],
    hard=["What chain do {bases} bases of a gene build?"],
)
def amino_acids(bases: int) -> int:
    need_within(0, 10**12, bases=bases)
    return bases // BASES_PER_CODON


@tool(
    "Short Latin title of species",
    genus=name(),
    species=word(),
    answer="Write it {result}.",
    held_out=True,
    asks=[
        "Shorten the species {genus} {species}.",
        "Short Latin for genus {genus}, species {species}?",
        "Short form of the species {genus} {species}?",
        "Abbreviate the Latin {genus} {species}.",
        'Genus "{genus}", species "{species}": short title?',
    ],
    hard=["In a paper on the beetle {genus} {species}, what is the short form?"],
)
def latin_species(genus: str, species: str) -> str:
    if not genus.strip():
        raise ToolError("genus must not be empty")
    return f"{genus.strip()[0].upper()}. {species.strip().lower()}"


@tool(
    "Range of a storm by thunder",
    delay=number(3, 300),
    answer="It is {result} km away.",
    held_out=True,
    asks=[
        "How far is a storm with thunder after {delay} seconds?",
        "Range of a storm, thunder after {delay} seconds?",
        "Thunder took {delay} seconds. How near is the storm?",
        "Storm range for thunder after {delay} s?",
        "Lightning, then thunder {delay} seconds later: how close?",
    ],
    hard=["I see a flash and hear the thunder {delay} seconds later. Should I worry?"],
)
def storm_range(delay: float) -> float:
    need_within(0, 10**6, delay=delay)
    return neat(delay * SOUND_SPEED, 2)
