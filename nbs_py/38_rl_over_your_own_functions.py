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
# # RL over your own functions: a shop of ten, fifty rows, and the control beside
#
# **Question.** You have a file of typed Python functions and fifty requests with the expected calls. What does RL add
# to a short SFT on them, and does it beat the same time of more SFT?
#
# **Result.** Nothing over the control. SFT takes the share of correct samples from 0.14 to 0.43 on twenty held-out requests;
# RL adds 0.06 [0.01, 0.12] to that, and as long a further SFT adds 0.06 too. Twelve steps of RL, one seed;
# in two further ones more SFT gains more than RL ("Try this").
#
# **Runs/needs.** The model that comes with the package (`released/nano`, 2.6 M parameters), `examples/shop.py` and
# `examples/shop.jsonl`; about a minute and a half of one core. The same in commands: [tasks](../docs/tasks.md#your-own-functions).
#
# Previous: [37 what tiered rewards unlearn](37_what_tiered_rewards_unlearn.ipynb) · Next: [39 when rl pays](39_when_rl_pays.ipynb)

# %% tags=["parameters"]
ckpt = "released/nano"
sft_steps = 30
rl_steps = 12
control_steps = 40  # of SFT: as long as RL takes
lr = 1e-4  # of RL
seed = 0

# %%
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import pandas as pd

from codechat import grpo, sft
from codechat.evaluation import diagnose, intervals, scoring
from codechat.evaluation.settings import DiagnoseConfig
from codechat.models.loading import load_model
from codechat.runs import paths, run
from codechat.tasks.tools import ToolsTask
from codechat.text import tool_calls
from codechat_lab.tasks.toolbox.prepare import CallsConfig, prepare_calls

# %%
examples = next(folder / "examples" for folder in Path(sft.__file__).parents if (folder / "examples/shop.py").is_file())
shop, rows = str(examples / "shop.py"), str(examples / "shop.jsonl")
run.ROOT = paths.ROOT = folder = Path(tempfile.mkdtemp())  # these runs are temporary
seconds = {}  # of processor time, by what was trained


@contextlib.contextmanager
def timed(name: str):
    """Count the processor time of a training, and hide its progress."""
    begin = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
    seconds[name] = time.process_time() - begin


# %% [markdown]
# ## The task: two files
#
# No class: the functions are the environment, a row says which calls are right. `codechat grpo --tools shop.py --data-dir shop.jsonl`
# makes the same task. Each episode has its own copy of the shop, in the sandbox.

# %%
loaded = load_model(ckpt)
task = ToolsTask(shop, rows)  # runs the functions in the sandbox
task.tools_style = loaded.tools_style
train, held = task.problems("train"), [*task.problems("select"), *task.problems("test")]
print(len(train), "requests to train on,", len(held), "held out\n")
print(task.prompt(held[0])[0]["content"], "\n")
print(held[0].messages[0]["content"], "->", task.gold(held[0]))

# %% [markdown]
# Episodes, played by hand. A result comes back as a turn of the function, which carries no loss; so does an error. One expected
# call was made, so each ends here.

# %%
world = task.environment()
for item in ("clock", "chair", "sofa"):
    world.reset(train[0])
    text = tool_calls.format_call("order", {"item": item})
    told, reward, done = world.step({"role": "assistant", "content": text})
    print(text, "\n   ", told[0]["content"])


# %% [markdown]
# ## Before, and `diagnose` first
#
# Is there anything that RL can learn from? Groups of four samples of the training requests say: where all four earn the
# same, there is no gradient.

