"""Tools for music, film, photography, sports, cycling and board games."""

from __future__ import annotations

import math

from codechat.tasks.toolbox.tool import ToolError, neat, need_within, tool
from codechat.tasks.toolbox.values import chess_field, choice, integer, name, number, word

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


@tool(
    "Pitch of a piano key",
    key=integer(1, 88),
    answer="It sounds at {result} Hz.",
    held_out=True,
    asks=[
        "What pitch has piano key {key}?",
        "Pitch of key {key} on a piano?",
        "How does key {key} of my piano sound?",
        "Tune piano key {key}.",
        "Which frequency has key {key}?",
    ],
    hard=["I press the {key}th piano key. How many hertz do I hear?"],
)
def piano_pitch(key: int) -> float:
    need_within(1, 88, key=key)
    return neat(CONCERT_PITCH * 2 ** ((key - CONCERT_KEY) / 12), 2)


@tool(
    "Gap of beats at a tempo",
    tempo=integer(30, 300),
    answer="A beat comes every {result} ms.",
    held_out=True,
    asks=[
        "What is the gap of beats at tempo {tempo}?",
        "Tempo {tempo}: how long is a beat?",
        "What is the gap at {tempo} beats a minute?",
        "How long is a beat at {tempo} bpm?",
        "Milliseconds per beat at tempo {tempo}?",
    ],
    hard=["How long is a quarter note at tempo {tempo}?"],
)
def beat_gap(tempo: int) -> float:
    need_within(1, 10_000, tempo=tempo)
    return neat(60_000 / tempo, 2)


@tool(
    "Transpose a note by semitones",
    note=choice({note: note for note in "CDEFGAB"}),
    semitones=integer(2, 300),
    answer="The note is {result}.",
    held_out=True,
    asks=[
        "Transpose {note} by {semitones} semitones.",
        "Transpose the note {note} up {semitones}.",
        "Which note is {semitones} semitones above {note}?",
        "Transpose {note} up {semitones} half steps.",
        "Play {note} higher by {semitones} semitones.",
    ],
    hard=["My song starts on {note}; I sing it {semitones} semitones up. Where do I start?"],
)
def transpose(note: str, semitones: int) -> str:
    return NOTES[(NOTES.index(note) + semitones) % len(NOTES)]


@tool(
    "Frames of a film",
    seconds=integer(3, 9000),
    answer="It has {result} frames.",
    held_out=True,
    asks=[
        "How many frames has a film of {seconds} seconds?",
        "Frames in {seconds} seconds of film?",
        "Count the frames of {seconds} seconds.",
        "Frames of a film, {seconds} seconds?",
        "How many pictures are {seconds} seconds of cinema?",
    ],
    hard=["I animate a film of {seconds} seconds. How many drawings?"],
)
def film_frames(seconds: int) -> int:
    need_within(0, 10**12, seconds=seconds)
    return seconds * FRAMES_PER_SECOND


@tool(
    "Scene cue for an actor",
    actor=name(),
    scene=integer(2, 300),
    side=choice({"left": "left", "right": "right", "back": "back|rear"}),
    answer="{result}",
    held_out=True,
    asks=[
        "Cue {actor} from the {side} in scene {scene}.",
        "Write a cue for {actor}: scene {scene}, {side}.",
        "Cue for actor {actor}, scene {scene}, {side}?",
        "Stage cue: {actor}, scene {scene}, from the {side}.",
        "Send {actor} in from the {side}, scene {scene}.",
    ],
    hard=["{actor} walks on from the {side} when scene {scene} opens. Tell the crew."],
)
def stage_cue(actor: str, scene: int, side: str) -> str:
    return f"Scene {scene}: {actor.strip()} enters {side}"


@tool(
    "Focal length on crop camera",
    focal=integer(9, 900),
    answer="It sees like {result} mm.",
    held_out=True,
    asks=[
        "What is focal length {focal} on a crop camera?",
        "Crop camera, focal length {focal}?",
        "Which focal length is {focal} mm with crop?",
        "How long is a {focal} mm lens on a crop camera?",
        "Full frame lens like {focal} mm on APS-C?",
    ],
    hard=["How long does my {focal} mm lens look on a camera with a small sensor?"],
)
def crop_focal(focal: int) -> float:
    need_within(1, 10**6, focal=focal)
    return neat(focal * CROP, 1)


