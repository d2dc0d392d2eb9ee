"""Configurations: one dataclass is the command line, the json file and the notebook cell."""

import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from raising import raising

from codechat.core import config
from codechat.core.config import (
    REQUIRED,
    Settings,
    config_hash,
    flag_of,
    format_help,
    from_dict,
    opt,
    parse,
    resolve,
)
from codechat.core.errors import ConfigError, UserError, check_choice, nearest
from codechat.core.registry import COMMANDS, ENTRIES, LOOPS, entry_of, find
from codechat.evaluation.settings import EvaluateConfig
from codechat.grpo import GRPOConfig
from codechat.sft import SFTConfig


@dataclass(frozen=True, kw_only=True)
class Model:
    depth: int = opt(4, "transformer blocks")
    n_head: int = opt(2, "heads")

    def __post_init__(self) -> None:
        if self.depth % self.n_head:
            raise ValueError(f"depth {self.depth} must be a multiple of n_head {self.n_head}")


@dataclass(frozen=True, kw_only=True)
class Loop:
    run_name: str = opt("loop", "name of the run", identity=False)
    lr: float = opt(3e-4, "peak learning rate")
    steps: int = opt(10, "optimizer steps")
    ks: tuple[int, ...] = opt((1, 8), "k of pass@k")
    betas: tuple[float, float] = opt((0.9, 0.95), "AdamW betas")
    top_k: int | None = opt(None, "sample among the k likeliest; none = all")
    name_or_none: str | None = opt(None, "text")
    compile: bool | None = opt(None, "compile; none = where it pays")
    verbose: bool = opt(False, "say more")
    no_run: bool = opt(False, "show calls only")
    mode: Literal["mean", "none"] = opt("mean", "baseline")
    where: Path = opt(Path("data"), "folder")
    group_size: int = opt(4, "completions per problem")
    device_batch_size: int = opt(8, "sequences per device")
    model: Model = opt(Model(), "architecture")


@dataclass(frozen=True, kw_only=True)
class Outer:
    model: Model = opt(Model(depth=8), "what is inside")


PRESETS = {"quick": {"lr": 1.0, "model": {"n_head": 4}}, "slow": {"model.depth": 2, "steps": 100}}


def parse_grpo(words: Sequence[str]) -> GRPOConfig:
    """On the toy task, since a task is required."""
    return parse(GRPOConfig, ["--task", "toy", *words])


def words(line: str) -> Loop:
    return parse(Loop, line.split(), presets=PRESETS)


@pytest.mark.parametrize(
    "line, field, value",
    [
        ("--lr 1e-3", "lr", 1e-3),
        ("--lr -1e-3", "lr", -1e-3),
        ("--steps=1_000", "steps", 1000),
        ("--steps 1e3", "steps", 1000),
        ("--ks 1 8,16", "ks", (1, 8, 16)),
        ("--ks", "ks", ()),
        ("--betas 0.8,0.9", "betas", (0.8, 0.9)),
        ("--top-k 5", "top_k", 5),
        ("--name_or_none none", "name_or_none", None),
        ("--name-or-none=--x", "name_or_none", "--x"),
        ("--no_compile", "compile", False),
        ("--verbose", "verbose", True),
        ("--verbose=false", "verbose", False),
        ("--mode none", "mode", "none"),
        ("--where /some/where", "where", Path("/some/where")),
        ("--model.depth 6", "model", Model(depth=6)),
    ],
)
def test_flags_of_every_type(line: str, field: str, value: object) -> None:
    assert getattr(words(line), field) == value


def test_flags_stand_one_after_another() -> None:
    cfg = words("--lr 1e-3 --steps=1_000 --ks 1 8,16 --no_compile --verbose --model.depth 6")
    assert cfg == Loop(
        lr=1e-3, steps=1000, ks=(1, 8, 16), compile=False, verbose=True, model=Model(depth=6)
    )


def test_precedence_defaults_preset_file_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"lr": 0.5, "steps": 7}))
    cfg = parse(Loop, ["--steps", "9", "--preset", "quick", "--config", str(file)], presets=PRESETS)
    assert (cfg.lr, cfg.steps, cfg.model.n_head, cfg.group_size) == (0.5, 9, 4, 4)
    assert resolve(Loop, "slow", None, {"lr": 2.0}, presets=PRESETS) == Loop(
        lr=2.0, steps=100, model=Model(depth=2)
    )


