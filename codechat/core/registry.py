"""What can be run: every training loop and every other stage of a recipe, by id, and the commands of `codechat`.

The id is the `kind` in `runs/NAME/status.json`. Modules are imported when they are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, nearest


class Entry(NamedTuple):
    """A loop or stage: `function` of `module` takes a `config` (a class of the same module)."""

    id: str
    module: str
    config: str
    function: str
    command: str  # what the command line calls it
    about: str

    def load(self, name: str) -> Any:
        """An attribute of the module, such as the config class or the function."""
        return getattr(importlib.import_module(self.module), name)

    @property
    def config_class(self) -> type:
        return self.load(self.config)

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """The presets of --preset; empty where there are none."""
        return getattr(importlib.import_module(self.module), "RUN_PRESETS", {})


def _loop(id: str, module: str, config: str, about: str, command: str = "") -> Entry:
    return Entry(id, f"codechat.{module}", config, "train", command or id, about)


def _stage(id: str, module: str, config: str, function: str, about: str) -> Entry:
    return Entry(id, f"codechat.{module}", config, function, id.replace(".", " "), about)


LOOPS = {entry.id: entry for entry in (
    _loop("pretrain", "pretrain", "PretrainConfig", "train a model from scratch on a corpus"),
    _loop("sft", "sft", "SFTConfig", "fine-tune on conversations"),
    _loop("reinforce", "reinforce", "ReinforceConfig", "REINFORCE with a group baseline on a task's reward"),
    _loop("grpo", "grpo", "GRPOConfig", "GRPO, Dr. GRPO, DAPO or GSPO on a task's reward"),
    _loop("ppo", "ppo", "PPOConfig", "PPO with a value head on a task's reward"),
    _loop("expert_iteration", "expert_iteration", "ExpertConfig", "expert iteration: fine-tune on the best sampled completions", command="expert"),
    _loop("preference", "preference", "PreferenceConfig", "DPO, IPO, KTO, CPO, ORPO or SimPO on preferences"),
    _loop("chars", "labs.chars", "CharsConfig", "character laboratory: learn a text by supervised learning, GRPO, PPO or denoising"),
)}  # fmt: skip

PREPARATIONS = {entry.id: entry for entry in (
    _stage("data.corpus", "data.prepare_corpus", "CorpusConfig", "prepare_corpus", "source text -> shards of token ids for pretraining"),
    _stage("data.sft", "tasks.coding.prepare", "SftConfig", "prepare_sft", "code questions and plain chat -> conversations"),
    _stage("data.calls", "tasks.toolbox.prepare", "CallsConfig", "prepare_calls", "function calls -> conversations, problems and behaviour probes"),
    _stage("data.apps", "tasks.apps.task", "AppsConfig", "prepare_apps", "pocket apps -> experts' episodes and problems of several turns"),
    _stage("data.code", "tasks.coding.prepare", "CodeConfig", "prepare_code", "public sets of instructions and programs -> conversations, filtered"),
    _stage("data.reasoning", "tasks.reasoning.prepare", "ReasoningConfig", "prepare_reasoning", "word problems of our own, or GSM8K -> worked solutions and problems"),
    _stage("data.micro", "tasks.micro", "MicroConfig", "prepare_micro", "small code problems of our own -> worked solutions and problems with tests"),
    _stage("data.repair", "tasks.repair.task", "RepairConfig", "prepare_repair", "small repositories with a bug -> expert repairs and problems"),
    _stage("data.appworld", "tasks.appworld", "AppWorldDataConfig", "prepare_appworld", "successful episodes of AppWorld -> conversations"),
)}  # fmt: skip

STAGES = {entry.id: entry for entry in (
    _stage("diagnose", "evaluation.diagnose", "DiagnoseConfig", "diagnose", "measure before RL whether rewards give a gradient"),
    _stage("evaluate", "evaluation.evaluate", "EvaluateConfig", "run_evaluation", "pass@k of a checkpoint on a task, with intervals"),
    _stage("passk", "evaluation.pass_rates", "PasskConfig", "run_passk", "how often code problems are solved, and whether RL would stall"),
    _stage("filter", "evaluation.pass_rates", "FilterConfig", "filter_problems", "keep the training problems that are solved sometimes but not always"),
    _stage("natural", "evaluation.natural", "NaturalConfig", "run_natural", "fixed prompts as people type them: calls, abstention, code, chat"),
    _stage("notebooks", "reports.notebooks", "CopiesConfig", "run_copies", "execute copies of the walk-throughs on fresh runs"),
    _stage("report", "reports.build", "ReportConfig", "write", "execute a report over finished runs"),
)}  # fmt: skip

ENTRIES = LOOPS | PREPARATIONS | STAGES


class Command(NamedTuple):
    """`codechat NAME`: a function of a module that takes the words after NAME."""

    module: str
    about: str
    main: str = "main"


def _command(id: str) -> dict[str, Entry]:
    return {ENTRIES[id].command: ENTRIES[id]}


COMMANDS: dict[str, Command | Entry] = {
    "run": Command("codechat.launch.runner", "run a recipe: every stage from data to report"),
    "recipes": Command(
        "codechat.launch.runner", "list the recipes; print command lines for public models and data", "main_sheets"
    ),
    "data": Command("codechat.data.command", "prepare a corpus, conversations or function-calling problems"),
    "new": Command("codechat.tasks.new_command", "files to start from: a task of your own, its test and its rows"),
    **{entry.command: entry for entry in LOOPS.values()},
    **_command("diagnose"),
    **_command("passk"),
    "filter": Command(
        "codechat.evaluation.pass_rates",
        "keep the training problems that are solved sometimes but not always",
        "main_filter",
    ),
    **_command("evaluate"),
    **_command("natural"),
    "counterfactuals": Command(
        "codechat.evaluation.counterfactuals", "counterfactual evaluation: change one thing of a prompt"
    ),
    "plan": Command("codechat.launch.planner", "memory, hours and cost of a configuration on GPUs"),
    "launch": Command(
        "codechat.launch.launch_command", "start a run on one or many GPUs, detached; follow and stop it"
    ),
    "export-scripts": Command(
        "codechat.launch.portable_scripts", "shell scripts of the loops and recipes for other machines"
    ),
    "xray": Command(
        "codechat.reports.token_attribution", "colour tokens by loss mask, values or share of the gradient"
    ),
    "chat": Command("codechat.inference.terminal", "chat with a checkpoint"),
    "tools": Command("codechat.inference.terminal", "chat with a checkpoint that calls real functions", "main_tools"),
    "serve": Command("codechat.inference.serve", "OpenAI's API and a chat page over HTTP"),
    "sandbox": Command("codechat.sandbox.check", "which isolation untrusted programs get on this machine"),
    "runs": Command("codechat.runs.command", "list, show, compare and export runs"),
    **_command("report"),
    "pages": Command("codechat.reports.pages", "interactive pages: token x-ray, completions, pass@k"),
    "export": Command("codechat.models.export", "write a checkpoint as a Hugging Face directory"),
    "import": Command("codechat.models.import_weights", "a run from a Hugging Face directory or an original .pt file"),
    "download": Command("codechat.data.download", "fetch a model or data set from the Hugging Face hub"),
}  # in the order of --help


def find(id: str, among: Mapping[str, Entry] = ENTRIES) -> Entry:
    """The entry of an id; ConfigError names the nearest."""
    if id not in among:
        raise ConfigError(f"no {id!r}{nearest(id, among)}; there are: {', '.join(among)}")
    return among[id]


def entry_of(cfg: Any, among: Mapping[str, Entry] = LOOPS) -> Entry:
    """The loop (or other entry) of a configuration; ConfigError where there is none."""
    for entry in among.values():
        if (type(cfg).__module__, type(cfg).__name__) == (entry.module, entry.config):
            return entry
    raise ConfigError(
        f"{type(cfg).__name__} is the configuration of no loop; it takes one of {', '.join(among)}, such as SFTConfig"
    )
