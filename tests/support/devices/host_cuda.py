"""torch.cuda on a machine without a GPU: streams and events that keep a log, and tensors that stay on the host.

Work of torch is done at once, as on any CPU. So a test sees the order of what is submitted, and which stream waits for
which event. `with_host_cuda(monkeypatch)` puts it in the place of torch's own functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class HostStream:
    def __init__(self, cuda: HostCuda, name: str, priority: int = 0) -> None:
        self._cuda, self.name, self.priority = cuda, name, priority
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def __repr__(self) -> str:
        return self.name

    def wait_event(self, event: HostEvent) -> None:
        self._cuda.log.append((self.name, "waits for", event.name))

    def wait_stream(self, stream: HostStream) -> None:
        self._cuda.log.append((self.name, "waits for", stream.name))

    def synchronize(self) -> None:
        self._cuda.log.append(("host", "waits for", self.name))


class HostEvent:
    """An event, named after the stream that has recorded it. It happens when the test says so, or when the host waits
    for it."""

    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda
        self.name = "unrecorded"
        self.has_happened = False

    def record(self, stream: HostStream | None = None) -> None:
        self._cuda.num_events += 1
        self.name = f"{stream or self._cuda.current} {self._cuda.num_events}"
        self.has_happened = False
        self._cuda.log.append((str(stream or self._cuda.current), "records", self.name))

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        self._cuda.log.append(("host", "waits for", self.name))
        self.has_happened = True

    def elapsed_time(self, later: HostEvent) -> float:
        """Return a time that is no time of this machine, milliseconds."""
        return 2.0


class HostCuda:
    """The state of a process with one device: the current stream, and the log of what waits for what."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []  # (who, "waits for" or "records", a stream or an event)
        self.num_events = self.num_streams = self.num_pinned = 0
        self.current = HostStream(self, "main")

    def make_stream(self, device: Any = None, priority: int = 0) -> HostStream:
        self.num_streams += 1
        return HostStream(self, f"side {self.num_streams}", priority)

    def pin(self, address: int, num_bytes: int, flags: int) -> int:
        """Count memory that is pinned. Return CUDA's number of success."""
        del address, num_bytes, flags
        self.num_pinned += 1
        return 0

    @contextlib.contextmanager
    def use(self, stream: HostStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def with_host_cuda(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    """Replace torch's streams, events, device guards and pinned memory until the test ends."""
    cuda, empty = HostCuda(), torch.empty

    def empty_of_host(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        cuda.num_pinned += pin_memory
        return empty(*args, **options)

    replaced: dict[str, Any] = {
        "Stream": cuda.make_stream,
        "Event": lambda **_: HostEvent(cuda),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=cuda.pin, cudaHostUnregister=lambda address: None),
        "stream": cuda.use,
        "current_stream": lambda device=None: cuda.current,
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: cuda.log.append(("host", "waits for", "device")),
        "get_device_properties": lambda device: SimpleNamespace(uuid="GPU-of-the-host"),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", empty_of_host)
    return cuda
