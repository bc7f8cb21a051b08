"""Values of a config.json are checked where they are read, and errors name file, key and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint.config_file import ConfigFile
from baton.metadata.errors import ModelError


def config(tmp_path: Path, **fields: Any) -> ConfigFile:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return ConfigFile(path)


def test_values_and_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, layers=3, eps=1e-5, tied=True, nothing=None, architectures=["LlamaForCausalLM", "Other"])
    assert (file.integer("layers"), file.number("eps", 1.0), file.flag("tied")) == (3, 1e-5, True)
    assert (file.integer("nothing", 7), file.number("absent", 2.0), file.flag("absent")) == (7, 2.0, False)
    assert file.has("nothing") and not file.has("absent")
    assert file.architecture == "LlamaForCausalLM" and file.text_type is None
    assert config(tmp_path, architectures=[]).architecture == config(tmp_path, architectures=[5]).architecture == ""


@pytest.mark.parametrize(
    ("read", "value", "words"),
    [
        (lambda file: file.integer("key"), 0, "key = 0 must be a whole number of at least 1"),
        (lambda file: file.integer("key"), True, "key = True must be a whole number"),
        (lambda file: file.integer("key"), 2.5, "key = 2.5 must be a whole number"),
        (lambda file: file.integer("key"), None, "key = None must be a whole number"),
        (lambda file: file.number("key", 1.0), -1, "key = -1 must be a positive number"),
        (lambda file: file.number("key", 1.0), "1", "key = '1' must be a positive number"),
        (lambda file: file.flag("key"), 1, "key = 1 must be true or false"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, read: Callable[[ConfigFile], Any], value: Any, words: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {words}"):
        read(config(tmp_path, key=value))


def test_a_file_knows_which_fields_were_asked_for(tmp_path: Path) -> None:
    file = config(tmp_path, layers=3, eps=1e-5, other=7, rope={"factor": 2.0, "scale": 4.0}, rest={"a": 1})
    assert (file.integer("layers"), file.has("eps"), file.get("absent")) == (3, True, None)
    assert file.section("rope").number("factor") == 2.0
    assert file.unread() == {"other": 7, "rest": {"a": 1}}
    assert [section.unread() for section in file.sections()] == [{"scale": 4.0}]
    with pytest.raises(ModelError, match=r"rope\.scale = 4.0 must be true or false"):
        file.section("rope").flag("scale")
    assert file.section("nothing").unread() == {} and file.section("nothing").get("a") is None
    with pytest.raises(ModelError, match="other = 7 must be an object"):
        file.section("other")


def test_the_text_model_inside_another_is_read(tmp_path: Path) -> None:
    """The wrapper states some fields for the whole model, and owns the head."""
    text = {"model_type": "qwen3", "layers": 0, "dtype": None, "tie_word_embeddings": True}
    file = config(tmp_path, layers=9, dtype="bfloat16", tie_word_embeddings=False, text_config=text)
    assert file.text_type == "qwen3" and not file.has("text_config")
    assert file.get("dtype") == "bfloat16" and not file.flag("tie_word_embeddings")
    with pytest.raises(ModelError, match=r"config\.json: text_config\.layers = 0 must be"):
        file.integer("layers")


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match=r"config\.json does not exist; a model directory holds config.json"):
        ConfigFile(path)
    for content in (b'{"architectures": ["Llama', b"\xff\xfe\x00", b"", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json is not readable JSON"):
            ConfigFile(path)
    path.write_text("[1, 2]")
    with pytest.raises(ModelError, match=r"config\.json holds a list, not a JSON object"):
        ConfigFile(path)
