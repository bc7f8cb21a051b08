"""A process beside the router, for work that would hold up the router's event loop.

It is started when the first work comes, and again after it has died. It ends by itself when the router has closed its
input. Messages in both directions are MessagePack after their length in four bytes. Each message is answered by one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Generic, TypeVar

import msgspec

MAX_BYTES = 4 << 30  # of address space
MAX_WAIT_S = 20.0  # for an answer, however slow the host

_LEN = 4  # bytes of a message's length
_encode = msgspec.msgpack.Encoder().encode
_A = TypeVar("_A")


class SideProcess(Generic[_A]):
    """The process as the router sees it. One thread at a time may use it.

    `module` is the program, whose `main` calls `serve`. `decoder` reads its answers.
    """

    def __init__(self, module: str, decoder: msgspec.msgpack.Decoder[_A]) -> None:
        self._module = module
        self._decoder = decoder
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Id of the process, None if it does not run."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Let the process end. Another thread may call it; the thread that uses it calls `join` after it."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def join(self) -> None:
        """Wait for the end of the process, and free its pipes."""
        self.end()

    def start(self) -> bool:
        """Start the process if it does not run. Return whether it is a new one, which has been sent nothing."""
        if self._is_closed:
            raise BrokenPipeError("the router is shutting down")
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._process is not None:
            return False
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a broken library says would be of no use in the router's log
        )
        return True

    def ask(self, message: Any) -> _A:
        """Return the answer to a message. Raises OSError if the process has ended, TimeoutError if it is silent."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        data = _encode(message)
        process.stdin.write(len(data).to_bytes(_LEN, "big"))
        process.stdin.write(data)
        process.stdin.flush()
        until = time.monotonic() + MAX_WAIT_S
        size = int.from_bytes(_read(process.stdout, _LEN, until), "big")
        return self._decoder.decode(_read(process.stdout, size, until))

    def end(self) -> int:
        """End the process, if there is one, and return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what it did not take
                stream.close()
        return process.wait()


def _read(stream: IO[bytes], size: int, until: float) -> bytearray:
    """Read exactly `size` bytes. Raises TimeoutError at the time `until`, BrokenPipeError if the process has ended."""
    data, fd = bytearray(), stream.fileno()
    poller = select.poll()  # `select` itself takes no number above 1,023, which a busy router has
    poller.register(fd, select.POLLIN)
    while len(data) < size:
        if not poller.poll(max(0.0, until - time.monotonic()) * 1e3):
            raise TimeoutError
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise BrokenPipeError("the process has ended")
        data += part
    return data


def serve(answer: Callable[[bytes], Any]) -> None:
    """Answer the router until it closes the input. To be called by the `main` of the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the router ends, and so does this process then
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(_LEN)) == _LEN:
        data = _encode(answer(source.read(int.from_bytes(head, "big"))))
        sink.write(len(data).to_bytes(_LEN, "big"))
        sink.write(data)
        sink.flush()
