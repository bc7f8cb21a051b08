"""S8 for DeepSeek-V4: keys of windows, inputs of entries, entries and index keys stand at their positions.

Each defect is put in once, and the text changes: rows one token off, rows and entries of rejected drafts that stay, an
unfinished window that is not handed over, tail pages of the request before, and one wrong number on the wire."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import STREAM_MTP, target_of
from node_pair import NodePair, node_pairs, params
from solo import Solo, caught, coach
from thinned import thinned
from ties import Reference
from torch import Tensor

from baton.engine.attention.compressed import KV, EntryPool
from baton.engine.attention.gathered_entries import GatheredEntries
from baton.engine.attention.pool_rows import NewRows, PoolRows
from baton.engine.checkpoint.model_config import ENTRY_POOLS, WINDOW_POOL
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.schema.schema import pools
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.transports.base import Landed
from baton.metadata.handoff.transports.local import LocalTransport
from baton.metadata.wire.request import Unit

PAGE_SIZE = RATE = 4
NUM_TOKENS = 18
ENTRIES, INPUTS = zip(*ENTRY_POOLS.values(), strict=True)  # names of pools


def prompt(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(1, 512), k=num_tokens)


class Text:
    """Texts of one process and of pairs of nodes, and those of transformers."""

    def __init__(self, model: Path) -> None:
        self.model, self._reference, self._known = model, Reference(model), dict[int, list[int]]()
        self._solo = Solo(model, speculative="mtp", draft_steps=8, num_pages=3000)

    def right(self, length: int) -> list[int]:
        """Return the text of transformers after a prompt of this length."""
        if length not in self._known:
            self._known[length] = self._reference.generate(prompt(length), NUM_TOKENS)
        return self._known[length]

    def of_rounds(self, length: int, num_steps: int) -> list[int]:
        """Return the text of one process. Rounds accept none, some or all of their drafts."""
        told = {0: prompt(length) + self.right(length)}
        with pytest.MonkeyPatch.context() as patch:
            coach(patch, told, lambda _, position: position % 7 not in (2, 3))
            sequence = self._solo.start(prompt(length), params(NUM_TOKENS), chunk=15)
            text = self._solo.run(sequence, NUM_TOKENS, num_steps)
        assert len(set(sequence.num_accepted)) > 1, sequence.num_accepted
        return text

    def of_nodes(self, *lengths: int, begin: Callable[[NodePair], object] = id, **both: Any) -> list[list[int] | str]:
        """Return the texts that a pair of nodes gives one after the other, or why they failed. `begin` is called with
        the pair first."""
        both = {"page_size": PAGE_SIZE, "num_pages": 100, "chunk_tokens": 64, "transport": "local", **both}
        with node_pairs() as start:
            pair = start(self.model, prefill=both, decode=both)
            begin(pair)
            for length in lengths:
                pair.submit(f"{length}", prompt(length), params(NUM_TOKENS))
                pair.run()
            results = [pair.results[f"{length}", 0] for length in lengths]
        return [each.ids if each.failed is None else str(each.failed) for each in results]


@pytest.fixture(scope="module")
def text(checkpoint: Callable[..., Path]) -> Text:
    return Text(target_of(STREAM_MTP, checkpoint))


@contextmanager
def patched(owner: Any, name: str, changed: Callable[..., Any]) -> Iterator[None]:
    """Let a method be `changed`, which is given the usual one first."""
    usual = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args: changed(usual, *args))
        yield


@pytest.mark.parametrize(
    ("length", "num_steps"), thinned(itertools.product([43, 44], [4, 6, 8]), lambda i, *_: i in (0, 5))
)
def test_drafts_that_end_windows_give_the_text_of_transformers(length: int, num_steps: int, text: Text) -> None:
    assert text.of_rounds(length, num_steps) == text.right(length)


# --- one token off ---


@pytest.mark.parametrize("pool", thinned([KV, *INPUTS], lambda _, pool: pool in (KV, "index_inputs")))
def test_rows_one_token_off_are_caught(pool: str, text: Text) -> None:
    """The defect: rows that were stored by an earlier forward are read one token too early."""

    def early(usual: Any, rows: PoolRows, name: str, place: int, pages: Tensor, first: int, stop: int) -> Tensor:
        off = 1 if name == pool and first > 0 else 0
        return usual(rows, name, place, pages, first - off, stop - off)

    with patched(PoolRows, "read", early), caught():
        assert text.of_rounds(43, 4) == text.right(43)


@pytest.mark.parametrize("pool", thinned(ENTRIES, lambda _, pool: pool == "heavy_entries"))
def test_entries_one_window_off_are_caught(pool: str, text: Text) -> None:
    def early(usual: Any, context: Any, entries: EntryPool, new: NewRows) -> Tensor:
        found = usual(context, entries, new)
        return torch.cat([found[:1], found[:-1]]) if entries.entries == pool else found

    with patched(GatheredEntries, "entries", early), caught():
        assert text.of_rounds(43, 4) == text.right(43)


# --- drafts that are rejected ---


@pytest.mark.parametrize("pool", thinned([KV, *INPUTS], lambda _, pool: pool == "sparse_inputs"))
def test_a_row_of_a_rejected_draft_that_stays_is_caught(pool: str, text: Text) -> None:
    """The defect: a slot that a draft has written is not written by the token that takes its place."""
    written = set[tuple[int, ...]]()

    def once(usual: Any, rows: PoolRows, name: str, place: int, *values: Any) -> None:
        if name != pool:
            return usual(rows, name, place, *values)
        layer, (pages, slots) = rows.pools[name][place], rows.slots
        if pool != KV:  # `write` writes the rows of one sequence
            slots = torch.arange(values[1], values[1] + len(values[2]))
            pages, slots = values[0][slots // PAGE_SIZE], slots % PAGE_SIZE
        before = layer[pages, :, :, slots].clone()
        usual(rows, name, place, *values)
        for row, at in enumerate(zip(pages.tolist(), slots.tolist(), strict=True)):
            if (layer.data_ptr(), *at) in written:
                layer[at[0], :, :, at[1]] = before[row]
            written.add((layer.data_ptr(), *at))
        return None

    with patched(PoolRows, "store" if pool == KV else "write", once), caught():
        assert text.of_rounds(43, 4) == text.right(43)


@pytest.mark.parametrize(
    ("pool", "num_steps"),
    thinned([(pool, num_steps) for pool in ENTRIES for num_steps in (4, 6, 8)], lambda i, *_: i == 4),
)
def test_an_entry_of_rejected_drafts_that_stays_is_caught(pool: str, num_steps: int, text: Text) -> None:
    """The defect: an entry that drafts have made is not made again (SGLang 33872)."""
    made = set[tuple[int, int]]()

    def once(usual: Any, context: Any, entries: EntryPool, new: NewRows, windows: Tensor, values: Tensor) -> None:
        whole, places = context._entry_places(entries, new, windows)
        keys = [(whole.data_ptr(), place) for place in places.tolist()]
        fresh = torch.tensor([entries.entries != pool or key not in made for key in keys])
        made.update(keys)
        usual(context, entries, new, windows[fresh], values[fresh])

    with patched(GatheredEntries, "_store_entries", once), caught():
        assert text.of_rounds(45, num_steps) == text.right(45)


# --- between nodes ---


@pytest.mark.parametrize("residue", thinned(range(RATE), lambda _, residue: residue == 3))
def test_an_unfinished_window_that_is_not_handed_over_is_caught(residue: int, text: Text) -> None:
    """The defect: prefill hands over the inputs of whole windows alone. Where a prompt ends with a window, it goes
    unseen; of three tokens more, the first token of a round ends the window (vLLM 55927)."""
    length = 40 + residue
    assert text.of_nodes(length) == [text.right(length)]

    def whole_windows(
        usual: Any, rows: PoolRows, name: str, place: int, pages: Tensor, first: int, stop: int
    ) -> Tensor:
        read = usual(rows, name, place, pages, first, stop)
        if name in INPUTS and rows.batches[0].num_tokens < length:  # a round
            read[max(0, length - residue - first) : max(0, length - first)] = 0.0
        return read

    with patched(PoolRows, "read", whole_windows):
        found = text.of_nodes(length)
    assert (found == [text.right(length)]) == (residue == 0)


def test_tail_pages_of_the_request_before_are_caught(text: Text) -> None:
    """The defect: tail pages are not moved, so that the decode node reads what the last request has left there
    (SGLang 24878)."""
    lengths = (43, 46)
    right = [text.right(each) for each in lengths]

    def unmoved(usual: Any, transport: LocalTransport, max_bytes: int) -> Iterator[Landed]:
        tails = [memory for memory in transport.memory if memory.first]
        before = [memory.pages.copy() for memory in tails]
        for landed in usual(transport, max_bytes):
            for memory, pages in zip(tails, before, strict=True):
                memory.pages[:] = pages
            yield landed

    with patched(LocalTransport, "step", unmoved):
        assert text.of_nodes(*lengths, checksums=False)[1] not in (right[1], *right)


WIRE = ("target", *(f"target.{name}" for name in (*ENTRIES[1:], *INPUTS, WINDOW_POOL)))  # the first has the index keys


@pytest.mark.parametrize("name", thinned(WIRE, lambda _, name: name == "target.heavy_sums"))
def test_one_wrong_number_on_the_wire_is_found(name: str, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of a row changes behind its page's checksum. The request ends with an error that names the page."""
    offer, flipped, found = HandoffServer.offer, list[int](), list[PageMemory]()

    def find(pair: NodePair) -> None:
        engine = pair.prefill.prompts.engine
        found.append(engine.memory[list(pools(engine.schema)).index(name)])

    def offered(self: HandoffServer, unit: Unit, indices: Any, pages: Any, *rest: Any) -> None:
        offer(self, unit, indices, pages, *rest)
        [memory] = found
        for page in pages:
            if not flipped and memory.holds(page):
                flipped.append(page)
                memory.pages[-1, page - memory.first, 5] ^= 0x40

    monkeypatch.setattr(HandoffServer, "offer", offered)
    [message] = text.of_nodes(43, begin=find)
    assert flipped and "checksum" in str(message), message
