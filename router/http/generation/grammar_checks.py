"""Checks of the grammars that requests ask for. Each is compiled once, in another process, and remembered."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from functools import partial

import xxhash

from ....metadata.errors import RequestError, Unavailable
from ...fair_turns import FairTurns
from ...nodes.node import NodeGroup
from ...placement.needs import GRAMMAR_PROTOCOL
from ...text.grammar import Grammar, GrammarFault, GrammarSource
from ...text.grammar_process import GrammarProcess, LoadTokenizer

MAX_WAITING = 64  # grammars of one caller that wait for the process
MAX_KEPT = 256  # grammars that are remembered
MAX_KEPT_CHARACTERS = 16 << 20  # of their texts, all together

_Verdict = Grammar | GrammarFault


class GrammarChecks:
    """Grammars of all requests of one router. The process and its thread start when the first grammar comes."""

    def __init__(self) -> None:
        self._process = GrammarProcess()
        self._turns = FairTurns("grammars", 1, MAX_WAITING)
        self._running: dict[str, asyncio.Future[_Verdict]] = {}
        self._known: OrderedDict[str, _Verdict] = OrderedDict()
        self._num_characters = 0  # of the texts in _known

    async def checked(self, source: GrammarSource, group: NodeGroup, place: str, owner: str = "") -> str:
        """Return the text of a grammar that the group's nodes will compile. `place`: the path of the source in the
        body, such as `response_format.json_schema.schema`. `owner`: whose it is, as a refusal names it.

        Raises RequestError that names the part at fault, Overloaded if too many grammars of the caller wait, and
        Unavailable if the nodes know no grammars.
        """
        if not any(node.protocol >= GRAMMAR_PROTOCOL for node in group.nodes.values()):
            raise Unavailable(f"{place}: the model's nodes are of an earlier release, which knows no grammars")
        if not group.card.eos_token_ids:
            raise RequestError(f"{place}: the model names no token that ends a text", param=_field(place))
        verdict = await self._verdict(source, group)
        if isinstance(verdict, GrammarFault):
            whose = f" ({owner})" if owner else ""
            raise RequestError(f"{place}{verdict.place}: {verdict.words}{whose}", param=_field(place))
        return verdict.text

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._turns.close(self._process.join)

    async def _verdict(self, source: GrammarSource, group: NodeGroup) -> _Verdict:
        eos = group.card.eos_token_ids
        name = f"{group.key.tokenizer}:{group.card.vocab_size}:{eos}"
        options = f"{source.is_loose} {source.whitespace!r} {len(source.frame)}"
        parts = "\n".join((name, source.kind, options, source.frame, source.text))
        digest = xxhash.xxh3_128_hexdigest(parts.encode("utf-8", "surrogatepass"))
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        running = self._running.get(digest)
        if running is None:
            assert group.tokenizer is not None, "a group that can serve has its tokenizer"
            load = LoadTokenizer(name, group.tokenizer.data, group.card.vocab_size, tuple(eos))
            convert = partial(self._process.convert, load, source)
            running = self._running[digest] = asyncio.ensure_future(self._turns.run(convert))
            running.add_done_callback(lambda done: self._learn(digest, done))
        return await asyncio.shield(running)  # others may wait for it as well

    def _learn(self, digest: str, done: asyncio.Future[_Verdict]) -> None:
        del self._running[digest]
        if done.cancelled() or done.exception() is not None:
            return
        verdict = self._known[digest] = done.result()
        self._num_characters += _num_characters(verdict)
        while len(self._known) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
            _, oldest = self._known.popitem(last=False)
            self._num_characters -= _num_characters(oldest)


def _num_characters(verdict: _Verdict) -> int:
    return len(verdict.text) if isinstance(verdict, Grammar) else len(verdict.words) + len(verdict.place)


def _field(place: str) -> str:
    """Return the field of the body in which a path begins."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]
