"""EAGLE's directory is told from other heads by its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from heads import ALGORITHM, write_head

from baton.engine.drafters.registry import DRAFTERS
from baton.engine.drafters.speculation import load_family
from baton.engine.models.head_file import tensor_names


@pytest.mark.parametrize("kind", [kind for kind in ALGORITHM if "frozen" not in kind])
def test_a_head_is_recognised_by_its_own_drafter_alone(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    target = checkpoint("llama")
    names = tensor_names(write_head(tmp_path / kind, kind, target))
    for prefix in ("", "model."):
        named = frozenset(prefix + name.removeprefix("model.") for name in names)
        families = [load_family(each) for each in DRAFTERS]
        found = [each.name for each in families if each.recognises is not None and each.recognises(named)]
        assert found == [ALGORITHM[kind]]


def test_a_layer_with_a_norm_for_its_states_is_no_eagle_head() -> None:
    """EAGLE-3 heads that name their layer `layers.0` have `fc.weight`, too."""
    recognises = load_family("eagle").recognises
    assert recognises is not None
    assert recognises(frozenset({"fc.weight", "layers.0.mlp.up_proj.weight"}))
    assert not recognises(frozenset({"fc.weight", "layers.0.hidden_norm.weight"}))
