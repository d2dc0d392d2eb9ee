"""The mini recipe: nano's stages, a model of 8.7 million parameters and seven times the compute. At most two hours of two cores.

More of everything that nano had least of: pretraining, the first SFT, and the SFT on lists of tools; and there also requests in everyday words.
Notebook 36 tells what size and compute bought on nano's data, notebook 37 what the words did. The rates of AdamW fall with the width, as those
of its matrices do in Muon by their shape."""

from __future__ import annotations

from dataclasses import replace

from codechat.launch.recipes.nano import MODEL, NANO, PRODUCTS, RATES, READING

WIDE = MODEL | PRODUCTS | dict(depth=6, n_embd=320, n_head=5)
SFT = dict(lr=2e-3)
# requests in everyday words; nano has no room for them and forgets tools that it knew (LOG.md)
EVERYDAY = dict(
    services=0.15, wordings=0.5, varied_values=0.6, plain_answers=0.8, multi_turn=0.13, small_talk=0.04, series=0.5
)
MIX = ("calls=0.70", "lookup_loose=0.05", "lookup_phrases=0.04", "copy=0.06", "code=0.06", "short=0.06", "chat=0.03")
CHANGED: dict[str, dict[str, object]] = {
    "code": dict(talk=True),
    "calls": dict(reading=READING | EVERYDAY),
    "pretrain": RATES | dict(model=WIDE, max_steps=800, eval_every=200, save_every=100, lr=1.5e-2),
    "base": SFT | dict(max_steps=500, eval_every=250, save_every=100),
    "words": SFT,
    "lookups": SFT,
    "phrases": SFT | dict(max_steps=240),
    "sft": SFT | dict(mix=MIX, max_steps=2600, eval_every=650, save_every=200),
    "rl": dict(lr=2e-4),
}
WALKTHROUGHS = ("notebooks", "report")  # their claims are about nano's figures

MINI = tuple(
    replace(stage, settings={**stage.settings, **CHANGED.get(stage.name, {})})
    for stage in NANO
    if stage.name not in WALKTHROUGHS
)