@dataclass(frozen=True, kw_only=True)
class Named:
    out: str = opt(REQUIRED, "file to write")
    prompts: tuple[str, ...] = opt((), "questions", positional=True)


def test_required_and_positional_fields() -> None:
    cfg = parse(Named, ["--out", "x", "why", "how so"])
    assert cfg == Named(out="x", prompts=("why", "how so"))
    assert from_dict(Named, config.plain(cfg)) == cfg
    with raising(ConfigError, "out", "file to write", "--out"):
        parse(Named, [])


def test_what_is_wrong_on_a_command_line_is_named() -> None:
    for row in Path(__file__).with_name("command_lines.jsonl").read_text().splitlines():
        line, *named = json.loads(row)
        with raising(ConfigError, *named):
            words(line)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_number_out_of_range_is_rejected_by_its_name(name: str) -> None:
    cls = ENTRIES[name].config_class
    needed = {key: "x" for key, field in config.fields_of(cls).items() if field.default is REQUIRED}
    needed |= {"data_dir": "x"} if name == "preference" else {}
    needed |= {"task": "x"} if "task" in config.fields_of(cls) else {}
    for key, field in config.fields_of(cls).items():
        bad = [
            field.meta[bound] + by
            for bound, by in (("least", -1), ("most", 1))
            if bound in field.meta
        ]
        bad += [math.inf] if bad and field.type is float else []
        for value in bad:
            with raising(ConfigError, flag_of(key)):
                from_dict(cls, {**needed, key: value})
            with raising(ConfigError, key) if issubclass(cls, Settings) else nullcontext():
                cls(**needed, **{key: value})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--temperature -1", "--temperature is -1.0; it must be at least 0"),
        ("--top-k 0", "--top-k (top_k) is 0; it must be at least 1"),
        ("--n 4", "--ks 1 8 with --n 4; each k is from 1 to n, and one of them 1; set --ks 1 4"),
    ],
)
def test_a_number_out_of_range_comes_with_its_bounds(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse(EvaluateConfig, ["--ckpt", "x", "--task", "toy", *text.split()])
    assert str(error.value) == says


def test_a_checkpoint_without_its_flag_comes_with_it() -> None:
    with raising(ConfigError, "unexpected word 'released/mini'", "--ckpt released/mini"):
        config.parse(EvaluateConfig, ["released/mini"])


def test_dashes_alone_make_no_flag_like_another() -> None:
    assert nearest("--executors", ["--tools", "--trust"]).startswith("; valid:")
    assert nearest("--max-step", ["--max-steps", "--trust"]) == "; did you mean '--max-steps'?"
    assert nearest("expert_iteration", ["pretrain", "expert"]) == "; did you mean 'expert'?"
    assert nearest("foo", ["tools", "expert"]).startswith("; valid:")
    for given, meant in (("temp", "temperature"), ("warm", "warmup-steps"), ("run", "run-name")):
        flags = ["--trust", f"--{meant}"]
        assert nearest(f"--{given}", flags) == f"; did you mean '--{meant}'?"
    longest = nearest("evaluation_of_my_run", ["eval", "evaluation"])
    assert longest == "; did you mean 'evaluation'?"


@pytest.mark.parametrize(
    ("flag", "says"),
    [("--learnin_rate", "did you mean 'learning_rate'?"), ("--epochs", "here it is --max-steps")],
)
def test_a_word_of_another_library_is_known_with_a_slip_too(flag: str, says: str) -> None:
    with raising(ConfigError, says):
        config.parse(SFTConfig, [flag, "1"])


def test_every_entry_can_be_loaded_and_a_loop_is_found_from_its_configuration() -> None:
    for id, entry in ENTRIES.items():
        assert find(id) is entry
        assert callable(entry.load(entry.function))
        assert (id in LOOPS) == ({"run_name", "lr"} <= config.fields_of(entry.config_class).keys())
    for id, entry in LOOPS.items():
        fields = config.fields_of(entry.config_class)
        given = {name: "toy" for name in ("task", "teacher") if name in fields}
        assert entry_of(entry.config_class(**given)) is entry
    with raising(ConfigError, "Outer"):
        entry_of(Outer())


def test_what_is_wrong_in_a_mapping_or_a_file_is_named(tmp_path: Path) -> None:
    unknown = {"model": {"dept": 3}}, "'model.dept'", "'model.depth'"
    for mapping, *named in (
        unknown,
        ({"model": 3}, "--model", 3),
        ({"verbose": 1}, "--verbose", 1),
    ):
        with raising(ConfigError, *named):
            from_dict(Loop, mapping)
    file = tmp_path / "c.json"
    for text, *named in (
        (b"{", "json"),
        (b"[1]", "list"),
        (b'{"lrr": 1}', "'lrr'", "'lr'"),
        (b"\xff\xfe{}", "json"),
    ):
        file.write_bytes(text)
        with raising(UserError, "c.json", *named):
            words(f"--config {file}")
    for absent in ("absent.json", "absent.yaml"):
        with raising(ConfigError, f"{absent} does not exist"):
            words(f"--config {tmp_path}/{absent}")


def declared(**fields: object) -> type:
    """A configuration of ints with these defaults."""
    space = {"__annotations__": dict.fromkeys(fields, int), **fields}
    return dataclass(frozen=True, kw_only=True)(type("Declared", (), space))


def test_an_alias_means_the_first_of_its_fields_that_a_class_has() -> None:
    assert words("--num-generations 3").group_size == 3
    assert words("--batch_size 2").device_batch_size == 2
    assert from_dict(Loop, {"model": {"n_layers": 2}}).model.depth == 2
    assert words("--run other").run_name == "other"
    for fields, meant in (
        ("max_steps inner_epochs", "inner_epochs"),
        ("max_steps", "max_steps"),
        ("num_iterations max_steps", "num_iterations"),
    ):
        cls = declared(**dict.fromkeys(fields.split(), 1))
        assert parse(cls, ["--num-iterations", "4"]) == cls(**{meant: 4})
    for theirs, ours in config.ELSEWHERE.items():
        with pytest.raises(ConfigError, match=re.escape(ours)):
            parse(cls, [f"--{theirs.replace('_', '-')}", "1"])


def test_every_flag_of_trl_is_accepted_or_named() -> None:
    """Those of its command line that the documents use, with the values there."""
    for flag, (word, ours) in json.loads(
        Path(__file__).with_name("trl_flags.json").read_text()
    ).items():
        value = getattr(parse_grpo([f"--{flag}", word]), ours)
        assert value == ((word,) if ours == "lora_targets" else type(value)(word)), flag


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--loss_type cispo --epsilon_high 5",
            dict(variant="cispo", clip_eps_low=1.0, clip_eps_high=4.0),
        ),
        ("--epsilon-high=5 --variant cispo", dict(clip_eps_low=1.0, clip_eps_high=4.0)),
        ("--variant cispo --clip-eps-high 5", dict(clip_eps_high=5.0)),
        ("--loss_type cispo --clip_eps_high 3", dict(clip_eps_low=1.0, clip_eps_high=3.0)),
        (
            "--loss_type dapo",
            dict(loss_aggregation="token", clip_eps_low=0.2, clip_eps_high=0.2, resample_rounds=0),
        ),
        ("--loss_type dapo --epsilon_high 0.28", dict(clip_eps_high=0.28, resample_rounds=0)),
        ("--variant dapo", dict(clip_eps_high=0.28, resample_rounds=4)),
        ("--loss_type dr_grpo", dict(loss_aggregation="constant", baseline="zscore")),
        ("--loss_type dr_grpo --baseline mean", dict(baseline="mean")),
        (
            "--per_device_train_batch_size 32 --num_generations 8",
            dict(device_batch_size=4, group_size=8),
        ),
        ("--per-device-train-batch-size 16", dict(device_batch_size=1, group_size=16)),
        ("--lr_scheduler_type cosine", dict(schedule="cosine", final_lr_share=0.0)),
        (
            "--lr_scheduler_type cosine --final_lr_share 0.2",
            dict(schedule="cosine", final_lr_share=0.2),
        ),
        ("--schedule cosine", dict(schedule="cosine", final_lr_share=0.1)),
        ("--lr_scheduler_type constant", dict(schedule="constant", warmup_steps=0)),
        (
            "--lr_scheduler_type constant_with_warmup --warmup_steps 7",
            dict(schedule="constant", warmup_steps=7),
        ),
        ("--learning_rate 1e-6", dict(lr=1e-6, optimizer="adamw")),
        (
            "--loss_type grpo --epsilon_low 0.1",
            dict(loss_aggregation="sequence", clip_eps_low=0.1, clip_eps_high=0.2),
        ),
    ],
)
def test_a_word_of_trl_means_what_it_means_there(words: str, expected: dict[str, Any]) -> None:
    """grpo_trainer.py of TRL 1.16; from json too, where the same words are keys."""
    flags = words.replace("=", " ").split()
    as_json = {"task": "toy"} | {
        flag.removeprefix("--"): word for flag, word in zip(flags[::2], flags[1::2])
    }
    for cfg in (parse_grpo(words.split()), config.resolve(GRPOConfig, overrides=as_json)):
        found = cfg.resolved()
        assert {name: getattr(found, name) for name in expected} == expected
        assert from_dict(GRPOConfig, config.plain(found)) == found, (
            "the run's own file is in our words"
        )


