"""Grammars limit the next tokens of a request.

A grammar is a text that llguidance compiles (https://github.com/guidance-ai/llguidance: Lark, regular expressions and
JSON schemas). It binds the generated tokens, not the prompt. The allowed tokens depend on the tokenizer, so a node
reads the tokenizer of its checkpoint. Every process that samples tokens of a request has a matcher for it. The same
tokens give the same masks in all processes.

A mask is a row of bits, 1 for an allowed token: token i is bit i % 32 of word i // 32.

In a round with grammars the host waits for the drafts (rounds/round.py). The round before is done by then, so the
matchers first advance by its tokens. Then they fill the masks of all drafts, while the device verifies the drafts
(`RoundMasks`).
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeAlias

import llguidance
import numpy as np
import torch
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from numpy.typing import NDArray
from torch import Tensor

from ...metadata.wire.request import MAX_STEP_ITEMS
from ..background import begin
from ..checkpoint.tokenizer_file import tokenizer_bytes
from .state import SamplingState

logger = logging.getLogger(__name__)

Mask: TypeAlias = NDArray[np.int32]  # [..., ceil(vocab_size / 32)]
MAX_COMPILED = 64  # originals that are kept, with what their masks have taught them
MOST_ORIGINALS = min(8, os.cpu_count() or 1)  # of one grammar


class Matcher:
    """Follows the generated tokens of one sequence. If it takes too much work to go on, or if llguidance does not take
    the grammar, the matcher is broken for good."""

    def __init__(self, following: llguidance.LLMatcher | None, state: SamplingState) -> None:
        """`following`: at the beginning of the text, for this matcher alone; None: the matcher is broken."""
        params = state.params
        self._following = following
        self._num_generated = 0
        self._min_tokens = params.min_tokens
        self._stop_ids = [each for each in params.stop_ids if each < state.vocab_size]

    @property
    def is_broken(self) -> bool:
        return self._following is None or self._following.is_error()

    @property
    def following(self) -> llguidance.LLMatcher:
        """The matcher of llguidance, which this one wraps. It exists unless this one is broken."""
        assert self._following is not None
        return self._following

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were generated. Those behind the end of the text are left out."""
        self._num_generated += len(token_ids)
        for token_id in token_ids:
            if self.is_broken or self.following.is_stopped():
                return
            self.following.consume_token(token_id)

    def ban_stops(self, mask: Mask, num_ahead: int) -> None:
        """Clear the tokens in `mask` [num_words] that would end the request before `min_tokens` are there, of the token
        that comes `num_ahead` tokens later than the next. If no other is allowed, they stay: a grammar may end."""
        if not self._stop_ids or self._num_generated + num_ahead >= self._min_tokens:
            return
        others = mask.view(np.uint32).copy()
        for token_id in self._stop_ids:
            others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if others.any():
            mask[:] = others.view(np.int32)


class DraftChain(NamedTuple):
    """The next token of a sequence and drafts after it, one row of masks for each: node 0 is the next token, and node
    i + 1 the one after draft i."""

    matcher: Matcher
    row: int  # of masks, of node 0
    drafts: Sequence[int] = ()


class Originals:
    """Matchers at the beginning of one grammar's text, from which those of sequences are copied.

    Copies of one original share what they learn, behind a lock. So their masks are filled one after the other, and
    those of several originals at the same time. Each request that comes, and each copy, brings one more original, up to
    MOST_ORIGINALS: a grammar of a single sequence is compiled once."""

    def __init__(self, compile_one: Callable[[], llguidance.LLMatcher | None]) -> None:
        self._compile_one = compile_one
        self._coming: list[Future[llguidance.LLMatcher | None]] = []
        self._num_copies = 0

    @property
    def num_coming(self) -> int:
        """Originals that are compiled or will be."""
        return len(self._coming)

    def prepare(self) -> None:
        """Begin to compile another original, if there may be one."""
        is_refused = bool(self._coming) and self._coming[0].done() and self._coming[0].result() is None
        if not is_refused and len(self._coming) < MOST_ORIGINALS:
            self._coming.append(begin(self._compile_one, "grammar"))

    def copy(self) -> llguidance.LLMatcher | None:
        """Return a copy of the originals that are ready, in turn; wait for the first one. None: llguidance does not
        take the grammar."""
        if self._num_copies >= len(self._coming):
            self.prepare()
        first, *others = self._coming
        ready = [first.result(), *(each.result() for each in others if each.done())]
        original = ready[self._num_copies % len(ready)]
        self._num_copies += 1
        return None if original is None else original.deep_copy()


