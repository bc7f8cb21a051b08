"""The process that compiles grammars for the router.

A hostile grammar can take any amount of time and memory, and can break the compiler. So it is compiled here: the kernel
ends the process when a grammar takes more than MAX_CPU_S of the processor, and refuses it more memory than a process
beside the router may have (side_process.py).

The router sends a LoadTokenizer, or a ConvertSource for a tokenizer that it has sent before. The answer to each is a
Grammar or a GrammarFault.
"""

from __future__ import annotations

import signal
from typing import TypeAlias

import llguidance
import msgspec

from ...metadata.errors import Unavailable
from .grammar import Grammar, GrammarFault, GrammarSource, converted
from .side_process import SideProcess, serve

MAX_CPU_S = 0.5  # seconds of the processor per grammar
MAX_TOKENIZERS = 8


class LoadTokenizer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read a tokenizer: the contents of tokenizer.json, the number of logits, and the tokens that end a text."""

    name: str
    data: bytes
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class ConvertSource(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Convert a source for the tokenizer that was loaded under a name."""

    name: str
    source: GrammarSource


_asked = msgspec.msgpack.Decoder(LoadTokenizer | ConvertSource)
_Answer: TypeAlias = Grammar | GrammarFault


class GrammarProcess(SideProcess[_Answer]):
    """The process as the router sees it."""

    def __init__(self) -> None:
        super().__init__(__name__, msgspec.msgpack.Decoder(Grammar | GrammarFault))
        self._loaded: set[str] = set()  # names of tokenizers

    def convert(self, load: LoadTokenizer, source: GrammarSource) -> Grammar | GrammarFault:
        """Return the grammar of a source for a tokenizer, or why it is refused. Raises Unavailable if the process does
        not come to compile it."""
        try:
            if len(self._loaded) >= MAX_TOKENIZERS:
                self.end()
            if self.start():
                self._loaded.clear()
            if load.name not in self._loaded:
                answer = self._load(load)
                if isinstance(answer, GrammarFault):
                    return answer
                self._loaded.add(load.name)
            return self.ask(ConvertSource(load.name, source))
        except (OSError, TimeoutError):
            return GrammarFault(_last_words(self.end()))

    def _load(self, load: LoadTokenizer) -> Grammar | GrammarFault:
        try:
            return self.ask(load)
        except (OSError, TimeoutError):
            status = self.end()
            raise Unavailable(
                f"the process that compiles grammars ended with status {status} before it had read the tokenizer; see "
                f"that `python -m {__name__}` starts on the router's host, and send the request again"
            ) from None


def _last_words(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {MAX_CPU_S:g} s to compile; make it smaller"
    return "takes too much time or memory to compile; make it smaller"


def main() -> None:
    """Answer the router until it closes the input."""
    tokenizers: dict[str, llguidance.LLTokenizer] = {}
    serve(lambda data: _answer(_asked.decode(data), tokenizers))


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
