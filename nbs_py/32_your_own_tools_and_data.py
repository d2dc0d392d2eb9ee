# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags
#     notebook_metadata_filter: kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own tools: forty rows teach a small model to call functions it has never seen
#
# **Question.** You have three Python functions and a few dozen conversations in OpenAI's format. What does it take
# to make a model call these functions, how do you measure it with your own reward, and what is still missing?
#
# **Result.** After 50 steps on 49 rows (41 of them for training), the model chooses the right function for 10
# of 15 unseen wordings instead of none, and makes 7 calls exactly. Its errors are values, such as another lamp;
# constrained decoding mends two of them, since a wrong room is valid too. It still declines all 6 requests
# that no function fits.
#
# **Runs/needs.** The model that comes with the package (`released/nano`, 2.6 M parameters); about a minute on one
# core. The same steps as commands: [the first hour](../docs/first-hour.md).
#
# Previous: [31 what reading tools costs](31_what_reading_tools_costs.ipynb) · Next: [33 lora on an import](33_lora_on_an_import.ipynb)

# %% tags=["parameters"]
ckpt = "released/nano"  # any fine-tuned checkpoint
steps = 50
lr = 1e-3
muon_lr = 0.01
others = 12  # rows in which no function fits
seed = 0

# %%
import contextlib
import inspect
import io
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Literal

import pandas as pd

from codechat import sft
from codechat.core.atomic_files import read_rows
from codechat.evaluation import intervals, scoring
from codechat.models.loading import load_model
from codechat.runs import paths, run
from codechat.tasks import RowsTask, check_reward

# %%
from codechat.text import chat
from codechat.text.tool_functions import read_tools
from codechat_lab.instruments import token_view
from codechat_lab.serve.call_grammar import prompt_grammar
from codechat_lab.serve.settings import ToolsConfig
from codechat_lab.serve.terminal import ToolChat
from codechat_lab.tasks.toolbox.prepare import CallsConfig, prepare_calls

# %%
run.ROOT = paths.ROOT = folder = Path(tempfile.mkdtemp())  # these runs are temporary
quiet = contextlib.redirect_stderr(io.StringIO())
loaded = load_model(ckpt)
print(f"{loaded.model.cfg.n_params:,} parameters, prompts list tools in the style {loaded.tools_style!r}")


# %% [markdown]
# ## Your functions
#
# Type hints and docstrings are all that the library needs. `Literal` becomes an enumeration.

# %%
def set_light(room: Literal["kitchen", "bedroom", "office", "hall"], state: Literal["on", "off"]) -> str:
    """Switch a lamp."""
    return f"light in the {room}: {state}"


def set_heating(room: Literal["kitchen", "bedroom", "office", "hall"], degrees: int) -> str:
    """Set the heating of a room."""
    return f"heating in the {room}: {degrees} degrees"


def play_music(style: Literal["jazz", "rock", "opera"]) -> str:
    """Play music of a style."""
    return f"playing {style}"


# %% [markdown]
# `read_tools` reads them from a file, as `codechat tools --tools my_tools.py` does. Each gets a schema.

# %%
TOOLS = (set_light, set_heating, play_music)
tools_file = folder / "my_tools.py"
tools_file.write_text("from typing import Literal\n\n\n" + "\n\n".join(map(inspect.getsource, TOOLS)))
schemas = list(read_tools([str(tools_file)]).schemas.values())
offer = chat.tools_prompt(schemas, loaded.tools_style)
print(json.dumps(schemas[0]), "\n\n" + offer)

# %% [markdown]
# ## Your rows
#
# Here a list of requests and calls stands in for your log of conversations. Two or three wordings for each function go
# into training. A fourth is kept for the test, with the same arguments.

# %%
ROOMS, STYLES = ("kitchen", "bedroom", "office", "hall"), ("jazz", "rock", "opera")
LIGHT = ["Turn {state} the light in the {room}.", "Light {state} in the {room}, please.", "Switch the {room} lamp {state}."]
HEAT = ["Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.", "Heating in the {room}: {degrees}."]
MUSIC = ["Play some {style}.", "I want to hear {style}.", "Put on {style} music."]
TEST = {"set_light": "Can you turn the {room} light {state}?", "set_heating": "Heat the {room} to {degrees} degrees, please.",
        "play_music": "Could you play {style} for me?"}