@tool(
    "Exposure value of a photo",
    aperture=number(3, 30, 0.5),
    shutter=integer(3, 4000),
    answer="The exposure value is {result}.",
    held_out=True,
    asks=[
        "What is the exposure at f/{aperture} and 1/{shutter}?",
        "Exposure value of f/{aperture}, 1/{shutter}?",
        "Photo at f/{aperture}, 1/{shutter}: which exposure?",
        "Exposure for aperture {aperture}, shutter 1/{shutter}?",
        "How bright is a photo at f/{aperture} and 1/{shutter}?",
    ],
    hard=["The lens is open to {aperture} for 1/{shutter}. Which value is that in EV?"],
)
def exposure(aperture: float, shutter: int) -> float:
    need_within(0.1, 1000, aperture=aperture)
    need_within(1, 10**6, shutter=shutter)
    return neat(math.log2(aperture**2 * shutter), 1)


@tool(
    "Pace of a run in minutes",
    kilometres=number(3, 90),
    minutes=integer(9, 600),
    answer="The pace is {result} a km.",
    held_out=True,
    asks=[
        "What is the pace of {kilometres} km in {minutes} minutes?",
        "Pace of a run: {kilometres} km, {minutes} minutes.",
        "Run {kilometres} km in {minutes} minutes: which pace?",
        "I ran {kilometres} km in {minutes} minutes. My pace?",
        "Jog {kilometres} km in {minutes} min: how much per km?",
    ],
    hard=["We want to run {kilometres} km in {minutes} minutes. What is each kilometre?"],
)
def running_pace(kilometres: float, minutes: int) -> str:
    need_within(0.001, 10**6, kilometres=kilometres)
    need_within(0, 10**6, minutes=minutes)
    whole, rest = divmod(round(minutes * 60 / kilometres), 60)
    return f"{whole}:{rest:02d}"


@tool(
    "Laps to swim in a pool",
    metres=integer(50, 9000),
    answer="Swim {result} laps.",
    held_out=True,
    asks=[
        "How many laps are {metres} metres in the pool?",
        "Pool laps for {metres} metres?",
        "Laps to swim {metres} metres?",
        "I swim {metres} metres. How many laps?",
        "Crawl {metres} metres: how many turns?",
    ],
    hard=["Coach wants {metres} metres of backstroke in the pool. How often do I cross?"],
)
def pool_laps(metres: int) -> int:
    need_within(0, 10**12, metres=metres)
    return math.ceil(metres / POOL_METRES)


@tool(
    "League score from wins and draws",
    wins=integer(2, 300),
    draws=integer(2, 300),
    losses=integer(2, 300),
    answer="The team has {result} points.",
    held_out=True,
    asks=[
        "What is the league score for {wins} wins, {draws} draws, {losses} losses?",
        "League score: {wins} wins, {draws} draws, {losses} losses.",
        "Score {wins} wins, {draws} draws and {losses} losses.",
        "{wins} wins, {draws} draws, {losses} losses: which score?",
        "Football club, {wins} won, {draws} drawn, {losses} lost: how many points?",
    ],
    hard=["We won {wins}, tied {draws} and lost {losses}. Where are we in the league?"],
)
def league_score(wins: int, draws: int, losses: int) -> int:
    need_within(0, 10**9, wins=wins, draws=draws, losses=losses)
    return 3 * wins + draws


@tool(
    "Chant for a team",
    team=name(),
    answer="{result}",
    held_out=True,
    asks=[
        "Make a chant for {team}.",
        'Chant for the team "{team}"?',
        "Cheer for {team}!",
        "What do fans of {team} shout?",
        'I need a chant for our team "{team}".',
    ],
    hard=["Our team {team} is about to score; make some noise."],
)
def team_chant(team: str) -> str:
    return f"Go, {team.strip()}, go!"


