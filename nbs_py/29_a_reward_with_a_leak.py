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
# # A reward with a leak, and a policy that finds it
#
# **Question.** The reward looks for the correct call *in* the answer, instead of comparing the answer with it. Does a
# small policy find the difference, and what shows it?
#
# **Result.** After 60 updates the leaky reward pays 0.85 of the answers to held-out requests, and 0.01 of them
# are correct. With the leak closed, the same policy ends at 0.93 correct. Reference solutions do not show the
# leak; the red-team check names it before the first update.
#
# **Runs/needs.** No runs and no data: one SFT of a model with two layers and two RL runs of it, about 40 seconds of one
# core. Claims are bands over five seeds.
#
# The loop by hand: [RL in two minutes](00_rl_in_two_minutes.ipynb). A reward that could be forged:
# [printed rewards](24_museum_printed_reward.ipynb).
#
# Previous: [28 read a failed run](28_read_a_failed_run.ipynb) · Next: [30 pocket apps](30_pocket_apps.ipynb)

# %% tags=["parameters"]
seed = 0
sft_steps = 150
rl_steps = 60
teacher_wrong = 0.8  # share of the teacher's calls whose function is drawn at random
second_call = 0.3  # share of the teacher's answers that add a second call, also at random
lr = 1e-3

# %%
import copy
import random

import pandas as pd
import torch
from IPython.display import display

from codechat.data import conversations
from codechat.models import optim
from codechat.models.config import GPTConfig

# %%
from codechat.models.gpt import GPT
from codechat.rl import advantages, rollout
from codechat.tasks import check_reference_solutions, check_reward
from codechat.tasks.base import Problem, Score
from codechat.text import chat
from codechat_lab.instruments import reward_starts
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.tasks.funcall import FuncallTask

tok, rng = reward_starts.vocabulary(), random.Random(seed)
MOST = 64  # tokens of an answer: room for nearly three calls

# %% [markdown]
# ## The task and its two rewards
#
# Six functions of one number, as in notebook 00. A request in words, one correct call.

# %%
PHRASES = {"double": "Double {n}.", "square": "Square {n}.", "halve": "What is half of {n}?",
           "negate": "Change the sign of {n}.", "is_prime": "Is {n} prime?", "to_binary": "Write {n} in binary."}


def make_problem(split: str, i: int) -> Problem:
    name, n = rng.choice(list(PHRASES)), rng.randrange(100)
    request = [{"role": "user", "content": PHRASES[name].format(n=n)}]
    return Problem(f"{split}-{i}", request, {"name": name, "arguments": {"n": n}}, split)


held_out = [make_problem("test", i) for i in range(48)]
unseen = {p.messages[0]["content"] for p in held_out}
train = [p for p in (make_problem("train", i) for i in range(1200)) if p.messages[0]["content"] not in unseen]


# %% [markdown]
# The leak is one operator: `in` where `==` belongs. `correct` is the check. Nothing is trained on it, and both runs log it.
# (The library's own [staircase](06_reward_staircase.ipynb) is closed here: whatever follows the call costs a rung.)

# %%
class OneCall(FuncallTask):
    """Pays 1 or 0. Leaky: the correct call is somewhere in the answer. Closed: it is the answer."""

    def __init__(self, leaky: bool) -> None:
        super().__init__()
        self.leaky = leaky

    def score(self, problem: Problem, completion: str) -> Score:
        gold, answer = self.gold(problem), completion.strip()
        paid = gold in answer if self.leaky else gold == answer
        return Score(float(paid), "full" if paid else "no_tag", {"calls": answer.count(chat.CALL_TAG)}, gold == answer)


rewards = {"leaky": OneCall(True), "closed": OneCall(False)}

# %% [markdown]
# ## Before training: who would have seen it?
#
# Two checks take a second. Reference solutions must earn the full reward. The red team tries texts that solve
# nothing, among them the answers to all problems at once. **Which of the two finds the leak?**

# %%
checks = {name: (check_reference_solutions(task, held_out), check_reward(task, held_out)) for name, task in rewards.items()}
pd.DataFrame({name: {"reference solutions paid": f"{references.passed} of {references.n}",
                     "texts that earn the full reward on most problems": ", ".join(f"{k} ({v:.0%})" for k, v in red.items()) or "none"}
              for name, (references, red) in checks.items()}).T


