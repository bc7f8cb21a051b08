"""Graphs are captured whatever Python's collector would like to do meanwhile."""

from __future__ import annotations

import gc

import torch

from baton.engine.rounds.capture import captured


def test_garbage_does_not_break_a_capture() -> None:
    """A graph that only a cycle holds, as those of a closed node, is freed after a capture and not within."""
    x, pool = torch.ones(4, device="cuda"), torch.cuda.graph_pool_handle()
    others = [captured(lambda: x + 1, torch.cuda.graph_pool_handle())[0]]

    def run() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            cycle = [others.pop()]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
            if gc.isenabled():
                gc.collect()  # as it may come at any allocation
        return x * 3

    graph, result = captured(run, pool)
    assert gc.isenabled() and not others
    gc.collect()
    graph.replay()
    assert result.tolist() == [3, 3, 3, 3]
