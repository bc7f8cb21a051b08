"""Several MTP layers equal a recompute in plain torch: KV of every layer, proposals, and the rows that are kept.

The target's states are random numbers. tests/decode_node/test_mtp_layers.py has whole nodes and known defects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from direct import Direct, Text, close_kv
from heads import LAYERED, SIX_LAYERS, write_head
from plain_heads import Plain, PlainHead
from thinned import thinned

from baton.engine.drafters.base import DraftState, PromptTail, RoundRows
from baton.engine.drafters.mtp_layers import MtpLayersDrafter
from baton.engine.pace.draft_length import DraftShape
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.state.model_pools import ModelPools

ODD = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10}
SAMPLED = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.5, "top_k": 40},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
]
Make = Callable[..., tuple[Direct, PlainHead]]


@pytest.fixture
def make(checkpoint: Callable[..., Path], tmp_path: Path) -> Make:
    def direct_and_plain(kind: str, *, head: dict[str, Any] | None = None, **settings: Any) -> tuple[Direct, PlainHead]:
        model = checkpoint("llama", hidden_size=40)
        written = write_head(tmp_path / kind, kind, model, **ODD, **(head or {}))
        direct = Direct(model, speculative="mtp", draft_model=str(written), **settings)
        assert isinstance(direct.drafter, MtpLayersDrafter)
        return direct, PlainHead(kind, written, Plain(model))

    return direct_and_plain


def check_state(direct: Direct, plain: PlainHead, texts: Sequence[Text], state: DraftState) -> None:
    """Check proposals, the last n - 1 rows and tokens, and the KV of all rows before L in every layer."""
    num = len(plain.prefixes) - 1
    assert state.hidden is None and state.scores is None
    assert state.tokens is not None and state.rows is not None and state.recent is not None
    for row, text in enumerate(texts):
        assert text.states is not None
        kv, proposals = plain.layered(text.states, text.token_ids, text.choose)
        assert state.tokens[row].tolist() == proposals
        close_kv(direct.stored(text), kv)
        before = torch.zeros(num, text.states.shape[1])  # rows before position 0
        assert torch.equal(state.rows[row], torch.cat([before, text.states])[-num:])
        known = text.token_ids[-num:]
        assert state.recent[row].tolist() == [0] * (num - len(known)) + known


@pytest.mark.parametrize(
    ("kind", "chunk", "sampling"),
    thinned(itertools.product((*LAYERED, SIX_LAYERS), [64, 5, 1], [[{}] * 4, SAMPLED]), lambda i, *_: i in (1, 8, 17)),
)
def test_prompts_and_rounds_equal_a_recompute(
    kind: str, chunk: int, sampling: list[dict[str, Any]], make: Make
) -> None:
    """Prompts of unlike lengths in one batch, two of them shorter than there are layers, then rounds that accept none,
    some and all drafts, then rounds without drafts that the drafter catches up on."""
    direct, plain = make(kind)
    texts = [direct.text(length, **fields) for length, fields in zip((1, 2, 7, 12), sampling, strict=True)]
    state = direct.prompt(texts, chunk)
    check_state(direct, plain, texts, state)
    for num_steps, num_accepted in ((1, [1, 0, 1, 0]), (3, [0, 1, 2, 3]), (2, [0, 2, 1, 0]), (3, [3, 0, 3, 1])):
        assert state.tokens is not None
        drafted = direct.propose(texts, state, num_steps)
        assert drafted == state.tokens[:, :num_steps].tolist()
        state = direct.observe(texts, state, drafted, num_accepted)
        check_state(direct, plain, texts, state)
    state = direct.catch_up(texts, state, [1, 4, 3, 2])
    check_state(direct, plain, texts, state)


@pytest.mark.parametrize(("kind", "is_chained"), [("mtp3-deepseek", False), ("mtp3-mimo", True)])
def test_config_json_says_whether_layers_are_chained(kind: str, is_chained: bool, make: Make) -> None:
    direct, plain = make(kind, head={"mtp_chained": is_chained})
    assert (direct.drafter.hidden.recurrent is not None) == is_chained
    texts = [direct.text(length) for length in (2, 9)]
    state = direct.prompt(texts, 4)
    check_state(direct, plain, texts, state)
    check_state(direct, plain, texts, direct.observe(texts, state, direct.propose(texts, state, 2), [1, 2]))
    plain.config["mtp_chained"] = not is_chained
    with pytest.raises(AssertionError):
        check_state(direct, plain, texts[:1], state)


def test_a_sequence_does_not_change_another_ones_drafts(make: Make) -> None:
    """Bit for bit, whatever the other one's states are."""
    results = []
    for is_broken in (False, True):
        direct, _ = make("mtp3-deepseek")
        texts = [direct.text(7, **SAMPLED[1]), direct.text(10, **SAMPLED[2])]
        assert texts[1].states is not None
        if is_broken:
            texts[1].states.fill_(float("nan"))
        state = direct.prompt(texts, 4)
        after = direct.observe(texts, state, direct.propose(texts, state, 3), [2, 1])
        kv = [part for layer in direct.stored(texts[0]) for part in layer]
        fields = [value[0] for each in (state, after) for _, value in each.present()]
        results.append((*fields, *kv))
        assert state.rows is not None and bool(state.rows[1].isnan().all()) == is_broken
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", LAYERED)
def test_rows_have_the_targets_width_and_dtype(kind: str, make: Make) -> None:
    """Layers in bfloat16 for a target in float32: the kept rows stay the target's, the KV is the draft's."""
    direct, _ = make(kind, draft_dtype="bfloat16")
    layout = direct.drafter.hidden
    assert layout.num_target_rows == 2 and layout.spec("extend") == (40, "float32")
    assert layout.spec("recurrent") == (None if kind == "mtp3-mimo" else (40, "bfloat16"))
    assert direct.draft_kv is not None and direct.draft_kv.shape[0] == 3 and direct.draft_kv.dtype == torch.bfloat16
    texts = [direct.text(length) for length in (1, 9)]
    first = direct.prompt(texts, 4)
    second = direct.observe(texts, first, direct.propose(texts, first, 2), [1, 2])
    wanted = [("tokens", (2, 3), torch.int64), ("rows", (2, 2, 40), torch.float32), ("recent", (2, 2), torch.int64)]
    for state in (direct.drafter.allocate(2), first, second):
        assert [(name, tuple(value.shape), value.dtype) for name, value in state.present()] == wanted
    for row, text in enumerate(texts):
        assert second.rows is not None and text.states is not None
        assert torch.equal(second.rows[row], text.states[-2:])  # no bit was lost on the way


