"""The table of defaults against the classes of transformers."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from baton.engine.checkpoint.class_defaults import CLASS_DEFAULTS, THETAS
from baton.engine.models.families import FAMILIES


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_the_table_says_what_the_class_says(model_type: str) -> None:
    whole = CONFIG_MAPPING[model_type]().to_dict()
    for key, value in CLASS_DEFAULTS[model_type].items():
        if key == "sliding_window" and not whole.get("use_sliding_window", True):
            continue  # the class forgets the size of a window that is off
        assert whole.get(key) == value, key
    theta = THETAS.get(model_type, 10_000.0)
    rope = whole["rope_parameters"]
    assert theta is None or rope.get("full_attention", rope)["rope_theta"] == theta


def test_every_text_model_inside_another_has_its_defaults() -> None:
    """Files of mixtures state their sizes."""
    inner = {each for family in FAMILIES.values() if family.read_experts is None for each in family.text_types}
    assert inner <= CLASS_DEFAULTS.keys()