# %%
def judged(name: str) -> dict:
    """The verdict of `codechat diagnose`."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = diagnose.diagnose(DiagnoseConfig(ckpt=name, tools=(shop,), data_dir=rows, max_new_tokens=40, group_size=4, run_name=f"diagnose-{Path(name).name}"))
    return dict(verdict=found.verdict, reward=round(found.reward_mean, 2), groups_that_differ=f"{found.effective_groups} of {found.n_groups}")


# %%
def measure(model) -> pd.DataFrame:
    """Four samples for each held-out request, and a greedy answer."""
    results = {}
    for how, n, temperature in (("sampled", 4, 1.0), ("greedy", 1, 0.0)):
        found = scoring.evaluate_task(model.model, model.tokenizer, model.tags, task, held, n=n, temperature=temperature, max_new_tokens=40, seed=seed)
        answers = pd.DataFrame(found.examples)
        results[how] = answers.groupby("problem")["correct"].mean()
        if how == "greedy":
            results["answer"] = answers.set_index("problem")["completion"].str.slice(0, 100)
    return pd.DataFrame(results)


# %%
before = measure(loaded)
verdicts = {"before": judged(ckpt)}
print(verdicts["before"])


# %% [markdown]
# ## A short SFT on the training rows
#
# The rows hold no conversations; the functions make them: the expected call is played, and its result is the answer. Of
# thirty, 27 are trained on: the preparation keeps three for its own held-out loss.

# %%
def conversation(problem) -> dict:
    """The row of SFT: request, call, result, answer."""
    world = task.environment()
    _, *asked = world.reset(problem)
    call = {"role": "assistant", "content": task.gold(problem)}
    told, _, _ = world.step(call)
    value = next(iter(json.loads(told[0]["content"]).values()))
    messages, _ = tool_calls.as_openai([*asked, call, *told])
    return {"messages": [*messages, {"role": "assistant", "content": f"The answer is {value}."}]}


# %%
source = folder / "conversations.jsonl"
source.write_text("".join(json.dumps(conversation(problem)) + "\n" for problem in train))
with contextlib.redirect_stdout(io.StringIO()):
    prepare_calls(CallsConfig(source=str(source), tools=(shop,), out=str(folder / "shop"), tokenizer=loaded.tokenizer.spec, tools_style=loaded.tools_style, probes=0))


def fine_tune(name: str, start: str, steps: int) -> None:
    with timed(name):
        sft.train(sft.SFTConfig(run_name=name, init_from=start, data_dir=str(folder / "shop"), max_steps=steps, device_batch_size=4, lr=1e-3,
                                muon_lr=0.01, eval_every=steps, log_every=10, probe_examples=0, compile=False, seed=seed))


# %%
fine_tune("shop-sft", ckpt, sft_steps)
after_sft = measure(load_model("shop-sft"))
verdicts["SFT"] = judged("shop-sft")
print(verdicts["SFT"], f"{seconds['shop-sft']:.0f} s")

# %% [markdown]
# ## RL, and the control
#
# The verdict was LIVE before any SFT: in a quarter of the groups a sample was right. The line of the command: `codechat grpo --init-from shop-sft --tools shop.py --data-dir shop.jsonl`. A gain counts
# against the cheapest control: SFT on the same rows for as long.

# %%
with timed("shop-rl"):
    trained = grpo.train(grpo.GRPOConfig(run_name="shop-rl", init_from="shop-sft", tools=(shop,), data_dir=rows, max_steps=rl_steps, group_size=8,
                                         device_batch_size=6, max_new_tokens=40, lr=lr, eval_every=0, save_every=0, diagnose_groups=0, seed=seed))
after_rl = measure(load_model("shop-rl"))
trained.metrics()["reward_mean"].dropna().rolling(10).mean().iloc[9::10].round(2).tolist()

# %%
fine_tune("shop-more-sft", "shop-sft", control_steps)
after_more = measure(load_model("shop-more-sft"))
print({name: f"{spent:.0f} s" for name, spent in seconds.items()})

# %% [markdown]
# ## After
#
# Twenty held-out requests: the share of correct samples (four each), and of greedy answers. Intervals are paired over the
# requests. RL moves the policy less than SFT does, so its interval is the narrowest; the gains are equal.

# %%
columns = {"before": before, "SFT": after_sft, "SFT, then RL": after_rl, "SFT, then more SFT": after_more}
table = pd.DataFrame({name: found[["sampled", "greedy"]].mean() for name, found in columns.items()}).T.round(3)
table

# %%
gains = {}
for name, one, other in (("RL over SFT", after_rl, after_sft), ("more SFT over SFT", after_more, after_sft), ("RL over more SFT", after_rl, after_more)):
    gains[name] = intervals.paired_bootstrap(other["sampled"], one["sampled"], seed)
    print("{}: {:+.2f} [{:+.2f}, {:+.2f}]".format(name, *gains[name]))

# %%
asked = {problem.id: problem.messages[0]["content"] for problem in held}
answers = pd.DataFrame({"SFT": after_sft["answer"], "RL": after_rl["answer"], "more SFT": after_more["answer"]}).rename(index=asked)
with pd.option_context("display.max_colwidth", None):
    display(answers.apply(lambda column: column.str.removeprefix("<functioncall> ")).head(8))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `seed = 1`, `seed = 2` | is the gain the seed's? | <details><summary>outcome</summary>RL over SFT +0.04 [-0.04, 0.11] and +0.05 [-0.01, 0.12], more SFT over SFT +0.17 [0.00, 0.35] and +0.15 [-0.06, 0.36]</details> |
# | `rl_steps = 180`, `control_steps = 600` | five minutes each: do more steps part the two? | <details><summary>outcome</summary>yes: RL takes 0.43 to 0.55 (+0.12 [0.03, 0.24]), and 600 steps of SFT on 27 rows forget: 0.31. RL minus that is +0.24 [-0.04, 0.50], but the shorter control above has 0.49. One seed</details> |
# | `sft_steps = 60` | what is left for RL after a longer SFT? Look at the verdict first | <details><summary>outcome</summary>less: 16 of 64 groups differ (26 after thirty steps). SFT has 0.56; RL adds 0.05 [-0.03, 0.15], more SFT 0.04 [-0.05, 0.12]</details> |
#
# The last cell asserts the Result.

# %%
assert (len(train), len(held)) == (30, 20)
assert table.loc["SFT", "sampled"] > table.loc["before", "sampled"] + 0.1  # bands: other seeds and processors give other counts
assert table.loc["SFT, then RL", "sampled"] > table.loc["SFT", "sampled"] - 0.05
assert verdicts["SFT"]["verdict"] in ("LIVE", "WEAK")
