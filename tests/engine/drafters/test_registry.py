"""Each line of the registry leads to a drafter that can be loaded, under one name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from drafters import ALL, settings, target_of

from baton.decode_node.config import DecodeConfig
from baton.deploy.flags import settings_of
from baton.engine.drafters.registry import ALGORITHMS, DRAFTERS
from baton.engine.drafters.speculation import load_family
from baton.engine.engine import Engine


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_a_line_names_the_module_of_its_drafter(algorithm: str) -> None:
    assert load_family(algorithm).name == algorithm


def test_the_flag_takes_every_drafter() -> None:
    (flag,) = (each for each in settings_of(DecodeConfig) if each.name == "speculative")
    assert flag.choices == ("auto", *ALGORITHMS) and flag.default == "auto"
    assert set(ALGORITHMS) == {"none", *DRAFTERS}


def test_a_drafter_that_is_not_registered_is_refused_by_the_flag() -> None:
    (flag,) = (each for each in settings_of(DecodeConfig) if each.name == "speculative")
    with pytest.raises(ValueError, match="must be one of auto, none, ngram, "):
        flag.check("medusa")


def test_names_are_read_without_torch_and_without_a_drafter() -> None:
    code = (
        "import sys; from baton.engine.drafters import registry; assert registry.DRAFTERS;"
        "bad = {'torch', 'numpy', 'baton.engine.drafters.eagle'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_every_drafter_has_a_kind_that_the_tests_over_all_drafters_run(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A drafter that no test loads does not pass unnoticed."""
    found = set()
    for kind in ("ngram", *ALL):
        model = target_of(kind, checkpoint)
        engine = Engine(DecodeConfig(model=str(model), device="cpu", num_pages=8, **settings(kind, model, tmp_path)))
        assert engine.drafter is not None, kind
        found.add(engine.speculation.algorithm)
    assert found == set(DRAFTERS)
