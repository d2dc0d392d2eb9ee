"""The registry: every entry loads, and a loop is found from its configuration."""

from raising import raising

from codechat.core import config, registry
from codechat.core.errors import ConfigError
from codechat.launch.runner import RecipeConfig


def test_every_entry_can_be_loaded_and_a_loop_is_found_from_its_configuration() -> None:
    for id, entry in registry.ENTRIES.items():
        assert registry.find(id) is entry and callable(entry.load(entry.function))
        assert (id in registry.LOOPS) == ({"run_name", "lr"} <= config.fields_of(entry.config_class).keys())
    for id, entry in registry.LOOPS.items():
        assert registry.entry_of(entry.config_class(**({"task": "toy"} if id == "preference" else {}))) is entry
    with raising(ConfigError, "RecipeConfig"):
        registry.entry_of(RecipeConfig())
