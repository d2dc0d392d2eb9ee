"""What can be run: every training loop and every other stage of a recipe, by id, and the
commands of `codechat`.

The library's own entries stand here. An installed package adds its own through an entry point
of the group `codechat.entries` that names a sequence of `Entry`; the laboratory adds its
commands in this way.

The id is the `kind` in `runs/NAME/status.json`, so it never changes. Modules are imported when
they are needed."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from codechat.core.entries import Entry, loop
from codechat.core.errors import ConfigError, check_choice

GROUP = "codechat.entries"  # of the entry points

OWN = (
    loop("pretrain", "PretrainConfig", "train a model from scratch on a corpus"),
    loop("sft", "SFTConfig", "fine-tune on conversations"),
    loop("reinforce", "ReinforceConfig", "REINFORCE with a group baseline on a task's reward"),
    loop("grpo", "GRPOConfig", "GRPO, Dr. GRPO, DAPO, GSPO or CISPO on a task's reward"),
    loop("ppo", "PPOConfig", "PPO with a value head on a task's reward"),
    loop(
        "expert_iteration",
        "ExpertConfig",
        "expert iteration: fine-tune on the best sampled completions",
        command="expert",
    ),
    loop(
        "distill", "DistillConfig", "learn what a larger model would write: reverse or forward KL"
    ),
    loop("preference", "PreferenceConfig", "DPO, IPO, KTO, CPO, ORPO or SimPO on preferences"),
    Entry(
        id="diagnose",
        kind="stage",
        module="codechat.evaluation.diagnose",
        settings="codechat.evaluation.settings",
        config="DiagnoseConfig",
        function="diagnose",
        command="diagnose",
        about="before RL: do the rewards give a gradient?",
    ),
    Entry(
        id="evaluate",
        kind="stage",
        module="codechat.evaluation.evaluate",
        settings="codechat.evaluation.settings",
        config="EvaluateConfig",
        function="run_evaluation",
        command="evaluate",
        about="measure pass@k of checkpoints on a task, with intervals",
    ),
    Entry(
        id="data.corpus",
        kind="preparation",
        module="codechat.data.corpus_writer",
        config="CorpusConfig",
        function="prepare_corpus",
        command="data corpus",
        about="source text -> shards of token ids for pretraining",
    ),
    Entry(
        id="runs",
        module="codechat.runs.command",
        config="RunsConfig",
        command="runs",
        about="list, show and compare runs",
    ),
    Entry(
        id="export",
        module="codechat.formats.exchange",
        settings="codechat.formats.settings",
        config="ExportConfig",
        command="export",
        about="write a checkpoint as a Hugging Face directory or GGUF file",
    ),
    Entry(
        id="import",
        kind="stage",
        module="codechat.formats.exchange",
        settings="codechat.formats.settings",
        config="ImportConfig",
        function="import_model",
        command="import",
        about="make a run from a Hugging Face directory, a GGUF file or an original .pt file",
    ),
    Entry(
        id="data",
        module="codechat.data.command",
        command="data",
        main="main",
        about="prepare a corpus, conversations or function-calling problems",
    ),
    Entry(
        id="completion",
        module="codechat.completion",
        command="completion",
        main="main",
        about="print what completes commands and settings in bash, zsh or fish",
    ),
)


def _installed() -> Iterator[Entry]:
    """Entries of installed packages. ConfigError where an id is taken: it would name runs of
    two kinds."""
    taken = {entry.id for entry in OWN}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        for entry in point.load():
            if entry.id in taken:
                raise ConfigError(
                    f"{point.value} declares {entry.id!r}, which "
                    "exists; rename it there, or uninstall it"
                )
            taken.add(entry.id)
            yield entry


ALL = (*OWN, *_installed())
LOOPS = {entry.id: entry for entry in ALL if entry.kind == "loop"}
PREPARATIONS = {entry.id: entry for entry in ALL if entry.kind == "preparation"}
STAGES = {entry.id: entry for entry in ALL if entry.kind == "stage"}
INSTRUMENTS = {entry.id: entry for entry in ALL if entry.kind == "instrument"}
ENTRIES = LOOPS | PREPARATIONS | STAGES
COMMANDS = {e.command: e for e in ALL if e.command and e.kind != "preparation"}


def find(id: str, among: Mapping[str, Entry] = ENTRIES) -> Entry:
    """The entry of an id; ConfigError names the nearest."""
    return among[check_choice("loop or stage", id, among)]


def instrument(id: str, remedy: str) -> Any:
    """The function of an instrument, which the library calls but another package brings.
    ConfigError with the remedy where no installed package does."""
    if id not in INSTRUMENTS:
        raise ConfigError(f"no installed package brings the instrument {id!r}; {remedy}")
    entry = INSTRUMENTS[id]
    return entry.load(entry.function)


def entry_of(cfg: Any, among: Mapping[str, Entry] = LOOPS) -> Entry:
    """The loop (or other entry) of a configuration; ConfigError where there is none."""
    for entry in among.values():
        if (type(cfg).__module__, type(cfg).__name__) == (entry.settings_module, entry.config):
            return entry
    raise ConfigError(
        f"{type(cfg).__name__} is the configuration of no "
        f"loop; required: that of {', '.join(among)}"
    )
