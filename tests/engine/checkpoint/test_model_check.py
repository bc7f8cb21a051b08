"""What is wrong with a model is said before torch is loaded and anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.model_check import DEMO, check_model, resolve_model, stored_size
from baton.metadata.errors import BatonError

Checkpoint = Callable[..., Path]


def test_the_demo_model_passes_without_torch() -> None:
    code = """
import sys
from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.model_check import check_model
check_model(DecodeConfig())
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context_len": 10_000_000}, "context_len 10000000 is out of range: the model takes 1 to "),
        ({"tp": 7}, "query heads, which 7 ranks cannot divide; let --tp be a divisor"),
        ({"dp_attention": 7}, "hidden units, which 7 ranks cannot divide; let --dp-attention be a divisor"),
        ({"speculative": "eagle", "draft_model": "/no/head"}, "--draft-model /no/head: no such directory"),
        ({"model": "/no/model"}, "--model /no/model: no such directory"),
        ({"model": __file__}, f"--model {__file__} is a file; "),
    ],
)
def test_settings_that_do_not_fit_the_model_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BatonError) as error:
        check_model(DecodeConfig(**settings))
    assert words in str(error.value) and error.value.exit_status == 2


def test_weights_that_are_made_need_no_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint("llama") / name).read_bytes())
    check_model(DecodeConfig(model=str(tmp_path), load_format="dummy"))
    with pytest.raises(BatonError, match=rf"--model {tmp_path} has no \*.safetensors files"):
        check_model(DecodeConfig(model=str(tmp_path)))


def test_the_home_directory_is_found() -> None:
    assert resolve_model("~/model") == Path.home() / "model"


def test_the_size_of_what_a_node_loads_includes_its_drafter() -> None:
    alone = (DEMO / "model.safetensors").stat().st_size
    drafter = sum(path.stat().st_size for path in (DEMO / "eagle").glob("*.safetensors"))
    assert stored_size(DecodeConfig(speculative="none")) == alone
    assert stored_size(DecodeConfig(speculative="eagle")) == alone + drafter > alone
    assert stored_size(DecodeConfig(load_format="dummy")) == 0
