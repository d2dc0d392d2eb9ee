"""Tools that edition 2 of the catalogue holds out: domains and words of names that no tool of edition 1 has.

Composed tools and services share no word of a name with them either. Renamed and invented tools of training draw their names from common words, and six
of these (back, body, heart, left, light, team) stand in one name each here, too.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, ["household", "leisure", "public", "science"])

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
