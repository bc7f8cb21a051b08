"""A measured table comes back from its file as it was written, and a table that is not whole is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_shapes import COLUMNS, load_rows
from figures import read_figure, write_figure


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [["8B", 3.8, None], ["1B", 1, "-"]]
    fields = {"method": "python bench.py", "unit": "ms", "device": "H200", "commit": "0ac1f00d"}
    path = write_figure(tmp_path, "step", columns=["model", "batch 1", "batch 8"], rows=rows, **fields)
    figure = read_figure(path)
    assert path.name == "step.json" and figure.name == "step" and figure.rows == (("8B", 3.8, None), ("1B", 1, "-"))
    assert (figure.device, figure.commit, figure.unit) == ("H200", "0ac1f00d", "ms")
    assert len(path.read_text().splitlines()) == 13  # one line per field and row


def test_the_commit_and_the_device_are_found(tmp_path: Path) -> None:
    figure = read_figure(write_figure(tmp_path, "a", method="", unit="", columns=["x"], rows=[]))
    assert figure.commit and figure.device and figure.date.count("-") == 2


def test_a_table_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row \(1,\) has 1 cells for 2 columns"):
        write_figure(tmp_path, "a", method="", unit="", columns=["x", "y"], rows=[[1]])
    (tmp_path / "b.json").write_text(json.dumps({"name": "b"}))
    with pytest.raises(ValueError, match=r"fields \['name'\], but a figure has \['columns', 'commit'"):
        read_figure(tmp_path / "b.json")


def test_the_loads_of_all_shapes_are_one_table(tmp_path: Path) -> None:
    found = {"rate": 3.846, "ttft_ms_p50": 104.123, "goodput_200_12": 1.9, "local_share": 0.25}
    for shape in ("never", "auto"):
        (tmp_path / f"{shape}-4096.json").write_text(json.dumps([found]))
    rows = load_rows(tmp_path, ["never", "auto"], ["4096"])
    write_figure(tmp_path, "loads", method="", unit="ms", columns=COLUMNS, rows=rows)
    assert [row[:4] for row in rows] == [["never", "4096", 3.85, 104.12], ["auto", "4096", 3.85, 104.12]]
    assert rows[0][COLUMNS.index("good/s at 200 / 12")] == 1.9 and rows[0][-1] == 0.25