@pytest.mark.parametrize(
    ("loop", "words", "named"),
    [
        ("grpo", "--loss_type cispo", ["--epsilon_high"]),
        ("grpo", "--loss_type cispo --epsilon_high 0.28", ["0.28", "at least 1"]),
        (
            "grpo",
            "--loss_type cispo --epsilon_high 5 --epsilon_low 0.2",
            ["--epsilon_low", "--clip-eps-low"],
        ),
        ("grpo", "--loss_type cispo --epsilon_high five", ["'five'"]),
        ("grpo", "--steps_per_generation 4", ["--minibatches", "--grad-accum"]),
        ("grpo", "--vllm_importance_sampling_clip_max 3", ["--importance-cap"]),
        ("grpo", "--top_p 0.9", ["--top-k", "rank"]),
        (
            "grpo",
            "--per_device_train_batch_size 4",
            ["completions", "multiple of 16", "--device-batch-size"],
        ),
        (
            "reinforce",
            "--per_device_train_batch_size 12 --num_generations 8",
            ["completions", "multiple of 8"],
        ),
        ("grpo", "--per_device_train_batch_size many", ["'many'"]),
        (
            "grpo",
            "--lr_scheduler_type constant --warmup_steps 10",
            ["no warm-up", "constant_with_warmup"],
        ),
        ("grpo", "--lr_scheduler_type linear", ["'linear'", "wsd"]),
        ("sft", "--learning_rate 2e-5", ["AdamW", "Muon", "--optimizer adamw"]),
        ("preference", "--data-dir d --learning_rate 1e-6 --optimizer muon", ["Muon"]),
        ("preference", "--data-dir d --loss_type ipo", ["--loss ipo", "divides"]),
        ("preference", "--data-dir d --loss-type=orpo", ["--loss orpo", "prompt"]),
        ("preference", "--data-dir d --loss_type simpo", ["--loss simpo", "margin"]),
    ],
)
def test_a_word_of_trl_that_means_something_else_is_refused_with_the_difference(
    loop: str, words: str, named: list[str]
) -> None:
    with raising(ConfigError, *named):
        LOOPS[loop].parse(
            [*(("--task", "toy") if loop in ("grpo", "reinforce") else ()), *words.split()]
        )


