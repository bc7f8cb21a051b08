"""The TOML file: a wrong file is one sentence that names the file, the key and the likely right name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from baton.deploy.config_file import read_tables
from baton.deploy.flags import by_name
from baton.metadata.config import setting
from baton.metadata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    name: str | None = setting(None, "a name")
    size: int = setting(16, "a size, 100 % of it")
    rate: float = setting(0.5, "a rate")
    mode: Literal["fast", "slow"] = setting("fast", "a mode")
    is_on: bool = setting(True, "a switch")
    api_key: str | None = setting(None, "a secret")
    guest: tuple[str, ...] = setting((), "a guest; may be given more than once")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[toy]\nszie = 3", ["szie", "3", "'size'"]),
        ("[tyo]\nsize = 3", ["tyo", "'toy'"]),
        ("size = 3", ["size", "[toy]"]),
        ("toy = 3", ["toy", "[toy]"]),
        ("[toy]\nchunk_tokens = 3", ["chunk_tokens", "(value 3)"]),
        ("[toy]\nsize = 3.5", ["[toy] size = 3.5", "whole number"]),
        ("[toy]\nsize = true", ["size", "whole number"]),
        ("[toy]\nsize = '3'", ["size = '3'", "whole number"]),
        ("[toy]\nrate = nan", ["rate", "number"]),
        ("[toy]\nis_on = 1", ["is_on", "true or false"]),
        ("[toy]\nmode = 'x'", ["mode", "one of fast, slow"]),
        ("[toy]\nname = 3", ["name", "text"]),
        ("[toy]\nguest = 3", ["guest = 3", "a list of texts"]),
        ("[toy]\nguest = ['a', 3]", ["guest = ['a', 3]", "a list of texts"]),
        ("[toy\nname = 3", ["not a TOML file"]),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_tables(str(path), {"toy": by_name(Toy)})
    assert str(path) in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "[toy]\nadmin-key = 's3cret'",
        "[toy]\nhf_token = 's3cret'",
        "[toy]\napi_key = ['s3cret']",
        "[[toy]]\nx = 's3cret'",
    ],
)
def test_no_error_shows_what_may_be_a_secret(tmp_path: Path, text: str) -> None:
    """systemd shows the error in the status of a unit."""
    path = tmp_path / "baton.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="toy") as error:
        read_tables(str(path), {"toy": by_name(Toy)})
    assert "s3cret" not in str(error.value)


def test_a_missing_or_binary_file_is_one_sentence(tmp_path: Path) -> None:
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none.toml", binary, tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            read_tables(str(path), {"toy": by_name(Toy)})
