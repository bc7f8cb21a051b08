"""Draft heads and drafters called directly on pages, without a target's forward: its states are random numbers.

    direct = Direct(model, page_size=3, speculative="eagle", draft_model=str(head), draft_steps=4)
    texts = [direct.text(length) for length in (1, 7)]
    state = direct.prompt(texts, chunk=2)
    drafted = direct.propose(texts, state, 4)
    state = direct.observe(texts, state, drafted, num_accepted=[0, 2])

plain_heads.py computes the same from the texts alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from heads import over_all_tokens
from plain_heads import KeyValue, PlainHead
from torch import Tensor

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.base import DraftState, MissedRows, PromptChunk, PromptTail, RoundRows
from baton.engine.drafters.speculation import read_speculation
from baton.engine.models.heads import DraftHead
from baton.engine.models.registry import load_model
from baton.engine.ranks.ranks import ONE_RANK
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.rounds.trees import Drafts
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import sample
from baton.engine.sampling.state import SamplingState
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.handoff.schema.hidden_layout import TORCH_DTYPES
from baton.metadata.wire.request import SamplingParams

POISON = 1e4  # in slots that nobody has written; finite, so that a masked score stays masked
BOUND = 1e-4
NUM_PAGES = 120


def make_pool(config: ModelConfig, page_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a KV pool of a model or head [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim]."""
    shape = (config.num_layers, NUM_PAGES, 2, config.num_kv_heads, page_size, config.head_dim)
    return torch.full(shape, POISON, dtype=dtype)


def stored(kv: Tensor, pages: Sequence[int], num_rows: int) -> list[KeyValue]:
    """Return the first rows of a sequence in every layer of a pool."""
    rows = kv[:, list(pages)].permute(0, 2, 1, 4, 3, 5).flatten(2, 3)[:, :, :num_rows]
    return [KeyValue(keys, values) for keys, values in rows]


def close(ours: Tensor, theirs: Tensor, bound: float = BOUND) -> None:
    """Check that both are equal within `bound`, in relation to the largest number. Excluded ids are the same ones."""
    assert ours.shape == theirs.shape and torch.equal(ours.isinf(), theirs.isinf()), (ours.shape, theirs.shape)
    ours, theirs = ours.float().masked_fill(ours.isinf(), 0.0), theirs.masked_fill(theirs.isinf(), 0.0)
    torch.testing.assert_close(ours, theirs, atol=bound * max(1.0, float(theirs.abs().max())), rtol=0)


def close_kv(ours: Sequence[KeyValue], theirs: Sequence[KeyValue], bound: float = BOUND) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine.keys, other.keys, bound)
        close(mine.values, other.values, bound)


# --- heads ---