def test_of_two_words_for_one_setting_the_later_one_says_what_it_means(tmp_path: Path) -> None:
    """A file in TRL's words and a flag in ours, and the other way round."""
    file = tmp_path / "trl.json"
    file.write_text(
        '{"per_device_train_batch_size": 64, "num_generations": 16, "lr_scheduler_type": "cosine"}'
    )
    kept = parse_grpo(["--config", str(file)])
    assert (kept.device_batch_size, kept.final_lr_share) == (4, 0.0)
    ours = parse_grpo(["--config", str(file), "--device-batch-size", "6", "--schedule", "cosine"])
    assert (ours.device_batch_size, ours.final_lr_share) == (6, 0.1)
    file.write_text('{"device_batch_size": 6}')
    assert (
        parse_grpo(["--config", str(file), "--per_device_train_batch_size", "32"]).device_batch_size
        == 2
    )


def test_rows_are_logged_as_often_as_transformers_is_told() -> None:
    assert LOOPS["sft"].parse(["--logging_steps", "1"]).log_every == 1
    with raising(ConfigError, "logging_steps", "every step"):
        LOOPS["grpo"].parse(["--logging_steps", "1"])


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "cpo", "orpo", "simpo"])
def test_our_word_of_a_preference_loss_is_always_taken(loss: str) -> None:
    cfg = LOOPS["preference"].parse(["--data-dir", "d", "--loss", loss])
    assert cfg.loss == loss
    assert LOOPS["preference"].parse(["--data-dir", "d", "--loss_type", "dpo"]).loss == "dpo"


