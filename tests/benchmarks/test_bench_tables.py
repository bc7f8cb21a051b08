"""Reports of the GPU benchmarks as Markdown."""

from __future__ import annotations

from typing import Any

from bench_tables import heading, tables


def engine(**more: Any) -> dict[str, Any]:
    """A report in the form of bench_gpu."""
    return {
        "device": "NVIDIA H200",
        "model": "8b",
        "drafter": None,
        "num_layers": 32,
        "hidden_size": 4096,
        "load_s": 4.5,
        "checked_tokens": 9000,
        "decode": [{"batch": 1, "step_ms": 4.08, "x_floor": 1.16}, {"batch": 3, "step_ms": 4.2, "x_floor": 1.2}],
        "mixed": [{"batch": 8, "longest": 15360, "step_ms": 5.25, "x_floor": 1.251}],
        "prefill": [{"prompts": 1, "tokens": 8192, "tokens_per_s": 39713.2}],
        "offline": [{"total_s": 10.7, "output_tokens_per_s": 6130.0}],
        **more,
    }


def drafted(drafter: str, *, gain: float) -> dict[str, Any]:
    """A report in the form of bench_gpu with a head."""
    rounds = {"batch": 8, "k3_ms": 5.0, "k3_over_plain": 1.2, "k3_tokens_a_round": 2.9, "k3_speedup": gain}
    rounds |= {"k5_ms": 6.0, "k5_over_plain": 1.4, "k5_tokens_a_round": 3.5, "k5_speedup": gain + 0.1}
    adaptive = {"kind": "top_p", "batch": 8, "adaptive_first": gain - 0.1, "adaptive": gain, "least": gain - 0.2}
    return {"model": "8b", "drafter": drafter, "topk": 1, "rounds": [rounds], "adaptive": [adaptive]}


def handoff(devices: list[str], page_size: int) -> dict[str, Any]:
    """A report in the form of bench_handoff."""
    timed = {"tokens": 4096, "s": 0.00216, "gb_s": 248.6}
    rows = [{"transport": "cuda", "checksums": on, "least_s": 0.002, "offer_s": 0.001} | timed for on in (1, 0)]
    rows.append({"transport": "device copy", "checksums": False, "tokens": 4096, "s": 0.00027, "gb_s": 1988.0})
    rows.append({"transport": "checksums alone", "checksums": True, "tokens": 4096, "s": 0.00033, "gb_s": 1626.0})
    return {"devices": devices, "transports": ["cuda"], "page_size": page_size, "handoff": rows}


def system(model: str) -> dict[str, Any]:
    """A report in the form of bench_system."""
    point = {"kind": "greedy", "streams": 16, "tokens_per_s": 9007.4, "ttft_ms_p50": 102.4, "ttft_ms_max": 1151.0}
    point |= {"itl_ms_p50": 1.161, "itl_ms_p99": 3.71, "share": 0.998, "wrong_streams": 0}
    return {"model": model, "system": [point]}


