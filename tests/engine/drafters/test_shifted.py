"""Shifted drafters equal a recompute in plain torch: rows, KV, chains and trees, after prompts and after rounds.

The target's states are random numbers, so that nothing of the target takes part but its embedding and output matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from direct import Direct, Text, branches, close, close_kv
from heads import ALGORITHM, over_all_tokens, set_draft_ids, write_head
from plain_heads import Plain, PlainHead, grow
from thinned import thinned

from baton.engine.drafters.base import DraftState
from baton.engine.drafters.shifted import ShiftedDrafter
from baton.engine.sampling.row_shares import Lens

ODD = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10}
OWN_WIDTH = {"eagle3": {"hidden_size": 24}}  # the others have their target's
KINDS = ("eagle", "eagle3", "mtp-deepseek")
SAMPLED = [{}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.5, "top_k": 40}]
Make = Callable[..., tuple[Direct, PlainHead]]


@pytest.fixture
def make(checkpoint: Callable[..., Path], tmp_path: Path) -> Make:
    def direct_and_plain(kind: str, **settings: Any) -> tuple[Direct, PlainHead]:
        model = checkpoint("llama", hidden_size=40)
        head = write_head(tmp_path / kind, kind, model, **ODD, **OWN_WIDTH.get(kind, {}))
        direct = Direct(model, speculative=ALGORITHM[kind], draft_model=str(head), **{"draft_steps": 4, **settings})
        assert isinstance(direct.drafter, ShiftedDrafter)
        return direct, PlainHead(kind, head, Plain(model))

    return direct_and_plain


def check_state(
    direct: Direct, plain: PlainHead, texts: Sequence[Text], state: DraftState, bound: float = 1e-4
) -> None:
    """Check the state after row L - 1, and the KV of all rows."""
    assert state.hidden is not None and state.tokens is not None
    for row, text in enumerate(texts):
        assert text.states is not None
        found = plain.rows(plain.begin(text.states), text.token_ids[1:])
        close(state.hidden[row], found.recurrent[-1], bound)
        close_kv(direct.stored(text), found.kv, bound)
        if direct.drafter.shape.is_chain:
            assert state.tokens[row].tolist() == [text.choose(found.logits[-1], [])]


def check_drafts(plain: PlainHead, texts: Sequence[Text], drafted: list[list[int]]) -> None:
    for text, found in zip(texts, drafted, strict=True):
        assert text.states is not None
        assert found == plain.chain(text.states, text.token_ids[1:], len(found), text.choose)


@pytest.mark.parametrize(
    ("kind", "chunk", "sampling"),
    thinned(itertools.product(KINDS, [64, 5, 1], [[{}] * 3, SAMPLED]), lambda i, *_: i in (1, 8, 17)),
)
def test_prompts_and_rounds_equal_a_recompute(
    kind: str, chunk: int, sampling: list[dict[str, Any]], make: Make
) -> None:
    """Prompts of unlike lengths in one batch, the first with one token, then rounds that accept none, some and all
    drafts, then rounds without drafts that the drafter catches up on."""
    direct, plain = make(kind)
    texts = [direct.text(length, **fields) for length, fields in zip((1, 7, 12), sampling, strict=True)]
    state = direct.prompt(texts, chunk)
    check_state(direct, plain, texts, state)
    for num_steps, num_accepted in ((4, [0, 2, 4]), (1, [1, 0, 1]), (3, [3, 1, 0])):
        drafted = direct.propose(texts, state, num_steps)
        check_drafts(plain, texts, drafted)
        state = direct.observe(texts, state, drafted, num_accepted)
        check_state(direct, plain, texts, state)
    state = direct.catch_up(texts, state, [1, 3, 2])
    check_state(direct, plain, texts, state)
    check_drafts(plain, texts, direct.propose(texts, state, 4))


@pytest.mark.parametrize(("steps", "topk", "num_tokens"), [(3, 2, 10), (3, 3, 8), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_equal_a_recompute_and_leave_nothing_behind(
    kind: str, steps: int, topk: int, num_tokens: int, make: Make
) -> None:
    """A round's tree lies in slots that the next `observe` overwrites."""
    direct, plain = make(kind, draft_steps=steps, draft_topk=topk, draft_tokens=num_tokens)
    texts = [direct.text(length) for length in (1, 8)]
    state = direct.prompt(texts)
    for num_accepted in ([0, steps], [steps, 0]):
        check_state(direct, plain, texts, state)
        drafts = direct.propose_tree(texts, state, steps)
        deepest = []
        for row, text in enumerate(texts):
            ids, states = text.token_ids[1:], text.states
            assert states is not None
            paths = branches(drafts, row)
            wanted = grow(steps, topk, num_tokens, lambda path: plain.after(states, ids, path).logits[-1])  # noqa: B023
            assert len(paths) == num_tokens and set(paths) == wanted
            deepest.append(list(max(paths, key=len)) + [0] * (steps - max(map(len, paths))))
        state = direct.observe(texts, state, deepest, num_accepted)
    check_state(direct, plain, texts, state)


