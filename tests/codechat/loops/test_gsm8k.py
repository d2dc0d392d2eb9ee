"""GSM8K as other projects ran it, on random models of Qwen2.5's and Llama's shape: chat and raw
prompts, from the import to the evaluation."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonl
import pytest
from random_models import randomise

from codechat import cli, grpo, sft, tasks
from codechat.core import config, registry
from codechat.core.errors import MissingFile
from codechat.formats import exchange
from codechat.models import generate, loading
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import rollout
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.tasks.base import Score
from codechat.text import chat, tokenizer
from codechat_lab.tasks.reasoning import task as reasoning

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = GPTConfig(depth=1, n_embd=32, n_head=4, block_size=1024, n_tags=0, mlp="swiglu")
SHAPES = {
    "qwen2.5": replace(SMALL, qkv_bias=True, n_kv_head=2, norm_eps=1e-6),
    "llama": replace(SMALL, n_kv_head=1, mlp_width=40, rope_theta=500000.0),
}
CLASSES = {"qwen2.5": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
R1 = "gsm8k:template=r1_zero"


def write_tokenizer(folder: Path, bos: bool) -> None:
    """A byte-level BPE with ChatML's special tokens; with Llama's post-processor that begins a
    text with its own token."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = reasoning.TEMPLATES["r1_zero"].user + "</answer>\n</answer>"
    bpe.train_from_iterator([text], trainer)
    if bos:
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            "<|endoftext|> $A", special_tokens=[(special[0], 0)]
        )
    bpe.save(str(folder / "tokenizer.json"))
    about = {"eos_token": special[0] if bos else special[2], "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.fixture(params=SHAPES)
def directory(request: pytest.FixtureRequest, home: Path) -> Path:
    (home / "tok").mkdir()
    write_tokenizer(home / "tok", bos=request.param == "llama")
    tok = tokenizer.load(f"hf:{home / 'tok'}")
    model = randomise(GPT(replace(SHAPES[request.param], vocab_size=tok.n_vocab)))
    meta = {"tokenizer": tok.to_dict(), "tags": "template"}
    with Run.create("random", {}, kind="test") as run:
        checkpoint.save(run.path, 0, model=model, meta=meta)
    out = home / request.param
    exchange.export(exchange.ExportConfig(ckpt="random", out=out, dtype="float32"))
    architectures = json.loads((out / "config.json").read_text())["architectures"]
    assert architectures == [CLASSES[request.param]]
    return out


@pytest.fixture
def gsm8k(home: Path) -> str:
    folder = home / "gsm8k"
    folder.mkdir()
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
        for i in range(60)
    ]
    for split, some in (("train", rows), ("test", rows[:4])):
        jsonl.write(folder / f"{split}.jsonl", some)
    return str(folder)


@contextmanager
def easy() -> Iterator[None]:
    """Random weights never earn anything on the task's own terms."""

    def score(self: Any, problem: Any, text: str) -> Score:
        return Score(len(set(text)) / 64, "neither", {}, False, {"variety": len(set(text)) / 64})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning.AnswerTask, "score", score)
        yield


def settings(data: str, **changes: Any) -> grpo.GRPOConfig:
    small = dict(
        data_dir=data,
        max_steps=2,
        max_new_tokens=12,
        group_size=4,
        diagnose_groups=0,
        eval_examples=2,
        warmup_steps=0,
        lr=1e-2,
        eval_every=0,
        save_every=0,
    )
    return config.resolve(
        grpo.GRPOConfig, "gsm8k", overrides=small | changes, presets=registry.LOOPS["grpo"].presets
    )


@pytest.mark.parametrize("tags", ["template", "raw"])
def test_from_the_import_to_the_evaluation(tags: str, directory: Path, gsm8k: str) -> None:
    own = None if tags == "template" else "raw"
    exchange.import_model(exchange.ImportConfig(source=directory, run_name="theirs", tags=own))
    loaded = loading.load_model("theirs")
    assert loaded.tags == tags
    name = "gsm8k" if tags == "template" else R1
    task = tasks.load(name, source=gsm8k)
    ids = chat.prompt(task.prompt(task.problems("train")[0]), loaded.tokenizer, tags)
    text = chat.decode(ids, loaded.tokenizer)
    if tags == "raw":
        begin = "<|endoftext|>" if directory.name == "llama" else ""
        assert text.startswith(begin + "A conversation between User and Assistant.")
        assert text.endswith("\nAssistant: <think>")
    else:
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with easy():
        found = grpo.train(settings(gsm8k, init_from="theirs", task=name, run_name="tuned"))
    rows = found.metrics()
    assert found.status["status"] == "finished"
    assert len(rows) == 2
    assert (rows["grad_norm"] > 0).all()
    assert rows["logprob_mismatch"].max() < 1e-3
    assert checkpoint.load("tuned").meta["tags"] == tags
    assert len(checkpoint.load("tuned").adapters)
    words = (
        f"evaluate --ckpt theirs tuned --task {name} --data-dir {gsm8k} --n 1 --ks 1 "
        "--temperature 0 --max-new-tokens 8"
    )
    assert cli.main(words.split()) == 0
    assert len(Run.open("evaluate").evals()) == 2


