"""The process that compiles grammars for the router.

A hostile grammar can take any amount of time and memory, and can break the compiler. So it is compiled here: the kernel
ends the process when a grammar takes more than MAX_CPU_S of the processor, and refuses it more than MAX_BYTES. The
process ends by itself when the router has closed its input.

Messages in both directions are MessagePack after their length in four bytes. The router sends a LoadTokenizer, or a
ConvertSource for a tokenizer that it has sent before. The answer to each is a Grammar or a GrammarFault.
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
from typing import IO

import llguidance
import msgspec

from .grammar import Grammar, GrammarFault, GrammarSource, converted

MAX_CPU_S = 0.5  # seconds of the processor per grammar
MAX_BYTES = 4 << 30  # of address space
MAX_WAIT_S = 20.0  # for an answer, however slow the host
MAX_TOKENIZERS = 8

_LEN = 4  # bytes of a message's length


class LoadTokenizer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read a tokenizer: the contents of tokenizer.json, the number of logits, and the tokens that end a text."""

    name: str
    data: bytes
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class ConvertSource(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """ConvertSource a source for the tokenizer that was loaded under a name."""

    name: str
    source: GrammarSource


_asked = msgspec.msgpack.Decoder(LoadTokenizer | ConvertSource)
_answered = msgspec.msgpack.Decoder(Grammar | GrammarFault)
_encode = msgspec.msgpack.Encoder().encode


class GrammarProcess:
    """The process as the router sees it: started when the first grammar comes, and again after it has died. One
    thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()  # names of tokenizers
        self._is_closed = False

    def convert(self, load: LoadTokenizer, source: GrammarSource) -> Grammar | GrammarFault:
        """Return the grammar of a source for a tokenizer, or why it is refused."""
        try:
            process = self._running()
            if load.name not in self._loaded:
                answer = self._ask(process, load)
                if isinstance(answer, GrammarFault):
                    return answer
                self._loaded.add(load.name)
            return self._ask(process, ConvertSource(load.name, source))
        except (OSError, TimeoutError):
            return GrammarFault(_last_words(self._end()))

    @property
    def pid(self) -> int | None:
        """Id of the process, None if it does not run."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Let the process end. Another thread may call it; the thread of `convert` calls `join` after it."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def join(self) -> None:
        """Wait for the end of the process, and free its pipes."""
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise BrokenPipeError("the router is shutting down")
        if self._process is not None and (self._process.poll() is not None or len(self._loaded) >= MAX_TOKENIZERS):
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what a broken compiler says would be of no use in the router's log
            )
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], message: LoadTokenizer | ConvertSource) -> Grammar | GrammarFault:
        assert process.stdin is not None and process.stdout is not None
        data = _encode(message)
        process.stdin.write(len(data).to_bytes(_LEN, "big") + data)
        process.stdin.flush()
        until = time.monotonic() + MAX_WAIT_S
        size = int.from_bytes(_read(process.stdout, _LEN, until), "big")
        return _answered.decode(_read(process.stdout, size, until))

    def _end(self) -> int:
        """End the process, if there is one, and return its exit status."""
        process, self._process = self._process, None
        self._loaded.clear()
        if process is None:
            return 0
        process.kill()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what it did not take
                stream.close()
        return process.wait()


def _read(stream: IO[bytes], size: int, until: float) -> bytes:
    """Read exactly `size` bytes. Raises TimeoutError at the time `until`, BrokenPipeError if the process has ended."""
    data, fd = b"", stream.fileno()
    poller = select.poll()  # `select` itself takes no number above 1,023, which a busy router has
    poller.register(fd, select.POLLIN)
    while len(data) < size:
        if not poller.poll(max(0.0, until - time.monotonic()) * 1e3):
            raise TimeoutError
        part = os.read(fd, size - len(data))
        if not part:
            raise BrokenPipeError("the process has ended")
        data += part
    return data


def _last_words(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {MAX_CPU_S:g} s to compile; make it smaller"
    return "takes too much time or memory to compile; make it smaller"


def main() -> None:
    """Answer the router until it closes the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the router ends, and so does this process then
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    tokenizers: dict[str, llguidance.LLTokenizer] = {}
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(_LEN)) == _LEN:
        data = _encode(_answer(_asked.decode(source.read(int.from_bytes(head, "big"))), tokenizers))
        sink.write(len(data).to_bytes(_LEN, "big") + data)
        sink.flush()


def _answer(
    message: LoadTokenizer | ConvertSource, tokenizers: dict[str, llguidance.LLTokenizer]
) -> Grammar | GrammarFault:
    if isinstance(message, LoadTokenizer):
        try:
            tokenizers[message.name] = llguidance.LLTokenizer(
                message.data.decode(), n_vocab=message.vocab_size, eos_token=list(message.eos_token_ids)
            )
        except Exception as error:  # whatever llguidance raises for a tokenizer that it does not know
            return GrammarFault(f"cannot be used with this model's tokenizer: {str(error).partition(chr(10))[0][:200]}")
        return Grammar("")
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
    try:
        return converted(message.source, tokenizers[message.name])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
