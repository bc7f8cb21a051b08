"""The order in which a capture submits work, and when Python may collect garbage. Graphs themselves need a GPU:
tests/gpu/test_capture_cuda.py."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_cuda import HostCuda, with_host_cuda

from baton.engine.rounds import capture
from baton.engine.rounds.capture import captured


class Capture:
    """A function to capture. It notes the stream and the collector of each run, and may fail in one of them."""

    def __init__(self, cuda: HostCuda, *, fails_in: int | None = None) -> None:
        self.cuda, self.fails_in = cuda, fails_in
        self.streams: list[str] = []
        self.collects: list[bool] = []

    def __call__(self) -> int:
        self.streams.append(self.cuda.current.name)
        self.collects.append(gc.isenabled())
        self.cuda.log.append(("run", "waits for", "nothing"))
        if len(self.streams) == self.fails_in:
            raise torch.OutOfMemoryError
        return len(self.streams)


@pytest.fixture
def make_capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Capture]]:
    cuda = with_host_cuda(monkeypatch)
    capture._side_stream.cache_clear()

    @contextlib.contextmanager
    def graph(_: object, pool: object) -> Iterator[None]:
        assert pool == "the pool"
        with cuda.use(cuda.make_stream()):
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "the graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    yield lambda **options: Capture(cuda, **options)
    capture._side_stream.cache_clear()


WARM_RUN = [("side 1", "waits for", "main"), ("run", "waits for", "nothing"), ("main", "waits for", "side 1")]


def test_the_second_run_is_captured_after_the_first_on_a_stream_of_its_own(make_capture: Any) -> None:
    run = make_capture()
    assert captured(run, "the pool") == ("the graph", 2)
    assert run.streams == ["side 1", "side 2"] and run.cuda.log == [*WARM_RUN, WARM_RUN[1]]


def test_first_runs_of_all_captures_share_a_stream(make_capture: Any) -> None:
    """cuBLAS keeps 32 MiB for each stream on some GPUs, and a node captures hundreds of graphs."""
    runs = [make_capture() for _ in range(3)]
    for run in runs:
        captured(run, "the pool")
    assert [run.streams[0] for run in runs] == ["side 1"] * 3


def test_no_garbage_is_collected_while_a_graph_is_captured(make_capture: Any) -> None:
    run = make_capture()
    captured(run, "the pool")
    assert run.collects == [True, False] and gc.isenabled()


def test_a_collector_that_was_off_stays_off(make_capture: Any) -> None:
    gc.disable()
    try:
        captured(make_capture(), "the pool")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_submitted_is_waited_for_also_without_memory(make_capture: Any) -> None:
    """Its kernels still use their inputs, whose memory the caller gives to others."""
    run = make_capture(fails_in=1)
    with pytest.raises(torch.OutOfMemoryError):
        captured(run, "the pool")
    assert run.cuda.log == WARM_RUN and run.cuda.current.name == "main"


def test_a_capture_that_fails_switches_the_collector_on_again(make_capture: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        captured(make_capture(fails_in=2), "the pool")
    assert gc.isenabled()
