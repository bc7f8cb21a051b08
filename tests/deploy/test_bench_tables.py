"""The report of bench_gpu as Markdown."""

from __future__ import annotations

from typing import Any

from baton.deploy.bench_tables import tables


def report(**more: Any) -> dict[str, Any]:
    return {
        "model": "8b",
        "num_layers": 32,
        "hidden_size": 4096,
        "load_s": 4.5,
        "decode": [{"batch": 1, "step_ms": 4.08}, {"batch": 3, "step_ms": 4.2}],
        "prefill": [{"prompts": 1, "tokens": 8192, "tokens_per_s": 39713.2}],
        "offline": {"total_s": 10.7, "output_tokens_per_s": 6130.0},
        **more,
    }


def rows(text: str, part: str) -> list[list[str]]:
    """Cells of a part's table, the heading first."""
    lines = text.split(f"**{part}**\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(each) == len(cells[0]) for each in cells) and set(cells[1]) == {"---"}, lines
    return [cells[0], *cells[2:]]


def test_points_stand_beside_the_best_peers() -> None:
    text = tables(report())
    assert text.splitlines()[0] == "model 8b, num_layers 32, hidden_size 4096, load_s 4.500"
    head, first, second = rows(text, "decode")
    assert head == ["batch", "step ms", "best peer", "of best peer"]
    assert first == ["1", "4.080", "4.740", "0.861"]
    assert second == ["3", "4.200", "", ""]  # a batch that no peer was measured with
    assert rows(text, "prefill")[1] == ["1", "8192", "39,713", "38,300", "1.037"]
    assert rows(text, "offline")[1] == ["10.700", "6,130", "6240", "0.982"]


def test_another_model_has_no_peers() -> None:
    text = tables(report(hidden_size=5120, rounds=[{"batch": 8, "k3_speedup": 2.0}]))
    assert rows(text, "decode")[1] == ["1", "4.080"]
    assert rows(text, "rounds") == [["batch", "k3 speedup"], ["8", "2.000"]]
