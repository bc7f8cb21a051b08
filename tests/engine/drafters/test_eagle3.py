"""The target layers whose states an EAGLE-3 head takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heads import write_head

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.eagle3 import aux_layers
from baton.engine.models.head_file import read_head
from baton.metadata.errors import ConfigError, ModelError

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def read(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[int, ...]]:
    model = checkpoint("llama", num_hidden_layers=6)

    def layers(**settings: Any) -> tuple[int, ...]:
        target = read_model_config(model)
        return aux_layers(read_head(write_head(tmp_path / "head", "eagle3", model, **settings), target), target)

    return layers


def test_given_ids_are_inputs_and_those_of_eagle_config_are_outputs(read: Callable[..., tuple[int, ...]]) -> None:
    assert read(**{KEY: [0, 3, 6]}) == (0, 3, 6)
    assert read(**{KEY: None, "eagle_config": {KEY: [0, 3, 5]}}) == (1, 4, 6)


def test_the_default_is_one_low_one_middle_and_one_high_layer(read: Callable[..., tuple[int, ...]]) -> None:
    assert read(**{KEY: None}) == (2, 3, 3)
    assert read(**{KEY: None, "eagle_config": {}}) == (2, 3, 3)


def test_layers_that_the_target_lacks_and_other_numbers_are_refused(read: Callable[..., tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"layers \[7\]; the target has layers 0 to 6"):
        read(**{KEY: [0, 1, 7]})
    with pytest.raises(ConfigError, match=r"layers \[-1\]; the target has layers 0 to 6"):
        read(**{KEY: [-1, 0, 1]})
    with pytest.raises(ConfigError, match=r"takes three states .* names \(0, 1, 2, 3\)"):
        read(**{KEY: [0, 1, 2, 3]})
    with pytest.raises(ConfigError, match=r"takes three states .* names \(0, 1\)"):
        read(**{KEY: [0, 1]})
    with pytest.raises(ModelError, match=r"layer_ids = \['a', 1, 2\] must be a list of layers"):
        read(**{KEY: ["a", 1, 2]})
    with pytest.raises(ModelError, match="eagle_config = 'x' must be an object"):
        read(**{KEY: None, "eagle_config": "x"})
