"""The device of an engine: what follows from its kind, and copies between it and the host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from host_cuda import with_host_cuda

from baton.engine import device as devices
from baton.engine.device import (
    PinnedRows,
    choose_device,
    choose_dtype,
    counted,
    kind_of,
    recorded_event,
    to_device,
    to_host,
)
from baton.metadata.errors import ConfigError

ASKS = re.compile(r"""\bis_cuda\b|\.type\s*[!=]=\s*['"]|\bcaptures\(|torch\.cuda\.is_available""")


@pytest.mark.parametrize(
    ("asked", "device", "stored", "dtype"),
    [
        ("auto", "cpu", "bfloat16", "float32"),
        ("auto", "cuda", "bfloat16", "bfloat16"),
        ("auto", "cuda", "float32", "float32"),
        ("float16", "cpu", "bfloat16", "float16"),
        ("float32", "cuda", "bfloat16", "float32"),
    ],
)
def test_the_dtype_follows_the_device_and_the_checkpoint(asked: Any, device: str, stored: Any, dtype: str) -> None:
    assert choose_dtype(asked, torch.device(device), stored) == dtype


def test_auto_takes_cuda_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert choose_device("auto").type == expected
        assert choose_device("cpu").type == "cpu"


def test_a_device_that_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device("cuda")


def test_a_gpu_is_apart_from_the_host_and_a_cpu_is_not() -> None:
    assert kind_of(torch.device("cuda", 1)).is_apart and not kind_of(torch.device("cpu")).is_apart


def test_few_other_files_ask_for_the_kind_of_a_device() -> None:
    """What differs between devices is a field of `DeviceKind`, or a row of kernels/operations.py."""
    engine = Path(devices.__file__).parent
    lines = [
        f"{path.name}: {line.strip()}"
        for path in engine.rglob("*.py")
        if path != Path(devices.__file__)
        for line in path.read_text().splitlines()
        if ASKS.search(line) and "def " not in line
    ]
    assert len(lines) < 10, "\n".join(lines)


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


class _Elsewhere(torch.Tensor):
    """Numbers on the host that say that they lie on a GPU."""

    device = property(lambda _: CUDA)  # type: ignore[assignment]


class _Pinned(torch.Tensor):
    """Notes how it is copied to a device, which here is the host too."""

    moves: list[tuple[torch.device, bool]]

    def is_pinned(self, *_: Any) -> bool:
        return True

    def to(self, device: torch.device, *, non_blocking: bool) -> torch.Tensor:  # type: ignore[override]
        self.moves.append((device, non_blocking))
        return self.as_subclass(torch.Tensor).clone()


def pinned(tensor: torch.Tensor) -> _Pinned:
    copy = tensor.clone().as_subclass(_Pinned)
    copy.moves = []
    return copy


@pytest.mark.parametrize("device", [CPU, "cpu"])
def test_on_the_host_nothing_is_copied(device: torch.device | str) -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, device) is tensor and to_host(tensor) is tensor
    assert recorded_event(CPU) is None


@pytest.mark.parametrize("device", [CUDA, "cuda:0"])
def test_what_is_pinned_is_copied_as_it_lies(device: torch.device | str) -> None:
    tensor = pinned(torch.arange(3))
    assert to_device(tensor, device).tolist() == [0, 1, 2]
    assert tensor.moves == [(CUDA, True)], "the host must not wait"


def test_of_other_memory_a_pinned_copy_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the caller may write its tensor at once."""
    copies: list[_Pinned] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(pinned(tensor))
        return copies[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    assert to_device(torch.arange(3), CUDA).tolist() == [0, 1, 2]
    assert [each.moves for each in copies] == [[(CUDA, True)]]


def test_a_copy_to_the_host_goes_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = with_host_cuda(monkeypatch)
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    copied: list[bool] = []
    copy_ = torch.Tensor.copy_

    def copying(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append(non_blocking)
        return copy_(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copying)
    host = to_host(tensor.as_subclass(_Elsewhere))
    assert host.dtype == torch.int16 and host.tolist() == tensor.tolist()
    assert cuda.num_pinned == 1 and copied[0], "the host must not wait"


def test_an_event_is_recorded_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = with_host_cuda(monkeypatch)
    with cuda.use(cuda.make_stream()):
        event = recorded_event(CUDA)
    assert event is not None and not event.query()
    assert [(who, what) for who, what, _ in cuda.log] == [("side 1", "records")]


def test_counted_once() -> None:
    assert counted(4, CPU).tolist() == [0, 1, 2, 3] and counted(3, CPU, 5).tolist() == [0, 5, 10]
    assert counted(4, CPU) is counted(4, CPU) and counted(4, CPU).dtype is torch.int64
    assert counted(0, CPU).shape == (0,)


def test_it_serves_in_and_out_of_inference() -> None:
    with torch.inference_mode():
        inside = counted(7, CPU)
    weight = torch.ones(7, requires_grad=True)
    (weight * inside).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == inside.tolist()


class Late:
    """A device that does nothing before somebody waits for it. Events are numbered by the rows given out before."""

    def __init__(self) -> None:
        self.num_taken = self.num_done = 0

    def record(self, _: torch.device) -> LateEvent:
        return LateEvent(self, self.num_taken)


class LateEvent:
    def __init__(self, device: Late, num_before: int) -> None:
        self._device, self._num_before = device, num_before

    def synchronize(self) -> None:
        self._device.num_done = max(self._device.num_done, self._num_before)


@pytest.mark.parametrize("num_rows", [2, 8])
def test_a_row_is_given_out_again_when_the_device_has_read_it(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, num_waits = Late(), 0
    monkeypatch.setattr(devices, "recorded_event", device.record)
    rows, given = PinnedRows(3, torch.device("cpu"), num_rows), dict[int, int]()  # by address: the number of the taking
    for number in range(5 * num_rows):
        before = device.num_done
        row = rows.take()
        num_waits += device.num_done > before
        device.num_taken += 1
        assert row.shape == (3,) and row.data_ptr() % 16 == 0
        assert given.get(row.data_ptr(), -1) < device.num_done, "the device has not read it"
        given[row.data_ptr()] = number
    assert len(given) == num_rows
    assert num_waits == 8, "once per half, from the second turn on"