def test_a_sequence_does_not_change_another_ones_drafts(make: Make) -> None:
    """Bit for bit, whatever the other one's states are."""
    results = []
    for is_broken in (False, True):
        direct, _ = make("eagle")
        texts = [direct.text(7, **SAMPLED[1]), direct.text(10, **SAMPLED[2])]
        assert texts[1].states is not None
        if is_broken:
            texts[1].states.fill_(float("nan"))
        state = direct.prompt(texts, 4)
        drafted = direct.propose(texts, state, 4)
        after = direct.observe(texts, state, [drafted[0], [1, 2, 3, 4]], [2, 1])
        assert state.hidden is not None and after.hidden is not None and after.tokens is not None
        assert bool(state.hidden[1].isnan().all()) == is_broken
        results.append((state.hidden[0], drafted[0], after.hidden[0], after.tokens[0], *direct.stored(texts[0])[0]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_states_have_the_width_and_dtype_of_their_side(kind: str, make: Make) -> None:
    """A head in bfloat16 for a target in float32: extend rows are the target's, all else is the draft's."""
    direct, plain = make(kind, draft_dtype="bfloat16")
    layout = direct.drafter.hidden
    extend, recurrent = {"eagle": (40, 40), "eagle3": (120, 24)}[kind]
    assert layout.spec("extend") == (extend, "float32") and layout.spec("recurrent") == (recurrent, "bfloat16")
    texts = [direct.text(length) for length in (2, 9)]
    first = direct.prompt(texts, 4)
    second = direct.observe(texts, first, direct.propose(texts, first, 2), [1, 2])
    empty = direct.drafter.allocate(2)
    for state in (first, second):
        for (name, value), (wanted, zeros) in zip(state.present(), empty.present(), strict=True):
            assert name == wanted and value.shape == zeros.shape and value.dtype == zeros.dtype
        assert state.hidden is not None and state.hidden.shape == (2, recurrent)
        assert state.hidden.dtype == torch.bfloat16
    for row, text in enumerate(texts):
        assert text.states is not None and second.hidden is not None
        found = plain.rows(plain.begin(text.states), text.token_ids[1:])
        close(second.hidden[row], found.recurrent[-1], 0.1)


def test_states_of_another_width_or_dtype_are_refused(make: Make) -> None:
    direct, _ = make("eagle3")
    text = direct.text(4)
    assert text.states is not None
    right = text.states
    for wrong in (right[:, :24], right.repeat(1, 2), right.double(), right.half()):
        text.states = wrong
        with pytest.raises(ValueError, match=r"extend state of eagle3 is \[num_rows, 120\] float32, not"):
            direct.prompt([text])
        with pytest.raises(ValueError, match=r"extend state of eagle3 is \[num_rows, 120\] float32, not"):
            direct.finish([text])
    text.states = right
    state = direct.prompt([text])
    assert state.hidden is not None
    wide = DraftState(state.tokens, state.scores, torch.zeros(1, 40))
    with pytest.raises(ValueError, match=r"recurrent state of eagle3 is \[num_rows, 24\] float32, not"):
        direct.propose([text], wide, 2)


class OverAllTokens:
    """A head of a reduced vocabulary whose logits are scattered over the target's."""

    logit_ids = None

    def __init__(self, head: Any) -> None:
        self._head, self.forward = head, head.forward

    def logits(self, recurrent: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        return over_all_tokens(self._head.logits(recurrent, lens), self._head.logit_ids, 512)


REDUCED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "top_k": 40},
    {"temperature": 1.2, "seed": 3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "seed": 4, "logit_bias": {3: 4.0, 500: 2.0}, "min_tokens": 40, "stop_ids": (7, 8, 9)},
]


@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("num_ids", [1, 37, 255, 512])
def test_a_reduced_vocabulary_drafts_what_logits_over_all_tokens_draft(
    num_ids: int, topk: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Prompts and rounds of unlike requests in one batch; draft ids in no order."""
    model = checkpoint("llama", hidden_size=40)
    head = write_head(tmp_path / "head", "eagle3", model, **ODD)
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(num_ids))[:num_ids] + 12
    set_draft_ids(head, ids if num_ids < 512 else torch.randperm(512))
    shape = {"draft_topk": topk, "draft_tokens": 9} if topk > 1 else {}
    runs = []
    for is_whole in (False, True):
        direct = Direct(model, speculative="eagle3", draft_model=str(head), draft_steps=4, **shape)
        drafter: Any = direct.drafter
        assert (drafter._head.logit_ids is None) == (num_ids == 512)
        if is_whole:
            drafter._head = OverAllTokens(drafter._head)
        texts = [direct.text(5 + 3 * i, **fields) for i, fields in enumerate(REDUCED)]
        state, drafted = direct.prompt(texts, 6), []
        for num_accepted in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2], [1] * 5):
            drafts = direct.propose_tree(texts, state, 4)
            drafted.append(drafts)
            state = direct.observe(texts, state, drafts.tokens[:, :4].tolist(), num_accepted)
        runs.append(drafted)
    for ours, theirs in zip(*runs, strict=True):
        if num_ids > topk:  # of fewer tokens, the others in a tree are any
            assert torch.equal(ours.tokens, theirs.tokens)
            assert topk == 1 or torch.equal(ours.parents, theirs.parents)
        elif topk == 1:
            assert torch.equal(ours.tokens, theirs.tokens) and ours.tokens.unique().tolist() == ids.tolist()