SAID = "so </think> <answer> 1 </answer>"


class Sampler:
    """Answers each prompt twice, and goes on to write behind the answer."""

    def __init__(self, tok: tokenizer.Tokenizer) -> None:
        self.ids = tok.encode(SAID + "\nUser: another")
        self.stop: Any = None

    def __call__(self, model: Any, prompts: Any, *, stop: Any, **others: Any) -> list[Any]:
        self.stop = stop
        return [
            generate.Completion(self.ids, [-0.5] * len(self.ids), "length")
            for _ in range(2 * len(prompts))
        ]


def answers_of(sampler: Sampler, data: str, tags: str) -> rollout.RolloutBatch:
    """Two completions of the first problem that 1 solves."""
    task = tasks.load(R1, source=data)
    problems = [p for p in task.problems("train") if p.gold["answer"] == "1"]
    return rollout.collect(
        None,  # type: ignore[arg-type]
        task,
        problems[:1],
        tokenizer.load("bytes"),
        tags,
        group_size=2,
        max_new_tokens=64,
        sampler=sampler,
    )


def test_raw_completions_end_behind_the_answer(gsm8k: str) -> None:
    """However the sampler stops: what a base model goes on to write is neither scored nor
    trained on."""
    tok = tokenizer.load("bytes")
    batch = answers_of(Sampler(tok), gsm8k, "raw")
    assert batch.texts == [SAID] * 2
    assert batch.scores[0].correct
    assert not batch.cut_off().any()
    for completion in batch.completions:
        assert completion.ids == tok.encode(SAID)
        assert len(completion.logprobs) == len(completion.ids)


def test_raw_sampling_stops_at_the_closing_tag_and_at_the_end_of_text(gsm8k: str) -> None:
    tok = tokenizer.load("bytes")
    sampler = Sampler(tok)
    answers_of(sampler, gsm8k, "raw")
    assert (tok.eot_id,) in sampler.stop
    assert tuple(tok.encode("</answer>")) in sampler.stop


def test_with_turns_the_closing_tag_ends_no_answer(gsm8k: str) -> None:
    sampler = Sampler(tokenizer.load("bytes"))
    assert answers_of(sampler, gsm8k, "reserved").completions[0].ids == sampler.ids


def sft_settings(home: Path, **changes: Any) -> sft.SFTConfig:
    folder = home / "worked"
    if not folder.exists():
        flags = "--max-examples 12 --problems 8 --eval-examples 4 --template r1_zero --levels 1"
        jsonl.prepare("reasoning", folder, *flags.split())
    shape = GPTConfig(depth=1, n_embd=16, n_head=2, block_size=768, vocab_size=257)
    usual = sft.SFTConfig(
        data_dir=str(folder),
        model=shape,
        tokenizer="bytes",
        tags="raw",
        max_steps=2,
        device_batch_size=1,
        eval_every=1,
        eval_examples=3,
        probe_examples=0,
        save_every=0,
        compile=False,
        eval_new_tokens=6,
        log_every=1,
        eval_task="reasoning:template=r1_zero,levels=[1]",
        eval_task_data=str(folder),
    )
    return replace(usual, **changes)


def test_sft_samples_a_task_at_each_evaluation(home: Path) -> None:
    found = sft.train(sft_settings(home)).evals()
    assert list(found["step"]) == [0, 1, 2]
    assert found["pass@1"].notna().all()
    assert found["heldout_loss/worked"].notna().all()
    assert set(found["task"]) == {"reasoning:template=r1_zero,levels=[1]"}
    assert (found["tier/neither"] == 1).all()


def test_sft_without_a_task_samples_none(home: Path) -> None:
    plain = sft.train(sft_settings(home, eval_task=None, run_name="plain"))
    assert "pass@1" not in plain.evals()


def test_sft_with_a_task_without_data_is_refused_before_the_run(home: Path) -> None:
    missing = str(home / "worked" / "nothing.jsonl")
    with pytest.raises(MissingFile):
        sft.train(sft_settings(home, run_name="empty", eval_task_data=missing))
    assert not (home / "runs" / "empty").exists()
