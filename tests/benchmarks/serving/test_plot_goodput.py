"""The chart of goodput over rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from plot_goodput import curves, draw

AUTO = [
    {"rate": 4.0, "goodput_200_12": 3.0, "goodput_500_8": 4.0},
    {"rate": 2.0, "goodput_200_12": 2.0, "goodput_500_8": 1.0},
]
NEVER = [{"rate": 2.1, "goodput_200_12": 1.0, "goodput_500_8": 0.5}]


def test_each_slo_has_a_panel_and_each_file_a_line() -> None:
    assert curves({"auto": AUTO, "never": NEVER}) == {
        "ttft at most 200 ms, tpot 12 ms": {"auto": [(2.0, 2.0), (4.0, 3.0)], "never": [(2.1, 1.0)]},
        "ttft at most 500 ms, tpot 8 ms": {"auto": [(2.0, 1.0), (4.0, 4.0)], "never": [(2.1, 0.5)]},
    }


def test_files_with_other_slos_are_refused() -> None:
    with pytest.raises(ValueError, match=r"never has goodput for \['goodput_9_9'\].*the same --slo"):
        curves({"auto": AUTO, "never": [{"rate": 1.0, "goodput_9_9": 1.0}]})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_the_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it is not among the dependencies of the tests")
    draw(curves({"auto": AUTO, "never": NEVER}), tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
