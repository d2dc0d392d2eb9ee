"""Exported scripts: the committed ones are those that the command writes; what they pass on;
what they reject."""

import dataclasses
import itertools
import json
import os
import runpy
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_launcher import stand_in

from codechat.core import config
from codechat.core.errors import ConfigError, UserError
from codechat.core.registry import LOOPS, find
from codechat.models.config import GPTConfig
from codechat.pretrain import PretrainConfig
from codechat.sft import SFTConfig
from codechat_lab.chars.lab import CharsConfig
from codechat_lab.launch import portable_scripts, runner
from codechat_lab.launch.recipes import bound_stages

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default set, in a folder `scripts` of a root of its own."""
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable_scripts.paths, "ROOT", root)
        portable_scripts.export(portable_scripts.ExportConfig(out=root / "scripts"))
    return root / "scripts"


def words_of(
    script: Path, tmp_path: Path, *flags: str, variables: Mapping[str, str] | None = None
) -> list[str]:
    """What the script passes to the interpreter, by a stand-in for it; the first word is the
    folder where it runs."""
    said = stand_in(tmp_path / "said", 'printf "%s\\n" "$(pwd)" "$@"')
    env = {"PATH": os.environ["PATH"], "PYTHON": str(said)} | dict(variables or {})
    done = subprocess.run(
        ["sh", str(script), *flags],
        capture_output=True,
        text=True,
        timeout=20,
        cwd="/",
        env=env,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_committed_scripts_are_those_that_the_command_writes(written: Path) -> None:
    committed, new = (
        {p.name: p.read_text() for p in folder.iterdir()} for folder in (ROOT / "scripts", written)
    )
    assert committed == new, (
        "run `codechat export-scripts --out scripts` and commit what it changes"
    )
    names = {f"{recipe}-{scale}" for recipe in ("v6", "ours") for scale in ("2b", "8b")}
    assert {f"{name}.sh" for name in (*LOOPS, *names)} <= set(committed)
    assert all(os.access(path, os.X_OK) for path in (ROOT / "scripts").glob("*.sh"))
    assert not [name for name, text in committed.items() if str(ROOT) in text or "--run " in text]


def test_a_loop_script_gives_torchrun_its_settings(written: Path, tmp_path: Path) -> None:
    for id in LOOPS:
        where, *words = words_of(
            written / f"{id}.sh", tmp_path, "--run-name", "mine", variables={"NPROC": "2"}
        )
        entry = find(id, LOOPS)
        at = words.index("--")
        assert where == str(written.parent)
        head = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "codechat",
            entry.command,
        ]
        assert words[:at] == head
        cfg = config.parse(entry.config_class, words[at + 1 :], presets=entry.presets)
        expected = config.parse(
            entry.config_class, portable_scripts.LOOPS[id].split(), presets=entry.presets
        )
        assert cfg == dataclasses.replace(expected, run_name="mine")


def test_the_settings_of_a_recipe_are_the_recipes_own_until_they_are_edited(
    written: Path, tmp_path: Path
) -> None:
    for name, scale in itertools.product(("v6", "ours"), ("2b", "8b")):
        read = bound_stages(name, scale, settings=written / f"{name}-{scale}.json")
        assert [(b.name, b.hash, b.when) for b in read] == [
            (b.name, b.hash, b.when) for b in bound_stages(name, scale)
        ]
    settings = json.loads((written / "v6-8b.json").read_text())
    settings["v6-sft"] |= {"lr": 1e-5, "run_name": "mine/sft"}
    (tmp_path / "edited.json").write_text(json.dumps(settings))
    edited = {b.name: b for b in bound_stages("v6", "8b", settings=tmp_path / "edited.json")}
    assert (edited["v6-sft"].cfg.lr, edited["v6-sft"].cfg.run_name) == (1e-5, "mine/sft")
    changed = {b.name for b in bound_stages("v6", "8b") if edited[b.name].hash != b.hash}
    assert changed == {"v6-sft", "v6-diagnose", "v6-rl", "v6-evaluate"}, "it, and what needs it"


def test_variables_of_a_recipes_script_are_options_of_codechat_run(
    written: Path, tmp_path: Path
) -> None:
    head = [
        "-m",
        "codechat",
        "run",
        "v6",
        "--scale",
        "8b",
        "--settings",
        str(written / "v6-8b.json"),
    ]
    for environment, expected in json.loads(Path(__file__).with_name("variables.json").read_text()):
        _, *words = words_of(
            written / "v6-8b.sh", tmp_path, "--until", "v6-rl", variables=environment
        )
        assert words == [*head, *expected, "--until", "v6-rl"]
        cfg = config.parse(runner.RecipeConfig, words[3:])
        assert (cfg.until, cfg.yes, cfg.base) == ("v6-rl", False, environment.get("BASE"))
        assert set(cfg.force) == {b for a, b in zip(expected, expected[1:]) if a == "--force"}
        runner.pending(dataclasses.replace(cfg, base=None))  # all stages that a script names exist
    stages = list(json.loads((written / "ours-2b.json").read_text()))
    words = words_of(
        written / "ours-2b.sh", tmp_path, variables={"SKIP_TO": str(stages.index("ours-rl") + 1)}
    )
    assert words[-2:] == ["--from", "ours-rl"], "numbers of other recipes are places"


MISREAD = {
    "v6-2b": [
        "FORCE_TYPO=1",
        "FORCE_STAGE=1",
        "FORCE=1",
        "FORCE_V6_SFTT=1",
        "force_v6_rl=1",
        "FORCE_PREP_COD=true",
        "FORCE_V6_RL=yes",
        "FORCE_MERGE=2",
        "FORCE_TYPO=2",
        "FORCE_TYPO=y",
        "FORCE_TYPO=1 ",
        "FOCRE_MERGE=1",
        "FORC_V6_RL=1",
        "FORCEPREP_RL=1",
        "SKIPTO=7",
        "SKIP_T0=7",
        "SKIP_T=7",
        "SKIP_OT=7",
        "SKIP=7",
        "skip=7",
        "SKIP=v6-rl",
        "SKIP_TO_STAGE=v6-rl",
        "SKIP_TO_N=7",
        "SKIP_STAGE=7",
        "SKIP_UNTIL=v6-rl",
        "SKIP_BEFORE=sft-general",
        "skip_to=7",
        "BAES=b",
        "base=b",
        "PYTHN=python3",
        "NPROC=2",
    ],
    "sft": [
        "NPROCS=2",
        "N_PROC=2",
        "NPORC=2",
        "nproc=2",
        "PYHTON=python3",
        "SKIP_TO=3",
        "SKIP_TO_STAGE=v6-rl",
        "SKIP=7",
        "BASE=mine",
        "FORCE_V6_RL=1",
        "NPROC=eight",
        "NPROC=0",
    ],
}
OF_OTHERS = {
    "FORCE_COLOR": "3",
    "FORCE_CUDA": "1",
    "FORCE_TORCHRUN": "1",
    "FORCE_JAVASCRIPT_ACTIONS_TO_NODE20": "true",
    "FORCE_QWENVL_VIDEO_READER": "decord",
    "BASE_URL": "http://x",
    "BASE_DIR": "/x",
    "BASH": "/bin/bash",
    "CASE": "1",
    "PYTHONPATH": "/x",
    "PYTHON3": "python3.12",
    "PYTHONHASHSEED": "0",
    "NPROC_PER_NODE": "8",
    "SKIP": "ruff",
    "SKIP_TESTS": "1",
    "SKIP_TOOLS": "v6",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "1",
    "LESSOPEN": "a\nFORCE_TYPO=1",
}


@pytest.mark.parametrize("script", MISREAD)
def test_a_variable_that_a_script_would_ignore_is_refused_by_name(
    script: str, written: Path, tmp_path: Path
) -> None:
    """And none of other programs, also where another one's value looks like a variable. Nothing
    is started."""
    for line in MISREAD[script]:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            words_of(written / f"{script}.sh", tmp_path, variables=dict([line.split("=")]))
        assert refused.value.returncode == 2 and not refused.value.stdout, line
        (said,) = refused.value.stderr.splitlines()
        assert said.startswith(f"error: {line}: "), line
    expected = words_of(written / f"{script}.sh", tmp_path)
    assert words_of(written / f"{script}.sh", tmp_path, variables=OF_OTHERS) == expected


def test_settings_and_names_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    for settings, named in (
        ({"v6-stf": {}}, "'v6-sft'"),
        ({"v6-sft": 3}, "v6-sft"),
        ({"v6-sft": {"lrr": 1}}, "'lr'"),
    ):
        (tmp_path / "s.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=named):
            bound_stages("v6", "8b", settings=tmp_path / "s.json")
    for words in ({"recipes": ("v66",)}, {"scales": ("9b",)}):
        with pytest.raises(ConfigError):
            portable_scripts.export(portable_scripts.ExportConfig(out=tmp_path / "s", **words))
        assert not (tmp_path / "s").exists()


def test_a_configuration_is_written_as_a_script_and_read_back(home: Path, tmp_path: Path) -> None:
    for cfg in (
        PretrainConfig(
            run_name="p",
            model=GPTConfig(depth=2, n_embd=256),
            seq_len=None,
            compile=False,
        ),
        CharsConfig(model=GPTConfig(depth=2, n_embd=256, n_head=4, block_size=128), init_from=None),
    ):
        assert config.from_dict(type(cfg), portable_scripts.changed_settings(cfg)) == cfg
    cfg = SFTConfig(run_name="a/b", lr=3e-3)
    where, *words = words_of(portable_scripts.write_loop(cfg, home / "mine", nproc=4), tmp_path)
    assert where == str(home)
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert config.parse(SFTConfig, words[words.index("--") + 1 :]) == cfg
    outside = portable_scripts.write_loop(cfg, tmp_path.parent / f"{tmp_path.name}-out")
    assert words_of(outside, tmp_path)[0] == "/", (
        "outside of the project it stays where it is called"
    )


def test_the_image_for_modal_holds_the_package_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modal = pytest.importorskip("modal")
    added = []
    add = modal.Image.add_local_dir
    monkeypatch.setattr(
        modal.Image,
        "add_local_dir",
        lambda self, *where, **how: added.append((where, how)) or add(self, *where, **how),
    )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "modal_train.py"))
    (((folder, there), how),) = added
    # which `pip install /codechat` finds
    assert (Path(folder), there, how["copy"]) == (
        ROOT,
        "/codechat",
        True,
    )
    left_out = modal.FilePatternMatcher(*how["ignore"])
    assert not any(
        map(
            left_out,
            map(
                Path,
                ("pyproject.toml", "setup.py", "codechat/runs/run.py", "data/corpus/manifest.json"),
            ),
        )
    )
    unwanted = (
        ".git/config",
        "runs/mine/config.json",
        "codechat/__pycache__/cli.pyc",
        ".ruff_cache/x",
    )
    assert all(map(left_out, map(Path, unwanted)))