OTHER = ["Tell me a joke.", "Who wrote Hamlet?", "What is the capital of France?", "Book a table for two.", "How far is the moon?", "Send a mail to Anna.",
         "What time is it?", "Write a poem.", "Order a pizza.", "Where is Berlin?", "Who was Newton?", "Find a hotel."]
OTHER_TEST = ["Tell me a story.", "Who painted the Mona Lisa?", "What is the capital of Spain?", "Book a flight.", "How old is the sun?", "Call a taxi."]

# %%
arguments = {
    "set_light": [dict(room=room, state=state) for room, state in product(ROOMS, ("on", "off"))],
    "set_heating": [dict(room=room, degrees=17 + 2 * i) for i, room in enumerate(ROOMS)],
    "play_music": [dict(style=style) for style in STYLES],
}
WORDINGS = {"set_light": LIGHT, "set_heating": HEAT, "play_music": MUSIC}
asked = [(words.format(**given), name, given) for name in WORDINGS for i, given in enumerate(arguments[name])
         for j, words in enumerate(WORDINGS[name]) if name != "set_light" or (i + j) % 3]  # two wordings for each lamp
asked += [(words, None, {}) for words in OTHER[:others]]
print(len(asked), "rows;", asked[0])


# %%
def openai_row(request: str, name: str | None, given: dict) -> dict:
    """{"messages", "tools"} as OpenAI's fine-tuning takes it."""
    user = {"role": "user", "content": request}
    offered = [{"type": "function", "function": schema} for schema in schemas]
    if name is None:
        return {"messages": [user, {"role": "assistant", "content": "I have no function for that."}], "tools": offered}
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
    result = next(tool for tool in TOOLS if tool.__name__ == name)(**given)
    return {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"result": result})},
                         {"role": "assistant", "content": f"Done: {result}."}], "tools": offered}


# %%
rows_file = folder / "my_rows.jsonl"
rows_file.write_text("".join(json.dumps(openai_row(*each)) + "\n" for each in asked))
manifest = prepare_calls(CallsConfig(source=str(rows_file), out=str(folder / "mine"), tokenizer=loaded.tokenizer.spec,
                                     tools_style=loaded.tools_style, probes=0, preview=1))

# %% [markdown]
# The preview marks the tokens with loss by `[[ ]]`: the call and the final answer, not the tool list, the request or
# the result. In the picture they are green:

# %%
first = next(row for row in read_rows(folder / "mine" / "calls.train.jsonl") if len(row["messages"]) > 3)
token_view.xray_mask(first["messages"], loaded.tokenizer, loaded.tags)


# %% [markdown]
# ## Your task and your reward
#
# A reward is a function of the text and the problem. `exact` demands exactly one correct call, or no call where no
# function fits. `right_function` has weight 0: it is logged, never optimized. In a file the same
# class works as `--task my_task.py:Home`.

# %%
def exact(completion: str, problem) -> float:
    found = [(call.name, call.arguments) for call in chat.parse_calls(completion)]
    return float(found == ([tuple(problem.gold)] if problem.gold else []))


def right_function(completion: str, problem) -> float:
    found = [call.name for call in chat.parse_calls(completion)]
    return float(found == ([problem.gold[0]] if problem.gold else []))


# %%
def problem_row(request: str, name: str | None, given: dict) -> dict:
    messages = [{"role": "system", "content": offer}, {"role": "user", "content": request}]
    reference = chat.format_call(name, given) if name else "I have no function for that."
    return dict(prompt=messages, gold=[name, given] if name else None, reference=reference, split="test")


# %%
class Home(RowsTask):
    rows = [problem_row(TEST[name].format(**given), name, given) for name in TEST for given in arguments[name]]
    rows += [problem_row(words, None, {}) for words in OTHER_TEST]
    rewards = {exact: 1.0, right_function: 0.0}


task = Home()
problems = task.problems("test")
assert not {p.messages[-1]["content"] for p in problems} & {request for request, *_ in asked}  # none was trained on
print(len(problems), "test problems;", problems[0].messages[-1]["content"], "->", task.gold(problems[0]))

# %% [markdown]
# Before anything is trained on a reward: do the references earn the full reward, and does a text that solves
# nothing? Predict first: silence is the correct answer to six of the problems.

# %%
assert all(task.score(p, task.gold(p)).correct for p in problems)
found = check_reward(task, problems)
print("texts that earn the full reward on more than half of the problems:", found or "none")
silent = sum(task.score(p, "").correct for p in problems) / len(problems)
print(f"an empty answer is correct on {silent:.0%} of them")