class Grammars:
    """Compiles grammars for one tokenizer and makes matchers. One thread."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer of a checkpoint in the background. `vocab_size`: number of logits.
        `eos_token_ids`: the tokens that end a text; empty: no request can have a grammar, which must be able to end."""
        self.num_words = -(-vocab_size // 32)
        self._reading: Future[llguidance.LLTokenizer] = begin(
            lambda: llguidance.LLTokenizer(
                tokenizer_bytes(model_dir).decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            ),
            "tokenizer of grammars",
        )
        self._compiled: OrderedDict[str, Originals] = OrderedDict()
        self._limits = llguidance.LLParserLimits(step_max_items=MAX_STEP_ITEMS, verbose_errors=False)
        self._executor = llguidance.LLExecutor(MOST_ORIGINALS)  # more threads would wait for the same locks

    def prepare(self, grammar: str) -> None:
        """Begin to compile the grammar of a request that comes soon. It takes up to half a second."""
        if grammar not in self._compiled:
            self._compiled[grammar] = Originals(lambda: self._compile(grammar))
        self._compiled.move_to_end(grammar)
        self._compiled[grammar].prepare()
        self._leave_out()

    def matcher(self, state: SamplingState) -> Matcher:
        """Return the matcher of a sequence after the tokens that it has generated."""
        grammar = state.params.grammar
        assert grammar is not None, state.params
        if grammar not in self._compiled:
            self.prepare(grammar)
        self._compiled.move_to_end(grammar)
        matcher = Matcher(self._compiled[grammar].copy(), state)
        self._leave_out()
        matcher.accept(state.output_ids)
        return matcher

    def fill(self, masks: Mask, chains: Sequence[DraftChain]) -> None:
        """Write what each matcher allows at the nodes of its chain into `masks` [num_rows, num_words], up to the first
        draft that it does not allow. The other rows stay as they are: their nodes are never accepted."""
        live = [chain for chain in chains if not chain.matcher.is_broken]
        if not live:
            return
        alone = [(each.matcher.following, each.row) for each in live if not each.drafts]
        with_drafts = [(each.matcher.following, each.row, list(each.drafts)) for each in live if each.drafts]
        if alone:
            fill_next_token_bitmask_par(self._executor, alone, masks)
        if with_drafts:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, with_drafts, masks)
        for matcher, row, drafts in live:
            for ahead in range(len(drafts) + 1):
                matcher.ban_stops(masks[row + ahead], ahead)

    def fill_tree(self, masks: Mask, root: DraftChain, parents: Sequence[int]) -> None:
        """Write the masks of a tree, as `fill` writes those of chains. Draft i follows node `parents[i]`; the mask of
        node 0 is for the next token, and that of node i + 1 for the token after draft i."""
        matcher, first, drafts = root
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents, 1):
            children.setdefault(parent, []).append(node)

        def visit(node: int, depth: int) -> None:
            fill_next_token_bitmask(matcher.following, masks, first + node)
            matcher.ban_stops(masks[first + node], depth)
            for child in children.get(node, ()):
                if matcher.following.try_consume_tokens([drafts[child - 1]]) == 1:
                    visit(child, depth + 1)
                    matcher.following.rollback(1)

        if not matcher.is_broken:
            visit(0, 0)

    def next(self, states: Sequence[SamplingState]) -> tuple[Mask, list[bool]]:
        """Return what each sequence may have next, [num_states, num_words], and whether its grammar is broken. A
        sequence without a grammar may have every token."""
        masks, chains = np.full((len(states), self.num_words), -1, np.int32), list[DraftChain]()
        for row, state in enumerate(states):
            if state.params.grammar is not None:
                chains.append(DraftChain(self.matcher(state), row))
        self.fill(masks, chains)
        broken = {chain.row for chain in chains if chain.matcher.is_broken}
        return masks, [row in broken for row in range(len(states))]

    def _leave_out(self) -> None:
        """Forget the grammars that were used longest ago, if there are too many originals."""
        while sum(each.num_coming for each in self._compiled.values()) > MAX_COMPILED:  # one has MOST_ORIGINALS
            self._compiled.popitem(last=False)

    def _compile(self, grammar: str) -> llguidance.LLMatcher | None:
        """Return the matcher of a grammar at the beginning, which others are copied from. None: llguidance does not
        take the tokenizer or the grammar."""
        try:
            tokenizer = self._reading.result()
        except Exception as error:  # whatever llguidance raises for a tokenizer that it does not know
            logger.error("no request can have a grammar: llguidance cannot use the tokenizer: %s", error)
            return None
        compiled = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if not compiled.is_error():
            compiled.compute_bitmask()
        if compiled.is_error():
            logger.error("llguidance does not take a grammar of %d characters that the router took", len(grammar))
            return None
        return compiled


class RoundMasks:
    """Owns the matcher of each slot whose sequence has a grammar, and fills the masks of rounds. One thread."""

    def __init__(self, grammars: Grammars, *, pinned: bool) -> None:
        """`pinned`: the masks are copied to a device."""
        self._grammars = grammars
        self._pinned = pinned
        self.matchers: dict[int, Matcher] = {}  # by slot

    def load(self, slot: int, state: SamplingState) -> None:
        """Give the slot to a sequence."""
        self.matchers.pop(slot, None)
        if state.params.grammar is not None:
            self.matchers[slot] = self._grammars.matcher(state)

    def of(self, slots: Sequence[int]) -> list[Matcher | None]:
        """Return the matchers of the sequences in these slots; None: the sequence has no grammar."""
        return [self.matchers.get(slot) for slot in slots]

    def fill(self, matchers: Sequence[Matcher | None], drafts: Tensor, parents: Tensor | None) -> Tensor:
        """Return the tokens that each node may be, [num_seqs * (N + 1), num_words] int32 on the host. `drafts` and
        their `parents`, None for a chain, [num_seqs, N] int64, are on the host; they may have more rows, of padding.
        Sequences without a grammar may have every token."""
        num_seqs, num_nodes = len(drafts), drafts.shape[1] + 1
        shape = (num_seqs * num_nodes, self._grammars.num_words)
        allowed = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._pinned)
        masks: Mask = allowed.numpy()
        rows = drafts.tolist()
        chains = [
            DraftChain(matcher, index * num_nodes, rows[index])
            for index, matcher in enumerate(matchers)
            if matcher is not None
        ]
        if parents is None:
            self._grammars.fill(masks, chains)
        else:
            of_rows = parents.tolist()
            for chain in chains:
                self._grammars.fill_tree(masks, chain, of_rows[chain.row // num_nodes])
        return allowed
