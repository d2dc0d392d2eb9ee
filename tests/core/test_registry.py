"""The registry: every entry loads, and a loop is found from its configuration."""

from __future__ import annotations

import pytest

from codechat.core import config, registry
from codechat.core.errors import ConfigError
from codechat.launch.runner import RecipeConfig


@pytest.mark.parametrize("id", registry.ENTRIES)
def test_every_entry_can_be_loaded(id: str) -> None:
    entry = registry.find(id)
    assert (
        entry.config_class.__name__ == entry.config
        and callable(entry.load(entry.function))
        and config.leaves_of(entry.config_class)
    )
    assert (id in registry.LOOPS) == (
        "run_name" in config.fields_of(entry.config_class) and "lr" in config.fields_of(entry.config_class)
    )


@pytest.mark.parametrize("id", registry.LOOPS)
def test_a_loop_is_found_from_its_configuration(id: str) -> None:
    cls = registry.LOOPS[id].config_class
    needed = {"task": "toy"} if id == "preference" else {}
    assert registry.entry_of(cls(**needed)).id == id


def test_a_configuration_of_no_loop_is_an_error() -> None:
    with pytest.raises(ConfigError):
        registry.entry_of(RecipeConfig())