def test_the_hash_is_of_what_decides_the_result() -> None:
    base = config_hash(Loop())
    assert len(base) == 12
    assert config_hash(Loop(run_name="other")) == base
    assert (
        len(
            {
                base,
                config_hash(Loop(lr=1.0)),
                config_hash(Loop(model=Model(depth=6))),
                config_hash(Model()),
            }
        )
        == 4
    )
    assert (
        config_hash({"a": 1, "b": 2})
        == config_hash({"b": 2, "a": 1})
        != config_hash({"a": 2, "b": 1})
    )


@dataclass(frozen=True, kw_only=True)
class Inner(Loop):
    needed: int = opt(REQUIRED, "a field without a default")
    model: Model = Model(depth=2)


def test_what_a_configuration_changes_is_compared_with_its_own_defaults() -> None:
    cfg = Inner(needed=1, lr=1.0, ks=(2,), model=Model(depth=2, n_head=1))
    expected = {
        "needed": ("required", 1),
        "lr": (3e-4, 1.0),
        "ks": ([1, 8], [2]),
        "model.n_head": (2, 1),
    }
    assert config.changed(cfg) == expected
    assert from_dict(Inner, {name: here for name, (_, here) in config.changed(cfg).items()}) == cfg


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    seed: int = opt(0, "seed of all draws")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    lr: float = opt(1e-3, "peak learning rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr <= 0:
            raise ValueError(f"lr {self.lr} must be positive")


@dataclass(frozen=True, kw_only=True)
class Grouped(OptimizerSettings, RunSettings):
    lr: float = 5e-5
    ks: tuple[int, ...] = opt((1,), "k of pass@k")


def test_settings_groups_are_inherited_listed_in_order_and_check_themselves() -> None:
    listed = [(name, f.default, f.meta["help"]) for name, f in config.leaves_of(Grouped).items()]
    assert listed == [
        ("seed", 0, "seed of all draws"),
        ("lr", 5e-5, "peak learning rate"),
        ("ks", (1,), "k of pass@k"),
    ]
    with raising(ConfigError, "lr"):
        from_dict(Grouped, {"lr": 0.0})
    lines = format_help(Grouped).splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Run:", "Optimizer:", "Grouped:"]
    lr = next(i for i, line in enumerate(lines) if "--lr " in line)
    assert lines.index("Optimizer:") < lr < lines.index("Grouped:"), (
        "another default leaves a setting in its group"
    )


def test_help_is_shown_whatever_else_is_wrong_and_ends_with_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(Loop, ["--lr", "x", "--help"], presets=PRESETS, prog="codechat loop")
    assert end.value.code == 0
    assert "usage: codechat loop" in capsys.readouterr().out


def test_examples_stand_before_the_flags_of_help() -> None:
    shown = format_help(Loop, presets=PRESETS, epilog="Examples: none")
    assert "\n\nExamples: none\n\n  --preset" in shown


def test_help_comes_from_the_fields() -> None:
    flat = " ".join(format_help(Loop, presets=PRESETS).split())
    for name, field in config.leaves_of(Loop).items():
        if not field.nested:
            assert f"{flag_of(name)} " in flat
            assert field.meta["help"] in flat


def test_help_names_presets_and_defaults() -> None:
    shown = format_help(Loop, presets=PRESETS)
    assert "quick, slow" in shown
    assert "(default 1 8)" in shown


def test_help_says_that_a_default_is_empty() -> None:
    shown = " ".join(format_help(EvaluateConfig).split())
    assert "(default empty)" in shown
    assert "(default )" not in shown


def test_the_default_in_help_is_that_of_the_nested_value() -> None:
    assert "(default 8)" in format_help(Outer)
    assert parse(Outer, []).model.depth == 8


def test_settings_of_a_new_model_are_shown_last() -> None:
    shown = format_help(SFTConfig)
    order = ("--run-name", "--data-dir", "--mix ", "\nModel:\n", "--model.depth")
    places = [shown.index(part) for part in order]
    assert places == sorted(places)


def test_help_marks_what_is_required_and_what_is_positional() -> None:
    shown = format_help(Named)
    assert "--out str" in shown
    assert "(required)" in shown
    assert "PROMPTS" in shown


def test_help_begins_with_what_a_command_does_and_its_examples() -> None:
    docstring = "Learn a text.\n\n    codechat loop --lr 1\n\nA step reads a window."
    shown = format_help(Loop, prog="codechat loop", epilog=docstring)
    order = ("usage:", "Learn a text.", "    codechat loop --lr 1", "--config", "A step reads")
    places = [shown.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("tp", "shown"),
    [
        (tuple[int, ...], "int ..."),
        (tuple[float, float], "float float"),
        (tuple[Literal["train", "test"], ...], "train|test ..."),
        (int | None, "none|int"),
    ],
)
def test_help_shows_types_as_they_are_typed(tp: Any, shown: str) -> None:
    assert config.type_name(tp) == shown


# ---------------------------------------------------------------- yaml


def from_yaml(tmp_path: Path, text: str) -> Loop:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return parse(Loop, ["--config", str(file)])


def test_a_yaml_file_works_where_a_json_file_does(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"lr": 0.25, "model": {"depth": 6}}')
    as_json = parse(Loop, ["--config", str(file)])
    assert from_yaml(tmp_path, "lr: 0.25\nmodel:\n  depth: 6\n") == as_json


def test_a_number_of_yaml_without_a_point_is_a_number(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "lr: 1e-4\n").lr == 1e-4


def test_a_yaml_list_is_a_tuple(tmp_path: Path) -> None:
    file = tmp_path / "settings.yml"
    file.write_text("ks: [1, 4]\n")
    assert parse(Loop, ["--config", str(file)]).ks == (1, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [("lr: [1", "cannot be read"), ("- lr", "yaml list"), ("lr: no", "--lr got 'no'")],
)
def test_a_yaml_file_that_does_not_fit_is_told_in_one_line(
    text: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        from_yaml(tmp_path, text)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- every setting, written and
# read again
TEXTS = ("x", "a b", "a,b", "none", "None", "true", "1", "--x", "")


def values_of(tp: Any) -> list[Any]:
    """Values that a setting of this type may have, the awkward ones among them."""
    found: list[Any] = []
    for arm in config.arms(tp):
        kind = typing.get_origin(arm) or arm
        args = typing.get_args(arm)
        if kind is Literal:
            found += args
        elif kind is tuple and args[1:] == (...,):
            found += [(), *((item,) for item in values_of(args[0])), tuple(values_of(args[0])[:3])]
        elif kind is tuple:
            found.append(tuple(values_of(arg)[1] for arg in args))
        else:
            found += {
                types.NoneType: (None,),
                bool: (True, False),
                int: (0, 1, 7),
                float: (0.0, 0.25, 1.0, 1e-9, 3e20),
                str: TEXTS,
                Path: tuple(Path(text) for text in TEXTS if not text.startswith("-")),
            }.get(kind, ())
    return found


def words_of(cfg: Any) -> list[str]:
    """The command line that gives a configuration, of what differs from the defaults."""
    found = list[str]()
    leaves = config.leaves_of(type(cfg))
    for name, (_, value) in config.changed(cfg).items():
        if isinstance(value, list):
            found += [flag_of(name), *map(str, value)]
        elif value is None:
            found.append(f"{flag_of(name)}={config.none_words(leaves[name].type)[0]}")
        else:
            found += (
                [f"{flag_of(name)}={value}"]
                if type(value) is not bool
                else [flag_of(name), str(value).lower()]
            )
    return found


def with_value(cfg: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return replace(cfg, **{head: with_value(getattr(cfg, head), rest, value) if rest else value})


NEEDED = dict(
    ckpt="x",
    split=("select",),
    task="toy",
    what="task",
    name="x",
    source="x",
    server="http://x",
)
CONFIGURED = ENTRIES | {entry.id: entry for entry in COMMANDS.values() if entry.config}


@pytest.mark.parametrize("id", CONFIGURED)
def test_every_setting_is_read_as_it_was_written(id: str) -> None:
    """As json, as launches, exported scripts and --config have it, and as flags."""
    cls = CONFIGURED[id].config_class
    names = {name: f for name, f in config.leaves_of(cls).items() if not f.nested}
    usual = {name: value for name, value in NEEDED.items() if name in names}
    for name, field in names.items():
        if field.default is REQUIRED:
            usual.setdefault(name, values_of(field.type)[0])
    if "server" in names and "ckpt" in names:
        del usual["server"]
    base = from_dict(cls, usual)
    tried = 0
    for name, field in names.items():
        for value in values_of(field.type):
            try:
                cfg = with_value(base, name, value)
                resolve(cls, overrides=config.plain(cfg))
            except (UserError, ValueError):  # a value that the class does not take
                continue
            tried += 1
            assert from_dict(cls, json.loads(json.dumps(config.plain(cfg)))) == cfg, (name, value)
            several = value if isinstance(value, tuple) else ()
            # no word is that
            if not any(str(item) in ("", "a,b") or str(item).startswith("--") for item in several):
                assert parse(cls, words_of(cfg)) == cfg, (name, value)
    assert tried >= len(names)


def test_a_choice_that_is_called_none_is_that_choice_and_null_is_none(tmp_path: Path) -> None:
    """GRPO's baseline: the word chooses no baseline, and null leaves the choice to the paper of
    --variant."""
    file = tmp_path / "grpo.json"
    for given, meant in (
        ("none", "none"),
        ("None", "none"),
        (None, None),
        ("null", None),
        ("mean", "mean"),
    ):
        settings = {"task": "toy", "baseline": given}
        file.write_text(json.dumps(settings))
        assert (
            resolve(GRPOConfig, file=file).baseline
            == from_dict(GRPOConfig, settings).baseline
            == meant
        )
        if given:
            assert parse_grpo(["--baseline", given]).baseline == meant
    assert parse_grpo(["--baseline", "none"]).resolved().baseline == "none"
    assert parse_grpo([]).resolved().baseline == "zscore"
    assert "--baseline null|none|mean|leave_one_out|zscore" in format_help(GRPOConfig)


def test_words_for_none_on_a_command_line_are_none_where_no_choice_has_the_name() -> None:
    got = parse_grpo(
        "--shard none --model.rope-scaling none --top-k null --init-from none --tags none".split()
    )
    assert (got.shard, got.model.rope_scaling, got.top_k, got.init_from, got.tags) == (None,) * 5
    assert GRPOConfig(task="toy", init_from="none").init_from is None, (
        "as a notebook writes it, too"
    )
    assert parse_grpo(["--shard", "--seed", "3"]).shard is True


def test_the_help_of_a_dial_is_the_first_paragraph_of_its_docstring() -> None:
    def by_size(number: int, build: Callable[[Mapping[str, Any]], Any]) -> Any:
        """rate and batch of a size follow;
        what is set wins

        Not part of the help."""

    shown = " ".join(config.format_help(Loop, dials={"size": by_size}).split())
    assert "--size N rate and batch of a size follow; what is set wins --config" in shown


def test_without_choices_the_error_does_not_end_in_an_empty_list() -> None:
    with pytest.raises(ConfigError, match="stage sft needs 'pretrain'; there is none"):
        check_choice("stage sft needs", "pretrain", [])


def test_a_choice_that_does_not_exist_is_followed_by_the_choices_once() -> None:
    with pytest.raises(ConfigError) as error:
        check_choice("task class", "MyTask", ["Backwards"])
    assert str(error.value) == "task class 'MyTask'; required: one of Backwards"


def test_a_choice_with_a_slip_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"one of left, right; did you mean 'right'\?$"):
        check_choice("side", "rigth", ["left", "right"])
