"""What env.json says of the process that made a run."""

from pathlib import Path

from codechat.core import provenance


def test_a_run_names_the_kernels_that_make_cpp_has_built(tmp_path: Path) -> None:
    assert provenance.snapshot(tmp_path)["compiled"] == []
    built = tmp_path / "build" / "cpp"
    built.mkdir(parents=True)
    (built / "libtraining.so").touch()
    (built / "train").touch()
    assert provenance.snapshot(tmp_path)["compiled"] == ["libtraining.so"]