@tool(
    "Gear ratio of a bicycle",
    chainring=integer(20, 120),
    cog=integer(9, 120),
    answer="The ratio is {result}.",
    held_out=True,
    asks=[
        "Gear ratio of {chainring} to {cog} teeth?",
        "What is the gear ratio, chainring {chainring}, cog {cog}?",
        "Bicycle gear: {chainring} in front, {cog} behind.",
        "Ratio of chainring {chainring} and cog {cog}?",
        "Pedals {chainring} teeth, wheel {cog}: which gear?",
    ],
    hard=["How often does the bicycle wheel turn with {chainring} teeth in front, {cog} behind?"],
)
def gear_ratio(chainring: int, cog: int) -> float:
    need_within(1, 10_000, chainring=chainring, cog=cog)
    return neat(chainring / cog, 2)


@tool(
    "Tyre pressure for a rider",
    kilos=number(30, 300, 0.5),
    answer="Pump to {result} bar.",
    held_out=True,
    asks=[
        "Tyre pressure for {kilos} kilos?",
        "What tyre pressure suits {kilos} kilos?",
        "Pressure for a rider of {kilos} kilos?",
        "Pump the tyre for a rider of {kilos} kilos.",
        "How many bar for {kilos} kilos?",
    ],
    hard=["I weigh {kilos} kilos and my tyre goes flat. How much air?"],
)
def tyre_pressure(kilos: float) -> float:
    need_within(1, 1000, kilos=kilos)
    return neat(kilos / 10, 1)


@tool(
    "New Elo rating of a player",
    own=integer(300, 2900),
    rival=integer(300, 2900),
    outcome=choice({"win": "win|victory", "draw": "draw|tie", "loss": "loss|defeat"}),
    answer="The new rating is {result}.",
    held_out=True,
    asks=[
        "New Elo rating: own {own}, rival {rival}, {outcome}.",
        "Elo {own}, {outcome} against {rival}: new rating?",
        "Rating after a {outcome}, {own} against {rival}?",
        "New rating of a player of {own} after a {outcome} against {rival}?",
        "Chess {outcome}, {own} against {rival}: what now?",
    ],
    hard=["I stood at {own} and met a player at {rival}; it was a {outcome}. Where am I?"],
)
def elo_rating(own: int, rival: int, outcome: str) -> int:
    need_within(0, 10_000, own=own, rival=rival)
    expected = 1 / (1 + 10 ** ((rival - own) / ELO_SPREAD))
    return round(own + ELO_STEP * (ELO_RESULTS[outcome] - expected))


@tool(
    "Odds of a six with dice",
    rolls=integer(2, 200),
    answer="The odds are {result} percent.",
    held_out=True,
    asks=[
        "What are the odds of a six in {rolls} rolls?",
        "Odds of one six with {rolls} dice?",
        "I roll {rolls} dice. How likely is a six?",
        "Chance of a six on {rolls} dice?",
        "How sure is a six if I throw {rolls} times?",
    ],
    hard=["I have {rolls} dice. Will a six come up?"],
)
def dice_odds(rolls: int) -> float:
    need_within(0, 10_000, rolls=rolls)
    return neat(100 * (1 - (5 / 6) ** rolls), 2)


@tool(
    "Scrabble score of tiles",
    tiles=word(),
    answer="They score {result}.",
    held_out=True,
    asks=[
        'What does "{tiles}" score in Scrabble?',
        'Scrabble score of "{tiles}"?',
        "Lay the tiles {tiles}. What do I score?",
        'I play "{tiles}" on the board. How many points?',
        "Score the tiles {tiles}.",
    ],
    hard=['Is it worth laying the tiles "{tiles}"?'],
)
def scrabble_score(tiles: str) -> int:
    return sum(TILES.get(c, 0) for c in tiles.lower())


@tool(
    "Moves of a chess knight",
    field=chess_field(),
    answer="It has {result} moves.",
    held_out=True,
    asks=[
        "How many moves has a knight on {field}?",
        "Knight moves from {field}?",
        "A chess knight stands on {field}. How many moves?",
        "My horse is on {field}. How free is it?",
        "Chess: moves of the knight on {field}?",
    ],
    hard=["From {field}, how often may the jumping chess piece choose?"],
)
def knight_reach(field: str) -> int:
    if len(field) != 2 or field[0] not in "abcdefgh" or field[1] not in "12345678":
        raise ToolError(f"{field[:20]!r} is not a field like e4")
    column, row = "abcdefgh".index(field[0]), int(field[1]) - 1
    jumps = [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2) if abs(a) != abs(b)]
    return sum(0 <= column + a < 8 and 0 <= row + b < 8 for a, b in jumps)
