"""Settings of the commands that measure checkpoints: evaluate and diagnose.

No torch here: `--help`, recipes and launch read these classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codechat.core.config import REQUIRED, SEEDS, Settings, opt
from codechat.core.errors import ConfigError
from codechat.tasks.settings import TaskChoice

MIN_GROUPS = 64
EXAMPLES = "examples.jsonl"  # in a run: every completion with its score, as they come


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """The run to write, and how completions are sampled."""

    run_name: str = opt(
        "evaluate",
        "name of the run directory under runs/; where the default is in use, it gets a number",
        identity=False,
    )
    overwrite: bool = opt(
        False, "replace the run of this name: it is deleted once this one has begun", identity=False
    )
    temperature: float = opt(1.0, "sampling temperature; 0 = greedy, one completion", least=0)
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all", least=1)
    max_new_tokens: int = opt(64, "longest completion, tokens", least=1)
    seed: int = opt(0, "seed of problem order, sampling and bootstrap", **SEEDS)


@dataclass(frozen=True, kw_only=True)
class TaskSettings(SamplingSettings, TaskChoice):
    """The problems of the task, and how its prompts are written."""

    data_dir: str | None = opt(
        None,
        "directory with TASK.SPLIT.jsonl problems and probes; none = the task's own problems",
        reads="path",
    )
    tags: Literal["raw", "template", "native"] | None = opt(
        None,
        "raw = prompts as plain text, for base models; template, native = an imported model's, with tools in the "
        "system message or in its own words; none = as it was trained",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(TaskSettings):
    """What to evaluate, and how many samples to draw."""

    resume: bool = opt(
        False, "go on behind the answers of the run of this name, which was cut off", identity=False
    )
    ckpt: tuple[str, ...] = opt(
        (), "checkpoints: run name, run@best, run@STEP, run directory or checkpoint", reads="run"
    )
    endpoint: str = opt(
        "", "URL of an OpenAI-compatible server, evaluated after the checkpoints, if any"
    )
    model: str = opt("", "the endpoint's name of the model; empty = the first that it lists")
    api_key_file: Path | None = opt(
        None,
        "file with the key that the endpoint expects; none = no key",
        identity=False,
        reads="path",
    )
    contamination: bool = opt(
        True, "search what the checkpoint was trained on for the problems first", identity=False
    )
    split: tuple[Literal["train", "select", "test", "test_hard"], ...] = opt(
        ("test",), "splits; validation = select: choose checkpoints on it, report on test"
    )
    limit: int | None = opt(None, "problems per split; none = all", least=0)
    skip_failing_references: bool = opt(
        False, "leave out problems whose own reference solution fails, by name"
    )
    all_checkpoints: bool = opt(
        False, "evaluate every checkpoint of the run on select and write checkpoints/best"
    )
    score: Literal["sampled", "loglik"] = opt(
        "sampled", "sampled completions, or the likeliest choice of a task that has choices"
    )
    n: int = opt(8, "completions per problem")
    ks: tuple[int, ...] = opt((1, 8), "pass@k to estimate; each at most n")
    temperatures: tuple[float, ...] = opt(
        (), "more temperatures, each with its own row; 0 = greedy, one completion"
    )
    forced_call: bool = opt(
        False, "add a row with the call tag given: is a gain more than calling more often?"
    )
    constrain: bool = opt(
        False, "add a row with calls constrained to the schemas of the offered functions"
    )
    probe_examples: int = opt(
        32, "behaviour probes per cell, if data_dir holds probes; 0 = none", least=0
    )
    heldout_examples: int = opt(
        0, "held-out conversations per domain of data_dir for the loss; 0 = none", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.ckpt or self.endpoint):
            raise ConfigError("nothing to evaluate; set --ckpt RUN, or --endpoint URL")
        if not self.split:
            raise ConfigError("no --split; set --split test")
        # pass@1 ranks checkpoints
        if 1 not in self.ks or min(self.ks) < 1 or max(self.ks) > self.n:
            raise ConfigError(
                f"--ks {' '.join(map(str, self.ks))} with --n {self.n}; each k is from 1 to n, "
                f"and one of them 1; set --ks 1 {self.n}"
            )
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"temperature 0 with n={self.n}: all samples are the same; set --n 1 --ks 1"
            )
        held = self.forced_call or self.constrain
        loglik = self.score == "loglik"
        if loglik and (self.temperatures or held):
            raise ConfigError(
                "--score loglik samples nothing; leave out "
                "--temperatures, --forced-call and --constrain"
            )
        if self.endpoint and (loglik or held or self.heldout_examples):
            raise ConfigError(
                "--endpoint excludes --score loglik, "
                "--forced-call, --constrain and --heldout-examples"
            )
        if self.heldout_examples and (not self.data_dir or "test_hard" in self.split):
            raise ConfigError(
                "heldout_examples needs a --data-dir with conversations, and split select or test"
            )
        one_run = len(self.ckpt) == 1 and not self.endpoint
        if self.all_checkpoints and not (one_run and self.split == ("select",)):
            raise ConfigError(
                "--all-checkpoints chooses a checkpoint of one "
                "run; set one --ckpt and --split select"
            )


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(TaskSettings):
    """What to judge, and from how many samples."""

    run_name: str = "diagnose"
    ckpt: str = opt(
        REQUIRED,
        "checkpoint: run name, run@best, run@STEP, run directory or checkpoint",
        reads="run",
    )
    groups: int = opt(64, "training problems to sample", least=MIN_GROUPS)
    group_size: int = opt(8, "completions per problem", least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature {self.temperature}; it must be "
                "above 0: greedy groups have no variance"
            )
