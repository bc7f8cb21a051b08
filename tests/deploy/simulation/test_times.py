"""Files of measured times: reading, finding, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated import TIMES

from baton.deploy.simulation.times import find, names, read
from baton.metadata.errors import ConfigError


@pytest.mark.parametrize("name", names())
def test_the_files_that_come_with_baton_can_be_read_and_name_their_sources(name: str) -> None:
    times = read(find(name))
    assert times.sources and times.error is not None


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_bytes(msgspec.json.encode(TIMES))
    assert read(find(str(tmp_path))) == read(find(str(tmp_path / "times.json"))) == TIMES


def test_a_model_without_times_is_told_how_to_measure_them(tmp_path: Path) -> None:
    command = f"python tests/benchmarks/measure_times.py --model {tmp_path} --out {tmp_path}/times.json"
    with pytest.raises(ConfigError, match=r"it holds no times\.json") as caught:
        find(str(tmp_path))
    assert command in str(caught.value) and names()[0] in str(caught.value)
    with pytest.raises(ConfigError, match="--model llama: there is no such file, directory or known name"):
        find("llama")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": [{"batch": 1, "context": 9, "ms": 3.0}]}, "rounds must hold two batch sizes"),
        ({"rounds": [{"batch": 1, "context": 9, "ms": 0}]}, "rounds has 0.0 ms"),
        ({"rounds": [{"batch": 0, "context": 9, "ms": 1}]}, "its sizes must be 1 or more"),
        ({"chunks": [{"tokens": 5, "ms": 1}, {"tokens": 9, "ms": 2, "history": 3}]}, "chunks must hold two lengths"),
        ({"chunks": [{"tokens": 5, "ms": 1, "history": -1}]}, "its sizes must be 1 or more"),
        ({"handoffs": []}, "handoffs must hold one length"),
        ({"pool_tokens": 0}, "pool_tokens and context_len 1 or more"),
        ({"router_ms": -1}, "router_ms must be 0 or more"),
        ({"router_mss": 1}, "router_mss"),
        ({"model": 3}, "model"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(msgspec.to_builtins(TIMES) | change))
    with pytest.raises(ConfigError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="is no file of times"):
        read(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)
