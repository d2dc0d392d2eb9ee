"""Training on one's own files and tasks: what may be missing, and what is taken from an object."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from contracts import TINY, write_rows

from codechat import grpo, sft, tasks
from codechat.core.config import parse
from codechat.inference import protocol, terminal
from codechat.models import loading
from codechat.models.config import GPTConfig
from codechat.tasks import natural
from codechat.tasks.custom import RowsTask
from codechat.tasks.toolbox import prepare
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.text import chat
from codechat.training.settings import TOY_RUN


def test_fine_tuning_needs_no_probes_and_no_validation_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    folder = write_rows(home / "mine" / "calls.train.jsonl", [{"id": "1", "domain": "calls", "messages": messages}])
    how = dict(tokenizer="bytes", max_steps=2, device_batch_size=1, log_every=1, compile=False)
    found = sft.train(sft.SFTConfig(data_dir=folder, model=TINY, **how))
    assert found.status["status"] == "finished"
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("no ")]
    assert [note.partition(":")[0] for note in notes] == ["no held-out loss", "no behaviour probes"]
    assert not [name for name in found.evals() if name.startswith(("heldout_loss/", "probe/"))]


def test_a_checkpoint_lists_tools_as_its_conversations_did(home: Path) -> None:
    """On the command line, at the server, for natural requests, and after RL; until it is fine-tuned on others."""
    tool = {"name": "get_time", "description": "Time of a city", "parameters": {"properties": {"city": {}}}}
    words = "--tokenizer bytes --max-examples 4 --copies 0 --problems 4 --eval-examples 4 --probes 1".split()
    for style in ("described", "compact"):
        prepare.prepare_calls(parse(prepare.CallsConfig, [*words, "--out", str(home / style), "--tools-style", style]))
    common = dict(tokenizer="bytes", max_steps=1, device_batch_size=1, compile=False, probe_examples=0, eval_examples=1)
    wide = replace(TINY, block_size=2048, n_embd=16)
    first = sft.SFTConfig(data_dir=str(home / "described"), model=wide, run_name="first", **common)
    sft.train(first)
    sft.train(replace(first, data_dir=str(home / "compact"), run_name="then", init_from="first"))
    compact, described = (chat.tools_prompt([tool], style) for style in ("compact", "described"))
    for name, style, offer in (("first", "described", described), ("then", "compact", compact)):
        loaded = loading.load_model(name)
        assert loaded.tools_style == style
        request = [{"role": "user", "content": "now"}]
        ids = protocol.prompt_of([protocol.Message(**m) for m in request], [tool], loaded)
        assert ids == chat.prompt([{"role": "system", "content": offer}, *request], loaded.tokenizer, loaded.tags)
        (task := natural.NaturalTask()).tools_style = style
        asked = task.problems()[0]
        offered = chat.tools_prompt([TOOLS[n].schema for n in asked.meta["tools"]], style)
        assert task.prompt(asked)[0]["content"] == offered
    after_rl = replace(loaded, meta={"lineage": [*loading.load_model("first").meta["lineage"], {"kind": "grpo"}]})
    assert after_rl.tools_style == "described"
    (home / "tools.json").write_text(json.dumps([tool]))
    cfg = terminal.ToolsConfig(ckpt="first", tools_file=home / "tools.json", run=False)
    assert terminal.ToolChat(cfg).opening()[0]["content"] == described


def share_of_a(completion, problem):
    return completion.count("a") / max(8, len(completion))


def length(completion, problem):
    return min(len(completion), 8) / 8


class Letters(RowsTask):
    rows = [{"prompt": f"p{i}", "gold": "aaaaaaaa"} for i in range(20)]
    rewards = {share_of_a: 1.0, length: 0.0}
    no_stop = True


def test_an_object_is_trained_on_and_its_unweighted_reward_is_logged(home: Path) -> None:
    sizes = dict(model=GPTConfig(**TOY_RUN["model"]), max_steps=2, device_batch_size=2, group_size=16)
    how = dict(task=Letters(), run_name="letters", allow_dead=True)
    found = grpo.train(grpo.GRPOConfig(**TOY_RUN | sizes | how))
    assert found.status["status"] == "finished" and found.config["task"] == "letters"
    rows = found.metrics()
    assert list(rows["reward/share_of_a"]) == pytest.approx(list(rows["reward_mean"]))
    assert max(rows["reward/length"]) > max(rows["reward_mean"])
    tasks.TASKS.pop("letters")