# %% [markdown]
# The red team: all answers at once earn the leaky reward on every problem. Correct answers earn it too, so they show
# nothing. Ignore the warning, and see what the policy finds.
#
# ## The policy before RL
#
# The policy imitates a careless teacher: four of five calls draw the function at random, and three of ten
# answers add a second call. So it has seen two calls in one answer before RL (without, it finds the leak too:
# see below). In the vocabulary of `reward_starts` a call takes about 22 tokens.

# %%
def taught(problem: Problem) -> str:
    names = [rng.choice(list(PHRASES)) if rng.random() < teacher_wrong else problem.gold["name"]]
    names += [rng.choice(list(PHRASES))] if rng.random() < second_call else []
    return "\n".join(chat.format_call(name, problem.gold["arguments"]) for name in names)


told = [p.messages + [{"role": "assistant", "content": taught(p)}] for p in train]
rows = [conversations.encode({"messages": m, "domain": "calls"}, tok, "reserved", 128) for m in told]
loader = conversations.PackedLoader({"calls": rows}, None, batch=8, T=128, seed=seed)

# %%
start = GPT(GPTConfig(depth=2, n_embd=64, n_head=4, block_size=128, vocab_size=tok.n_vocab), seed=seed)
optimizers = optim.build(start, lr=1e-2, optimizer="muon", weight_decay=0.0)
for step in range(sft_steps):
    batch = loader.next()
    start.loss(batch.ids, batch.targets, positions=batch.positions, mask=conversations.packed_mask(batch.docs)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(f"{sum(p.numel() for p in start.parameters()):,} weights after {sft_steps} steps")


# %% [markdown]
# ## RL, live, on both rewards
#
# From the same weights, on the same requests: 8 requests an update, 8 answers to each, REINFORCE with the group's
# mean as baseline. Points are held-out requests. **On the left, where do the curves part, and which one goes down?**

# %%
@torch.no_grad()
def rolled(policy: GPT, task: OneCall, problems: list[Problem], group_size: int, seed: int, temperature: float = 1.0) -> rollout.RolloutBatch:
    how = dict(group_size=group_size, max_new_tokens=MOST, seed=seed, temperature=temperature)
    return rollout.collect(policy, task, problems, tok, "reserved", **how)


def row_of(step: int, batch: rollout.RolloutBatch) -> dict[str, float]:
    calls = sum(score.parts["calls"] for score in batch.scores) / len(batch.scores)
    return dict(step=step, paid=float(batch.rewards.mean()), exact=float(batch.correct.float().mean()), calls=calls)


# %%
def draw() -> object:
    last = {name: found[-1] if found else {"paid": 0, "exact": 0} for name, found in checked.items()}
    title = f"Leaky: {last['leaky']['paid']:.0%} are paid, {last['leaky']['exact']:.0%} are correct. Closed: {last['closed']['exact']:.0%} are correct"
    fig, axes = new_figure(title, cols=2, size=(7.2, 3.0), sharey=True)
    for ax, name in zip(axes[0], rewards):
        train_rows, test_rows = pd.DataFrame(curves[name]), pd.DataFrame(checked[name])
        for column, colour in (("paid", "blue"), ("exact", "orange")) if curves[name] else ():
            smooth = train_rows[column].ewm(span=6).mean()
            ax.plot(train_rows["step"], smooth, color=OKABE_ITO[colour], label=column, linewidth=2.6 if column == "paid" else 1.2)
            ax.plot(test_rows["step"], test_rows[column], "o", color=OKABE_ITO[colour], markersize=4.5)
        ax.set(ylim=(-0.02, 1.04), xlim=(-1, rl_steps + 1))
        finish(ax, x=f"update, {name} reward", y="share of answers" if name == "leaky" else None, loc="upper left")
    return fig


# %%
def learn(name: str) -> GPT:
    policy, task, requests = copy.deepcopy(start), rewards[name], random.Random(seed)
    (optimizer,) = optim.build(policy, lr=lr, weight_decay=0.0)
    checked[name].append(row_of(0, rolled(policy, task, held_out, 2, 1)))
    for step in range(1, rl_steps + 1):
        batch = rolled(policy, task, requests.sample(train, 8), 8, seed * 10_007 + step)
        reward_starts.backward(policy, batch, advantages.group_advantages(batch.rewards, "mean"))
        optimizer.step()
        optimizer.zero_grad()
        curves[name].append(row_of(step, batch))
        if step % 10 == 0:
            checked[name].append(row_of(step, rolled(policy, task, held_out, 2, 1)))
            live.update(draw())
    return policy


# %%
curves, checked = ({name: [] for name in rewards} for _ in range(2))
live = display("begins", display_id=True)
policies = {name: learn(name) for name in rewards}

# %% [markdown]
# ## What the policies write
#
# Greedy answers to the same requests, and what each reward pays for them. Seeds find different texts; a table further
# down has five of them.

# %%
shown = {name: rolled(policy, rewards[name], held_out[:4], 1, 0, temperature=0.0) for name, policy in policies.items()}
table = pd.DataFrame([{"request": p.messages[0]["content"], "trained on": name, "paid": batch.scores[i].reward, "exact": batch.scores[i].correct,
                       "answer": batch.texts[i].replace("\n", " |").replace(chat.CALL_TAG, "").replace('"arguments": ', "").replace('"name": ', "")}
                      for i, p in enumerate(held_out[:4]) for name, batch in shown.items()])
with pd.option_context("display.max_colwidth", None):
    display(table.set_index(["request", "trained on"]))

# %% [markdown]
# ## The instruments
#
# - **Paid beside checked.** Every loop of the library logs `reward_mean` and `exact_match` of the same answers. They part on the
#   leaky reward only. A loss or a reward alone looks like success.
# - **Samples.** `samples.jsonl` of a run has the best and the worst answer of each group. Read the best ones.
# - **Length.** Calls per answer grow in three of five seeds. In the others the answers go on without a call.
# - **The red team.** It names the text before the first update: `codechat diagnose` prints it for a task of your own.

# %%
ends = pd.DataFrame({(name, when): rows[at] for name, rows in checked.items() for when, at in (("start", 0), ("end", -1))}).T.drop(columns="step")
ends["paid - exact"] = ends["paid"] - ends["exact"]
ends.round(2)

# %% [markdown]
# Five seeds, held-out requests at temperature 1, as they ended where this was written:
#
# | seed | paid, leaky | correct, leaky | calls per answer, leaky | correct, closed | what the leaky policy writes |
# |---|---|---|---|---|---|
# | 0 | 0.23 to 0.85 | 0.07 to 0.01 | 1.5 to 2.0 | 0.93 | guesses until the tokens end |
# | 1 | 0.26 to 0.31 | 0.16 to 0.00 | 1.3 to 1.1 | 0.80 | a call and broken pieces of others: nothing pays for ending |
# | 2 | 0.21 to 0.74 | 0.08 to 0.00 | 1.3 to 1.0 | 0.85 | one call, and rubbish behind it |
# | 3 | 0.24 to 0.67 | 0.10 to 0.00 | 1.4 to 3.9 | 0.89 | guesses, often the same one again |
# | 4 | 0.20 to 0.72 | 0.09 to 0.00 | 1.4 to 4.1 | 0.83 | guesses, often the same one again |
#
# ## Try this
#
# Answer the question first. Outcomes of seed 0.
#
# | change | question | outcome |
# |---|---|---|
# | `second_call = 0` | the teacher never adds a call: does the policy find the leak? | <details><summary>outcome</summary>Yes: exact match ends at 0.01, as rubbish after the call costs nothing; paid 0.85.</details> |
# | `teacher_wrong = 0.3` | the first call is mostly right: is a second one still worth it? | <details><summary>outcome</summary>Yes: paid 0.70 to 0.97, exact match 0.40 to 0.12. Every answer still has a second guess, which costs nothing.</details> |
#
# The last cell asserts the Result: the bands hold for seeds 0 to 4.

# %%
leaky, closed = ends.loc["leaky"], ends.loc["closed"]
assert all(references.passed == 48 for references, _ in checks.values())
assert checks["leaky"][1] == {"all answers": 1.0} and not checks["closed"][1]
if (sft_steps, rl_steps, teacher_wrong, second_call, lr) == (150, 60, 0.8, 0.3, 1e-3):
    assert leaky["exact"]["end"] < 0.1 and leaky["paid"]["end"] - leaky["exact"]["end"] > 0.25, ends
    assert closed["exact"]["end"] > closed["exact"]["start"] + 0.3 and closed["exact"]["end"] > 0.55, ends
    assert closed["calls"]["end"] < 1.2, ends
