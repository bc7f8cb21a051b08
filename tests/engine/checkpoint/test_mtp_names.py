"""Which layers of a checkpoint are prediction layers, by the layouts' names."""

from __future__ import annotations

import pytest

from baton.engine.checkpoint.mtp_names import layer_prefixes


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (["model.layers.10.eh_proj.weight", "model.layers.9.eh_proj.weight"], ("model.layers.9", "model.layers.10")),
        (
            ["model.mtp_layers.10.input_proj.weight", "model.mtp_layers.2.input_proj.weight"],
            ("model.mtp_layers.2", "model.mtp_layers.10"),
        ),
        (["mtp.1.e_proj.weight", "mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], ("mtp.0", "mtp.1")),
        (["fc.weight", "model.layers.0.self_attn.q_proj.weight"], ()),
        (["model.mtp.eh_proj.weight", "fc.e_proj.weight"], ()),
    ],
    ids=["DeepSeek", "MiMo", "streams", "none", "no number"],
)
def test_layers_are_ordered_by_their_numbers(names: list[str], prefixes: tuple[str, ...]) -> None:
    assert layer_prefixes(frozenset(names)) == prefixes
