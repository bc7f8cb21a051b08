"""The file of measured configurations: what is kept comes back, and a file that cannot be used does no harm."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from patience import wait_until

from baton.engine.tuning import tuning_file
from baton.engine.tuning.tuning_file import TuningFile, cache_directory, decode, encode
from baton.kernels.products.linear_configs import Config, ProductShape

CHOICES = {
    ProductShape(96, 64, 1): Config("vector", 2, 64),
    ProductShape(96, 64, 8): None,
    ProductShape(128, 64, 8, is_gated=True): Config("dot", 37, 64, 4, 3),
}


def make_file(
    tmp_path: Path, device: str = "Some GPU, capability 9.0", versions: str = "torch 2, triton 3"
) -> TuningFile:
    return TuningFile(device, versions, tmp_path / "cache", tmp_path / "lock")


def test_choices_come_back_at_the_next_start(tmp_path: Path) -> None:
    assert make_file(tmp_path).read() == {}
    assert make_file(tmp_path).write(CHOICES)
    assert make_file(tmp_path).read() == CHOICES
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [make_file(tmp_path).path.name]


def test_each_kind_of_gpu_and_each_version_has_a_file(tmp_path: Path) -> None:
    make_file(tmp_path).write(CHOICES)
    for other in (make_file(tmp_path, device="Another GPU"), make_file(tmp_path, versions="torch 3")):
        assert other.path != make_file(tmp_path).path and other.read() == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"device": "Some', "truncated"),
        (b"\xff\x00", "malformed"),
        (b'{"device": "Some GPU, capability 9.0", "versions": "torch 2, triton 3"}', "products"),
        (b'{"device": "H100", "versions": "torch 2, triton 3", "products": []}', "it is for H100"),
        (b'{"device": "Some GPU, capability 9.0", "versions": "1", "products": []}', "with 1"),
        (b'{"device": "Some GPU, capability 9.0", "versions": "torch 2, triton 3", "products": [1]}', "array"),
        (
            b'{"device": "Some GPU, capability 9.0", "versions": "torch 2, triton 3", "products": '
            b'[[[96, 64, 8, false], ["dot", 32, 48, 4, 4, 1]]]}',
            "is no configuration",
        ),
        (
            b'{"device": "Some GPU, capability 9.0", "versions": "torch 2, triton 3", "products": '
            b'[[[96, 64, 8, false], ["tma", 32, 64, 4, 4, 1]]]}',
            "tma",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_line(
    content: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_file(tmp_path)
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    assert file.read() == {}
    [record] = caplog.records
    assert str(file.path) in record.message and reason in record.message, record.message
    assert file.write(CHOICES) and file.read() == CHOICES  # and replaced by the next measurement


def test_a_directory_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file in place of the directory")
    file = make_file(tmp_path)
    assert not file.write(CHOICES)
    [record] = caplog.records
    assert "cannot be written" in record.message and str(file.path) in record.message


def test_nodes_of_a_gpu_measure_one_after_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events: list[str] = []

    def second() -> None:
        with TuningFile("GPU", "v", tmp_path / "other", tmp_path / "lock").alone() as has_waited:
            assert has_waited
            events.append("second")

    with make_file(tmp_path).alone() as has_waited:
        assert not has_waited
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: caplog.records, "the second one waits")
        events.append("first")
    thread.join()
    assert events == ["first", "second"]
    assert [record.message for record in caplog.records] == [
        "waiting for another node that measures products on this GPU"
    ]


def test_no_node_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning_file, "_WAIT_S", 0.1)
    with make_file(tmp_path).alone(), make_file(tmp_path).alone():
        assert "measured without the lock" in caplog.records[-1].message


def test_a_lock_that_cannot_be_made_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with TuningFile("GPU", "v", tmp_path, tmp_path / "file" / "lock").alone():
        pass
    [record] = caplog.records
    assert "measured without the lock" in record.message


def test_the_directory_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "baton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "baton"


def test_choices_go_to_another_rank_as_bytes() -> None:
    shapes = [ProductShape.of(rows, 64, 32, is_gated=False) for rows in (1, 8)]
    choices = {shapes[0]: Config("vector", 16, 128), shapes[1]: None}
    assert decode(encode(choices)) == choices