# %% [markdown]
# ## Before
#
# The model knows other tools. Greedy answers without token masks: this measures the model alone.

# %%
def measure(model, constrain: bool = False) -> pd.DataFrame:
    result = scoring.evaluate_task(model.model, model.tokenizer, model.tags, task, problems, n=1, temperature=0.0, seed=seed,
                                   constrain=prompt_grammar if constrain else None)
    rows = pd.DataFrame(result.examples)
    rows["exact"], rows["right function"] = rows["correct"], [term["right_function"] for term in rows["terms"]]
    kinds = {p.id: "a call" if p.gold else "no call" for p in problems}
    return rows.assign(expected=rows["problem"].map(kinds)).set_index("request")


with quiet:
    before = measure(loaded)
before.groupby("expected")[["exact", "right function"]].agg(["sum", "count"])

# %% [markdown]
# ## Fine-tune
#
# One configuration, one call. The data directory records how its prompts list tools; so does the checkpoint.

# %%
cfg = sft.SFTConfig(run_name="my-tools", init_from=ckpt, data_dir=str(folder / "mine"), max_steps=steps, device_batch_size=4, seq_len=256,
                    lr=lr, muon_lr=muon_lr, eval_every=steps, log_every=10, probe_examples=0, compile=False, seed=seed)
with quiet, contextlib.redirect_stdout(io.StringIO()):
    trained = sft.train(cfg)
tuned = load_model("my-tools")
trained.metrics()[["step", "train_loss"]].dropna().set_index("step").T.round(3)

# %% [markdown]
# ## After

# %%
with quiet:
    after = measure(tuned)
table = pd.concat({"before": before, "after": after}, names=["when"]).reset_index()
summary = table.pivot_table(index="when", columns="expected", values=["exact", "right function"], aggfunc="sum", sort=False).astype(int)
summary

# %%
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame({"before": before["completion"].str.slice(0, 90), "after": after["completion"], "exact": after["exact"]}))

# %% [markdown]
# The functions are right, the values wrong: typical of a model this small. The schemas list the rooms and styles.
# **Before you read on: token masks allow only what a schema allows. How many wrong answers do they fix?** Both
# models once more, with masks; these figures are never pooled with the others.

# %%
with quiet:
    masked = {"before": measure(loaded, constrain=True), "after": measure(tuned, constrain=True)}
held = pd.concat(masked, names=["when"]).reset_index()
held = held.pivot_table(index="when", columns="expected", values=["exact", "right function"], aggfunc="sum", sort=False).astype(int)
held

# %%
gain = intervals.paired_bootstrap(before["exact"].astype(float), after["exact"].astype(float), seed)
print("exact, after minus before: {:+.2f} [{:+.2f}, {:+.2f}], paired over {} problems".format(*gain, len(problems)))

# %% [markdown]
# ## Run it
#
# `ToolChat` is what `codechat tools --ckpt my-tools --tools my_tools.py` starts. Your functions run in the sandbox,
# with `--trust` in your process. Here too no mask is used; `constrain="auto"`, the default, would enforce the schemas.

# %%
session = ToolChat(ToolsConfig(ckpt="my-tools", tools=(str(tools_file),), constrain="off"))
for request in ("Can you turn the office light off?", "Could you play opera for me?"):
    print(">", request)
    session.reply([{"role": "user", "content": request}])

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `seed = 1` | how much does the order of the rows matter? | <details><summary>outcome</summary>where it was tried first, 12 exact calls instead of 9, and 3 of 6 declined instead of 5: with 21 problems, no difference to speak of</details> |
# | `others = 6` | are half as many rows in which nothing fits enough? | <details><summary>outcome</summary>no: it declines 2 of 6, where the model declined all before</details> |
# | `steps = 10` | are ten steps enough? | <details><summary>outcome</summary>No: 2 right functions and no exact call, and it declines 2 of 6. With masks, 3 functions are right</details> |
#
# The last cell asserts the Result.

# %%
calls = {when: summary.loc[when].xs("a call", level="expected") for when in ("before", "after")}
assert len(asked) == 43 - 6 + others and len(problems) == 21
assert calls["before"]["right function"] <= 2  # bands: other seeds and processors give other counts
assert calls["after"]["right function"] >= 9 and calls["after"]["exact"] >= 4
assert gain[1] > 0 and not found and 0.25 < silent < 0.3
