"""Settings of every process and node: help texts, and bounds that name the value."""

from __future__ import annotations

from dataclasses import fields

import pytest

from baton.metadata.config import NodeConfig, ProcessConfig, at_least
from baton.metadata.errors import ConfigError


@pytest.mark.parametrize("kind", [ProcessConfig, NodeConfig])
def test_every_field_has_a_help_text(kind: type) -> None:
    assert all(field.metadata["help"] for field in fields(kind))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"drain_timeout_s": -0.5}, "drain_timeout_s is -0.5; it must be 0 or more"),
        ({"node_id": ""}, "node_id is empty; give a name, or leave it out for a generated one"),
    ],
)
def test_a_value_that_cannot_work_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NodeConfig(**values)  # pyright: ignore[reportArgumentType]


def test_an_unset_value_has_no_bound() -> None:
    at_least(NodeConfig(), "node_id", 1)