def test_states_of_another_width_or_dtype_are_refused(make: Make) -> None:
    direct, _ = make("mtp3-deepseek")
    text = direct.text(4)
    assert text.states is not None
    right, words = text.states, r"extend state of mtp is \[num_rows, 40\] float32, not"
    for wrong in (right[:, :24], right.repeat(1, 2), right.double(), right.half()):
        text.states = wrong
        for call in (direct.prompt, direct.finish):
            with pytest.raises(ValueError, match=words):
                call([text])


def test_rounds_refuse_states_that_are_not_those_of_their_tokens(make: Make) -> None:
    """One state for each token that the target sampled, and all that a state hands on from round to round."""
    direct, _ = make("mtp3-deepseek")
    texts = [direct.text(length) for length in (4, 6)]
    state, targets = direct.prompt(texts), torch.ones(2, 2, dtype=torch.int64)
    states, accepted = torch.zeros(2, 2, 40), torch.zeros(2, dtype=torch.int64)
    assert state.rows is not None and state.recent is not None
    wrong: list[tuple[DraftState, torch.Tensor | None]] = [
        *((state, each) for each in (None, states[:, :1], states[:1], states.repeat(1, 2, 1), states.repeat(2, 1, 1))),
        *((replace(state, **{name: None}), states) for name in ("rows", "recent")),
    ]
    for draft, hidden in wrong:
        rows = direct._rows(RoundRows, texts, draft)
        with pytest.raises(AssertionError), torch.inference_mode():
            direct.drafter.observe(rows, hidden, targets, accepted)


def test_a_state_lies_where_the_drafters_pool_does(make: Make) -> None:
    """A pool on the device "meta" stands for one on a GPU."""
    direct, _ = make("mtp3-deepseek")
    assert direct.draft_kv is not None
    direct.drafter.use_pools(ModelPools(direct.target_kv), ModelPools(direct.draft_kv.to("meta")))
    state = direct.drafter.allocate(2)
    assert {(name, value.device.type) for name, value in state.present()} == {
        (name, "meta") for name in ("tokens", "rows", "recent")
    }


def test_layers_are_told_that_they_extend_and_how_ranks_divide_the_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts and in rounds: there are no other forwards."""
    direct, _ = make("mtp3-deepseek")
    assert isinstance(direct.drafter, MtpLayersDrafter)
    log: list[Any] = []

    class Spied:
        def __init__(self, layer: Any) -> None:
            self.layer = layer

        def forward(self, *rows: Any, is_extend: Any) -> torch.Tensor:
            log.append(is_extend)
            return self.layer.forward(*rows, is_extend=is_extend)

        def logits(self, rows: torch.Tensor, lens: Any) -> torch.Tensor:
            log.append(lens)
            return self.layer.logits(rows)

    monkeypatch.setattr(SamplingBatch, "lens", lambda _, num_rows: (num_rows, 0))
    spied: Any = [Spied(layer) for layer in direct.drafter._layers]
    direct.drafter._layers = spied
    texts = [direct.text(6), direct.text(7)]
    state = direct.prompt(texts)
    direct.observe(texts, state, direct.propose(texts, state, 2), [1, 2])
    assert log == [True] * 3 + [True, (2, 0)] * 6


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4])
def test_one_step_to_one_per_layer_is_drafted(num_steps: int, make: Make) -> None:
    drafter = make("mtp3-deepseek")[0].drafter
    assert isinstance(drafter, MtpLayersDrafter)
    shape = DraftShape(num_steps)
    with nullcontext() if num_steps in (1, 3) else pytest.raises(AssertionError):
        MtpLayersDrafter(drafter._layers, drafter._pools, drafter.hidden, shape)


def test_a_prompt_ends_with_a_state_for_each_text_and_the_rows_before_it(make: Make) -> None:
    direct, _ = make("mtp3-deepseek")
    text = direct.text(5)
    direct.prompt([text])
    rows, bonus, sampling = torch.zeros(2, 40), torch.tensor([text.token_ids[-1]]), direct._sampling([text])

    def finish(rows: torch.Tensor | None, hidden: torch.Tensor | None) -> DraftState:
        with torch.inference_mode():
            tail = PromptTail(text.token_ids[:-1], text.pages, rows)
            return direct.drafter.finish_prompt([tail], bonus, hidden, sampling)

    assert len(finish(rows, torch.zeros(1, 40))) == 1
    for wrong in ((rows, None), (rows, torch.zeros(0, 40)), (rows, torch.zeros(2, 40)), (None, torch.zeros(1, 40))):
        with pytest.raises(AssertionError):
            finish(*wrong)
    with pytest.raises(AssertionError):
        finish(rows[:1], torch.zeros(1, 40))
