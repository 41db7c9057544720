"""docs/use/configuration.md is what the code says today, and every key stands there."""

import re
from pathlib import Path

import configuration_page
import yaml

from pdserve.configs.base import Config
from pdserve.configs.schema import ClusterConfig

PAGE = Path(__file__).parents[2] / "docs" / "use" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == configuration_page.page(), (
        "run: python tests/configuration_page.py > docs/use/configuration.md"
    )


def keys(config: type[Config]) -> set[str]:
    found = set(config.model_fields)
    for field in config.model_fields.values():
        section = configuration_page.inner_config(field)
        found |= keys(section) if section else set()
    return found


def test_every_key_has_a_row() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M))
    assert keys(ClusterConfig) == rows
    assert len(rows) > 90


def test_the_example_is_valid() -> None:
    example = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)[0]
    [application] = yaml.safe_load(example)["applications"]
    made = ClusterConfig(**application["args"])
    assert made.engine.max_model_len == 2048 and made.decode.replicas == 2


def test_examples_of_sections_are_valid_and_on_the_page() -> None:
    examples = re.findall(r"```yaml\n(.*?)\n```", PAGE.read_text(), re.S)[1:]
    assert sorted(examples) == sorted(configuration_page.EXAMPLES.values())
    for example in examples:
        assert ClusterConfig(**yaml.safe_load(example)) != ClusterConfig()