def rows(text: str, corner: str) -> list[list[str]]:
    """Cells of a table, the heading first."""
    (table,) = (each for each in text.split("\n\n") if each.startswith(f"| {corner}"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert all(len(each) == len(cells[0]) for each in cells) and set(cells[1]) == {"---"}, table
    return [cells[0], *cells[2:]]


def test_each_point_stands_beside_the_best_peer() -> None:
    text = tables({"engine-8b": engine()})
    said = "engine-8b: device NVIDIA H200, model 8b, num layers 32, hidden size 4096, load s 4.500, checked tokens 9000"
    assert text.splitlines()[0] == said
    head, first, second = rows(text, "decode step, context")
    assert head == ["decode step, context 1,024", "8b ms", "best peer of 8b ms", "8b of the floor"]
    assert first == ["batch 1", "4.08", "4.74", "1.16"]
    assert second == ["batch 3", "4.20", "", "1.20"]  # a batch that no peer was measured with
    assert rows(text, "decode step, one long")[1] == ["8", "15,360", "5.25", "1.25"]
    assert rows(text, "prefill")[1] == ["1 x 8,192", "39,713", "38,300"]
    assert rows(text, "prefill")[2][1:] == ["6,130", "6,240"]


def test_models_stand_side_by_side() -> None:
    step = {"batch": 1, "step_ms": 0.82, "x_floor": 1.43}
    small = engine(model="1b", num_layers=16, hidden_size=2048, decode=[step], offline=[])
    text = tables({"engine-1b": small, "engine-8b": engine()})
    assert rows(text, "decode step, context")[1] == ["batch 1", "0.82", "1.22", "1.43", "4.08", "4.74", "1.16"]
    assert rows(text, "decode step, context")[2] == ["batch 3", "", "", "", "4.20", "", "1.20"]
    assert len(rows(text, "prefill")) == 3


def test_another_model_has_no_peers() -> None:
    text = tables({"": engine(hidden_size=5120)})
    assert rows(text, "decode step, context")[1] == ["batch 1", "4.08", "1.16"]
    assert rows(text, "prefill")[1] == ["1 x 8,192", "39,713"]


def test_the_tables_show_short_prompts_turns_and_idle_time() -> None:
    short = {"tokens": 1024, "wall_ms": 7.4, "submit_ms": 3.0, "device_ms": 4.0, "kernels_ms": 3.75, "launches": 185.0}
    idle = {"batch": 8, "idle_share": 0.026, "idle_share_between_rounds": 0.004, "longest_gap_us": 5.2}
    turn = {"tokens": 64, "prefix": 15360, "ms": 6.543}
    beside = {"batch": 8, "steps": 0, "tokens": 64, "is_joint": True, "round_ms": 4.2, "chunk_ms": 4.8}
    beside |= {"apart_ms": 9.0, "joint_ms": 5.126}
    parts = {"small-prompts": [short], "idle": [idle], "turns": [turn], "joint": [beside]}
    text = tables({"": engine(**parts)})
    assert rows(text, "a round and a chunk")[1] == ["8b", "8", "0", "64", "4.20", "4.80", "9.00", "5.13", "yes"]
    assert rows(text, "new tokens")[1] == ["64", "15,360", "6.54"]
    assert rows(text, "a short prompt")[1] == ["1,024", "7.40", "3.75"]
    assert rows(text, "idle")[1] == ["8", "0.4%", "2.6%", "5"]


def test_heads_are_rows_of_rounds_and_columns_of_adaptive_drafting() -> None:
    text = tables({"a": drafted("eagle3-0.8", gain=2.3), "b": drafted("eagle3-0.6", gain=1.6)})
    assert rows(text, "a round")[0][2:] == ["K = 3", "K = 5"]
    assert rows(text, "a round")[1:] == [
        ["eagle3-0.8", "8", "1.20: 2.30", "1.40: 2.40"],
        ["eagle3-0.6", "8", "1.20: 1.60", "1.40: 1.70"],
    ]
    assert rows(text, "adaptive")[0][2:] == ["eagle3-0.8", "eagle3-0.6"]
    assert rows(text, "adaptive")[1] == ["top_p", "8", "2.300 (2.200, 2.100)", "1.600 (1.500, 1.400)"]


def test_trees_stand_beside_chains() -> None:
    text = tables({"a": drafted("eagle3-0.8", gain=2.3), "b": drafted("eagle3-0.8", gain=2.0) | {"topk": 3}})
    assert rows(text, "a round")[0][4:] == ["trees of 3 branches, K = 3", "trees of 3 branches, K = 5"]
    assert rows(text, "a round")[1][4:] == ["1.20: 2.00", "1.40: 2.10"]


def test_handoffs_are_rows_by_transport_gpus_and_page_size() -> None:
    text = tables({"one": handoff(["cuda:0"], 64), "two": handoff(["cuda:0", "cuda:1"], 16)})
    head, one, two = rows(text, "handoff")
    assert head[4:8] == ["checksums on ms", "checksums on GB/s", "checksums off ms", "checksums off GB/s"]
    assert one == ["cuda", "1", "64", "4,096", "2.16", "249", "2.16", "249", "0.27", "0.33"]
    assert two[:4] == ["cuda", "2", "16", "4,096"]


def test_the_whole_system_has_a_row_for_each_number_of_streams() -> None:
    text = tables({"a": system("1b"), "b": system("8b")})
    head, one, _ = rows(text, "whole system")
    assert one == ["1b", "greedy", "16", "9,007", "102 / 1,151", "1.16 / 3.7", "1.00"] and len(head) == len(one)


def test_a_report_names_its_date_device_and_commit() -> None:
    assert list(heading("abc")) == ["date", "device", "torch", "commit"] and heading("abc")["commit"] == "abc"
