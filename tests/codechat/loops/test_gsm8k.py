"""GSM8K as other projects ran it, on random models of Qwen2.5's and Llama's shape: chat and raw
prompts, from the import to the evaluation."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5": dict(mlp="swiglu", qkv_bias=True, n_kv_head=2, norm_eps=1e-6),
    "llama": dict(mlp="swiglu", n_kv_head=1, mlp_width=40, rope_theta=500000.0),
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
    how = dict(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    text = reasoning.TEMPLATES["r1_zero"].user + "</answer>\n</answer>"
    bpe.train_from_iterator([text], tokenizers.trainers.BpeTrainer(**how, show_progress=False))
    if bos:
        begins = dict(special_tokens=[(special[0], 0)])
        bpe.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", **begins)
    bpe.save(str(folder / "tokenizer.json"))
    about = {"eos_token": special[0] if bos else special[2], "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.fixture(params=SHAPES)
def directory(request: pytest.FixtureRequest, home: Path) -> Path:
    (home / "tok").mkdir()
    write_tokenizer(home / "tok", bos=request.param == "llama")
    tok = tokenizer.load(f"hf:{home / 'tok'}")
    shape = dict(depth=1, n_embd=32, n_head=4, block_size=1024, n_tags=0) | SHAPES[request.param]
    model = randomise(GPT(GPTConfig(vocab_size=tok.n_vocab, **shape)))
    with Run.create("random", {}, kind="test") as run:
        checkpoint.save(
            run.path, 0, model=model, meta={"tokenizer": tok.to_dict(), "tags": "template"}
        )
    out = home / request.param
    exchange.export(exchange.ExportConfig(ckpt="random", out=out, dtype="float32"))
    assert json.loads((out / "config.json").read_text())["architectures"] == [
        CLASSES[request.param]
    ]
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
    )
    small |= dict(warmup_steps=0, lr=1e-2, eval_every=0, save_every=0)
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
    assert len(checkpoint.load("tuned").extra["lora"])
    words = [
        "evaluate",
        "--ckpt",
        "theirs",
        "tuned",
        "--task",
        name,
        "--data-dir",
        gsm8k,
        "--n",
        "1",
        "--ks",
        "1",
    ]
    assert cli.main([*words, "--temperature", "0", "--max-new-tokens", "8"]) == 0
    assert len(Run.open("evaluate").evals()) == 2


def test_raw_completions_end_behind_the_answer(gsm8k: str) -> None:
    """However the sampler stops: what a base model goes on to write is neither scored nor
    trained on."""
    tok = tokenizer.load("bytes")
    task = tasks.load(R1, source=gsm8k)
    written = "so </think> <answer> 1 </answer>"
    ids = tok.encode(written + "\nUser: another")
    seen: dict[str, Any] = {}

    def sampler(model: Any, prompts: Any, **how: Any) -> list[Any]:
        seen.update(how)
        return [
            generate.Completion(ids, [-0.5] * len(ids), "length") for _ in prompts for _ in range(2)
        ]

    problems = [p for p in task.problems("train") if p.gold["answer"] == "1"][:1]
    batch = rollout.collect(
        None,
        task,
        problems,
        tok,
        "raw",
        group_size=2,
        max_new_tokens=64,
        sampler=sampler,
    )  # type: ignore[arg-type]
    assert batch.texts == [written] * 2
    assert batch.scores[0].correct
    assert not batch.cut_off().any()
    assert all(
        c.ids == tok.encode(written) and len(c.logprobs) == len(c.ids) for c in batch.completions
    )
    assert (tok.eot_id,) in seen["stop"]
    assert tuple(tok.encode("</answer>")) in seen["stop"]
    chatting = rollout.collect(
        None,
        task,
        problems,
        tok,
        "reserved",
        group_size=2,
        max_new_tokens=64,
        sampler=sampler,
    )  # type: ignore[arg-type]
    assert chatting.completions[0].ids == ids, "with turns the closing tag ends an answer"


def sft_settings(home: Path, **changes: Any) -> sft.SFTConfig:
    folder = home / "worked"
    if not folder.exists():
        flags = "--max-examples 12 --problems 8 --eval-examples 4 --template r1_zero --levels 1"
        jsonl.prepare("reasoning", folder, *flags.split())
    shape = GPTConfig(depth=1, n_embd=16, n_head=2, block_size=768, vocab_size=257)
    how = dict(
        data_dir=str(folder),
        model=shape,
        tokenizer="bytes",
        tags="raw",
        max_steps=2,
        device_batch_size=1,
    )
    how |= dict(
        eval_every=1,
        eval_examples=3,
        probe_examples=0,
        save_every=0,
        compile=False,
        eval_new_tokens=6,
    )
    how |= dict(
        log_every=1,
        eval_task="reasoning:template=r1_zero,levels=[1]",
        eval_task_data=str(folder),
    )
    return sft.SFTConfig(**how | changes)


def test_sft_samples_a_task_at_each_evaluation(home: Path) -> None:
    found = sft.train(sft_settings(home)).evals()
    assert list(found["step"]) == [0, 1, 2]
    assert found["pass@1"].notna().all()
    assert found["heldout_loss/worked"].notna().all()
    assert set(found["task"]) == {"reasoning:template=r1_zero,levels=[1]"}
    assert (found["tier/neither"] == 1).all()
    plain = sft.train(sft_settings(home, eval_task=None, run_name="plain"))
    assert "pass@1" not in plain.evals()
    with pytest.raises(MissingFile):
        sft.train(
            sft_settings(
                home, run_name="empty", eval_task_data=str(home / "worked" / "nothing.jsonl")
            )
        )
    assert not (home / "runs" / "empty").exists()
