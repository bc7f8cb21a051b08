"""A measured table comes back from its file as it was written, and a table that is not whole is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
