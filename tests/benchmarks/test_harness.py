"""The frame of the benchmarks: rows become a table and one file, and subjects take turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import alternate, columns_of, flags, heading, ratio, report, table, tables

ROWS = [{"streams": 1, "Baton": 1137.2}, {"streams": 8, "Baton": 4086.0, "note": "a"}]


def test_rows_are_one_table_with_the_columns_of_all() -> None:
    assert columns_of(ROWS) == ["streams", "Baton", "note"]
    assert table(ROWS).splitlines() == [
        "| streams | Baton | note |",
        "| --- | --- | --- |",
        "| 1 | 1,137 |  |",
        "| 8 | 4,086 | a |",
    ]


def test_a_report_is_printed_and_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = flags("words", rounds=3).parse_args(["--json", str(tmp_path / "found.json"), "--commit", "abc"])
    assert options.rounds == 3
    assert report(options, "some", iter(ROWS), unit="tokens/s", about={"model": "demo"}) == ROWS
    written = json.loads((tmp_path / "found.json").read_text())
    assert (written["commit"], written["model"], written["rows"]) == ("abc", "demo", ROWS)
    assert capsys.readouterr().out.startswith("streams 1, Baton 1,137\n")


def test_parts_of_several_reports_are_one_table_each() -> None:
    steps = {
        "1b": {"model": "1b", "decode": [{"batch": 1, "ms": 0.82}]},
        "8b": {"model": "8b", "decode": [{"batch": 1, "ms": 4.0}]},
    }
    text = tables(steps | {"other": {"rates": [{"kinds": {"top_p": 0.5}}]}})
    assert text.splitlines()[0] == "1b: model 1b"
    assert "| decode | batch | ms |\n| --- | --- | --- |\n| 1b | 1 | 0.82 |\n| 8b | 1 | 4 |" in text
    assert "| other | top_p: 0.5 |" in text


def test_a_report_names_its_date_device_and_commit() -> None:
    assert set(heading("abc")) == {"date", "device", "torch", "commit"} and heading("abc")["commit"] == "abc"


def test_subjects_take_turns_and_warm_ups_do_not_count() -> None:
    calls: list[tuple[str, int]] = []

    def subject(name: str, seconds: float) -> object:
        def measured(number: int) -> float:
            calls.append((name, number))
            return seconds * (number + 1)

        return measured

    found = alternate({"ours": subject("ours", 1.0), "theirs": subject("theirs", 3.0)}, rounds=2)  # type: ignore[dict-item]
    assert calls == [(name, number) for number in range(3) for name in ("ours", "theirs")]
    assert found == {"ours": [2.0, 3.0], "theirs": [6.0, 9.0]}
    assert ratio(found["theirs"], found["ours"]) == 3.0