@torch.inference_mode()
def check_head(head: DraftHead, plain: PlainHead, extend_width: int, page_size: int, chunk: int) -> None:
    """Compare a head with plain torch: sequences of unlike lengths in one batch, `chunk` rows at a time, then two rows
    of its own states."""
    generator = torch.Generator().manual_seed(chunk)
    lengths = (1, 8, 20)
    kv, pages = make_pool(head.config, page_size), shuffled_pages(len(lengths), 30 // page_size)
    extends = [torch.randn(length, extend_width, generator=generator) for length in lengths]
    ids = [torch.randint(1, 512, (length + 2,), generator=generator).tolist() for length in lengths]
    found: list[list[Tensor]] = [[] for _ in lengths]
    for start in range(0, max(lengths), chunk):
        some = [i for i, length in enumerate(lengths) if start < length]
        ends = {i: min(start + chunk, lengths[i]) for i in some}
        rows = [BatchRow(ids[i][start : ends[i]], start, pages[i]) for i in some]
        batch = ForwardBatch.build(rows, page_size, "cpu")
        given = torch.cat([extends[i][start : ends[i]] for i in some])
        output = head.forward(batch, ModelPools(kv), given, is_extend=True)
        for i, part in zip(some, output.split([ends[i] - start for i in some]), strict=True):
            found[i].append(part)
    for step in range(2):
        ends = torch.tensor(lengths) + step + 1
        fed = torch.tensor([each[length + step] for each, length in zip(ids, lengths, strict=True)])
        batch = ForwardBatch.uniform(fed[:, None], ends[:, None] - 1, ends, torch.tensor(pages), page_size)
        state = torch.cat([each[-1][-1:] for each in found])
        before = state.clone()
        output = head.forward(batch, ModelPools(kv), state, is_extend=False)
        assert torch.equal(state, before), "the caller's states are its own"
        for i, part in enumerate(output.split(1)):
            found[i].append(part)
    for i, length in enumerate(lengths):
        expected, ours = plain.after(extends[i], ids[i][:length], ids[i][length:]), torch.cat(found[i])
        close(ours, expected.recurrent)
        close(over_all_tokens(head.logits(ours), head.logit_ids, 512), expected.logits)
        close_kv(stored(kv, pages[i], length + 2), expected.kv)


def shuffled_pages(num_sequences: int, num_pages: int) -> list[list[int]]:
    """Return the pages of each sequence, in no order; page 0 is padding."""
    free = iter(random.Random(5).sample(range(1, NUM_PAGES), num_sequences * num_pages))
    return [list(itertools.islice(free, num_pages)) for _ in range(num_sequences)]


# --- drafters ---


def branches(drafts: Drafts, row: int) -> list[tuple[int, ...]]:
    """Return the path of tokens to each node of a tree, in the order of its nodes."""
    assert drafts.parents is not None
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(drafts.tokens[row].tolist(), drafts.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@dataclass(slots=True, eq=False)
class Text:
    """A sequence, its target's states, and how its tokens are chosen."""

    token_ids: list[int]  # 0 .. L, the bonus token last
    states: Tensor | None  # [L, extend width]
    pages: list[int]
    params: SamplingParams
    prompt_len: int

    @property
    def num_computed(self) -> int:
        """Return L."""
        return len(self.token_ids) - 1

    def choose(self, logits: Tensor, drafted: list[int]) -> int:
        """Return the token that the target would sample from `logits` [vocab_size] after the text and `drafted`."""
        prompt, output = self.token_ids[: self.prompt_len], self.token_ids[self.prompt_len :] + drafted
        state = SamplingState(self.params, prompt, output, vocab_size=len(logits))
        return int(sample(logits.unsqueeze(0), SamplingBatch.of([state])).token_ids)

    def sampling(self) -> SamplingState:
        """Return the state of the token after the bonus."""
        prompt, output = self.token_ids[: self.prompt_len], self.token_ids[self.prompt_len :]
        return SamplingState(self.params, prompt, output, vocab_size=512)


class Direct:
    """A drafter, its pool and its target's pool."""

    def __init__(self, model: Path, *, page_size: int = 3, **settings: Any) -> None:
        config = read_model_config(model)
        self.page_size = page_size
        self.speculation = read_speculation(DecodeConfig(model=str(model), **settings), model, config, "float32")
        self.target = load_model(model, config, torch.float32, "cpu")
        self.generator = torch.Generator().manual_seed(7)
        self.target_kv = make_pool(config, page_size)
        self.target_kv.normal_(generator=self.generator)
        self.draft_kv: Tensor | None = None
        if self.speculation.has_pool:
            assert self.speculation.draft is not None
            dtype = TORCH_DTYPES[self.speculation.hidden.draft_dtype]
            self.draft_kv = make_pool(self.speculation.draft, page_size, dtype)
        draft_pools = None if self.draft_kv is None else ModelPools(self.draft_kv)
        drafter = self.speculation.load(self.target, ModelPools(self.target_kv), draft_pools, None, ONE_RANK)
        assert drafter is not None
        self.drafter = drafter
        self._pages = iter(shuffled_pages(8, 12))

    def text(self, num_tokens: int, **fields: Any) -> Text:
        """Return a random text with `num_tokens` computed and one bonus token. It has pages for 36 tokens. `fields`:
        sampling parameters, greedy unless they say otherwise."""
        tokens, states = self._tokens(num_tokens + 1), self._states(num_tokens)
        return Text(
            tokens,
            states,
            next(self._pages),
            SamplingParams(max_tokens=60, **{"temperature": 0.0, **fields}),
            num_tokens,
        )

    @torch.inference_mode()
    def prompt(self, texts: Sequence[Text], chunk: int = 64) -> DraftState:
        """Observe all texts in one batch, `chunk` tokens at a time, and finish them."""
        for start in range(0, max(text.num_computed for text in texts), chunk):
            some = [text for text in texts if start < text.num_computed]
            chunks = [
                PromptChunk(text.token_ids[:-1], start, min(start + chunk, text.num_computed), text.pages)
                for text in some
            ]
            parts = [text.states[start : start + chunk] for text in some if text.states is not None]
            self.drafter.observe_prompt(chunks, torch.cat(parts) if parts else None)
        return self.finish(texts)

    @torch.inference_mode()
    def finish(self, texts: Sequence[Text]) -> DraftState:
        num_rows = self.drafter.hidden.num_target_rows
        tails = []
        for text in texts:
            last = text.num_computed - 1
            rows = None if text.states is None else text.states[max(0, last - num_rows) : last]
            tails.append(PromptTail(text.token_ids[:-1], text.pages, rows))
        hidden = [text.states[-1] for text in texts if text.states is not None]
        bonus = torch.tensor([text.token_ids[-1] for text in texts])
        return self.drafter.finish_prompt(tails, bonus, torch.stack(hidden) if hidden else None, self._sampling(texts))

    def propose(self, texts: Sequence[Text], draft: DraftState, num_steps: int) -> list[list[int]]:
        """Return a chain for each text."""
        drafts = self.propose_tree(texts, draft, num_steps)
        assert drafts.parents is None and drafts.tokens.shape == (len(texts), num_steps)
        return drafts.tokens.tolist()

    @torch.inference_mode()
    def propose_tree(self, texts: Sequence[Text], draft: DraftState, num_steps: int) -> Drafts:
        return self.drafter.propose(self._rows(RoundRows, texts, draft), self.drafter.shape.with_steps(num_steps))

    @torch.inference_mode()
    def observe(
        self, texts: Sequence[Text], draft: DraftState, drafted: Sequence[Sequence[int]], num_accepted: Sequence[int]
    ) -> DraftState:
        """Verify `drafted` with random states: the target samples the first `num_accepted` of a text's drafts, then
        another token. Append what each text gains."""
        num_steps, rows = len(drafted[0]), self._rows(RoundRows, texts, draft)
        targets = torch.tensor([[*row, self._token()] for row in drafted])
        for row, accepted in enumerate(num_accepted):
            targets[row, accepted:] = torch.tensor(self._tokens(num_steps + 1 - accepted))
            if accepted < num_steps and targets[row, accepted] == drafted[row][accepted]:
                targets[row, accepted] = drafted[row][accepted] % 511 + 1
        return self._observe(texts, rows, targets, num_accepted)

    @torch.inference_mode()
    def catch_up(self, texts: Sequence[Text], draft: DraftState, num_missed: Sequence[int]) -> DraftState:
        """Observe tokens of rounds without drafts, as many for each text. Append them to the texts first, as these
        rounds did."""
        num_rows = max(num_missed)
        targets = torch.tensor([self._tokens(num_rows) for _ in texts])
        rows = self._rows(MissedRows, texts, draft)
        later = [
            replace(text, token_ids=[*text.token_ids, *targets[row, :num].tolist()])
            for row, (text, num) in enumerate(zip(texts, num_missed, strict=True))
        ]
        rows = replace(rows, sampling=self._sampling(later))
        return self._observe(texts, rows, targets, [num - 1 for num in num_missed])

    def stored(self, text: Text) -> list[KeyValue]:
        """Return the drafter's KV of positions 0 .. L - 1, by layer."""
        assert self.draft_kv is not None
        return stored(self.draft_kv, text.pages, text.num_computed)

    def _observe(
        self, texts: Sequence[Text], rows: RoundRows, targets: Tensor, num_accepted: Sequence[int]
    ) -> DraftState:
        states = self._states(targets.numel())
        hidden = None if states is None else states.view(*targets.shape, -1)
        state = self.drafter.observe(rows, hidden, targets, torch.tensor(num_accepted))
        for row, (text, accepted) in enumerate(zip(texts, num_accepted, strict=True)):
            text.token_ids += targets[row, : accepted + 1].tolist()
            if hidden is not None and text.states is not None:
                text.states = torch.cat([text.states, hidden[row, : accepted + 1]])
        return state

    def _rows(self, kind: type[RoundRows], texts: Sequence[Text], draft: DraftState) -> Any:
        return kind(
            torch.tensor([text.num_computed for text in texts]),
            torch.tensor([text.token_ids[-1] for text in texts]),
            torch.tensor([text.pages for text in texts]),
            self._sampling(texts),
            draft,
        )

    def _sampling(self, texts: Sequence[Text]) -> SamplingBatch:
        return SamplingBatch.of([text.sampling() for text in texts])

    def _states(self, num_rows: int) -> Tensor | None:
        spec = self.speculation.hidden.spec("extend")
        if spec is None:
            return None
        return torch.randn(num_rows, spec.width, generator=self.generator).to(TORCH_DTYPES[spec.dtype])

    def _tokens(self, num: int) -> list[int]:
        return torch.randint(1, 512, (num,), generator=self.generator).tolist()

    def _token(self) -> int:
        return self._tokens(1)[0]
