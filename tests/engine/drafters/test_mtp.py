"""Steps that MTP drafts: any number, and trees, with one layer; a chain of at most n steps with n layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heads import write_head

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.family import Speculation
from baton.engine.drafters.speculation import read_speculation
from baton.engine.pace.draft_length import DraftShape
from baton.metadata.errors import ConfigError


@pytest.fixture
def read(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Speculation]:
    model = checkpoint("llama")

    def make(kind: str, **settings: Any) -> Speculation:
        head = write_head(tmp_path / kind, kind, model)
        config = DecodeConfig(speculative="mtp", draft_model=str(head), **settings)
        return read_speculation(config, model, read_model_config(model), "float32")

    return make


@pytest.mark.parametrize(
    ("kind", "settings", "shape"),
    [
        ("mtp-deepseek", {}, DraftShape(5)),
        ("mtp-mimo", {"draft_steps": 9}, DraftShape(9)),
        ("mtp-mimo", {"draft_steps": 2, "draft_topk": 2}, DraftShape(2, 2, 6)),
        ("mtp3-deepseek", {}, DraftShape(3)),
        ("mtp3-mimo", {"draft_steps": 1}, DraftShape(1)),
        ("mtp3-mimo", {"draft_steps": 2}, DraftShape(2)),
        ("mtp3-mimo", {"draft_steps": 3}, DraftShape(3)),
        ("mtp6-deepseek", {}, DraftShape(6)),
    ],
)
def test_steps_by_layers(
    read: Callable[..., Speculation], kind: str, settings: dict[str, Any], shape: DraftShape
) -> None:
    assert read(kind, **settings).shape == shape


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_topk": 2}, ("3 MTP layers", "chains only", "draft_topk is 2")),
        ({"draft_steps": 4}, ("draft_steps is 4", "3 MTP layers", "use 1 to 3")),
    ],
)
def test_trees_and_more_steps_than_layers_are_refused(
    read: Callable[..., Speculation], settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        read("mtp3-mimo", **settings)
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_pool_has_a_layer_for_each_mtp_layer(read: Callable[..., Speculation]) -> None:
    """config.json of such a directory repeats the target's number of layers."""
    drafts = [read(kind).draft for kind in ("mtp-deepseek", "mtp3-deepseek", "mtp6-deepseek")]
    assert [draft.num_layers for draft in drafts if draft is not None] == [1, 3, 6]
