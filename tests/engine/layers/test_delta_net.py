"""The layer with a gated delta rule over its pools: no division of a text and no rejected draft changes a bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.attention.pool_rows import PoolRows
from baton.engine.checkpoint.model_config import DELTA_ROWS, DELTA_STATES, DeltaConfig
from baton.engine.layers import delta_net
from baton.engine.layers.delta_net import DeltaNet, store_passed_states
from baton.engine.products.linear import Linear
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import Tree
from baton.kernels.operations import preferring
from baton.kernels.state import delta_rule
from baton.kernels.state.delta_rule import DeltaWeights
from baton.kernels.state.trees import ancestry, move_slots_

# 16 values: torch computes numbers that fill no vector of the processor by other instructions, which round otherwise
DELTA = DeltaConfig((0, 2), num_key_heads=2, num_value_heads=6, key_dim=12, value_dim=16, num_taps=4)
BY_CHANNEL = replace(DELTA, decay_dim=DELTA.key_dim)
SHORT = replace(DELTA, state_dtype="bfloat16")
NUM_TOKENS = 150


def width(delta: DeltaConfig) -> int:
    """Return the numbers of a token's hidden state."""
    own = delta.num_shared * (delta.value_dim + 1 + delta.decay_dim)
    return delta.num_key_heads * (delta.num_channels + own)


def layer(delta: DeltaConfig) -> DeltaNet:
    """A layer whose projections are the hidden state itself, so that no product rounds."""
    generator = torch.Generator().manual_seed(1)
    heads = delta.num_key_heads, delta.num_shared
    taps = torch.randn(heads[0], delta.num_channels, delta.num_taps, generator=generator).transpose(1, 2).contiguous()
    a_log, dt_bias = (torch.rand(*each, generator=generator) for each in (heads, (*heads, delta.decay_dim)))
    size = delta.num_value_heads * delta.value_dim
    return DeltaNet(
        1,
        (Linear.dense(torch.eye(width(delta))),),
        (width(delta),),
        (None,),
        DeltaWeights(taps, a_log, dt_bias, delta.key_dim, delta.value_dim),
        torch.ones(delta.value_dim),
        1e-6,
        torch.nn.functional.silu,
        Linear.dense(torch.eye(size)),
    )


class Text:
    """A sequence in pools that are full of NaN, with scattered pages."""

    def __init__(self, page_size: int, delta: DeltaConfig = DELTA) -> None:
        self.page_size, self.layer = page_size, layer(delta)
        num_pages = NUM_TOKENS // page_size + 4
        self.pages = random.Random(0).sample(range(1, num_pages), num_pages - 1)
        self.pools = {
            each.name: torch.full(
                (2, num_pages, 1, each.num_heads, page_size, each.row_width(page_size)),
                torch.nan,
                dtype=torch.bfloat16 if each.dtype == "bfloat16" else torch.float32,
            )
            for each in delta.further
        }

    def batch(self, num_new: int, position: int) -> ForwardBatch:
        return ForwardBatch.build([BatchRow([0] * num_new, position, self.pages)], self.page_size, "cpu")

    def run(self, hidden: Tensor, batch: ForwardBatch | MixedBatch) -> Tensor:
        context: Any = SimpleNamespace(further=PoolRows.of(batch, self.pools))
        return self.layer(hidden, context)

    def outputs(self, hidden: Tensor, chunks: Sequence[int]) -> Tensor:
        outputs, position = [], 0
        for num in chunks:
            outputs.append(self.run(hidden[position : position + num], self.batch(num, position)))
            position += num
        return torch.cat(outputs)


def hidden_states(seed: int = 3, num_tokens: int = NUM_TOKENS, delta: DeltaConfig = DELTA) -> Tensor:
    return torch.randn(num_tokens, width(delta), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("page_size", "delta"), [(4, DELTA), (24, DELTA), (64, BY_CHANNEL), (128, DELTA), (4, SHORT)])
def test_no_division_of_a_text_changes_a_bit(page_size: int, delta: DeltaConfig) -> None:
    hidden = hidden_states(delta=delta)
    whole = Text(page_size, delta)
    expected = whole.outputs(hidden, [NUM_TOKENS])
    assert not expected.isnan().any()
    for chunks in ([64, 64, 22], [1, 2, 60, 1, 1, 64, 21], [37] * 4 + [2], [127, *[1] * 23]):
        text = Text(page_size, delta)
        assert torch.equal(text.outputs(hidden, chunks), expected), chunks
        for name, pool in text.pools.items():
            assert torch.equal(pool.nan_to_num(), whole.pools[name].nan_to_num()), (name, chunks)
    assert all(pool[0].isnan().all() for pool in whole.pools.values())  # that is another layer's


def test_a_state_that_is_rounded_for_its_page_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: within a chunk the next block starts from the state before it is rounded to bfloat16."""
    rule = delta_net.gated_delta_rule

    def late(rows: Tensor, state: Tensor, *rest: Any) -> Any:
        made = rule(rows, state.float(), *rest)
        return made._replace(states=[each.to(state.dtype) for each in made.states])

    monkeypatch.setattr(delta_net, "gated_delta_rule", late)
    with pytest.raises(AssertionError):
        test_no_division_of_a_text_changes_a_bit(4, SHORT)


def test_a_rejected_draft_changes_no_bit() -> None:
    """Rounds of a token and four drafts, of which one, or all, or none are taken, over all edges of blocks."""
    hidden, text = hidden_states(), Text(4)
    expected = Text(4).outputs(hidden, [NUM_TOKENS])
    position = 9
    text.outputs(hidden, [position])
    generator = random.Random(1)
    while position < NUM_TOKENS - 5:
        num_right = generator.randrange(5)
        drafts = torch.cat([hidden[position : position + 1 + num_right], hidden_states(position, 4 - num_right)])
        outputs = text.run(drafts, text.batch(5, position))
        assert torch.equal(outputs[: 1 + num_right], expected[position : position + 1 + num_right])
        position += 1 + num_right


Parents = list[int]  # of the nodes behind the root


def tree_of(generator: random.Random, num_drafts: int, path_len: int) -> tuple[Parents, list[int]]:
    """Return a tree in which a path from the root is `path_len` drafts long, and its nodes, the root first."""
    path = [0, *sorted(generator.sample(range(1, num_drafts + 1), path_len))]
    parents = [generator.randrange(node) for node in range(1, num_drafts + 1)]
    for parent, node in itertools.pairwise(path):
        parents[node - 1] = parent
    return parents, path


def run_tree(text: Text, nodes: Tensor, position: int, parents: Parents) -> Tensor:
    """Return the outputs of a root at `position` and drafts behind it, given the hidden states of all."""
    tree, num_nodes = ancestry(torch.tensor([parents]), len(parents)), len(nodes)
    table, lens = torch.tensor(text.pages)[None], torch.tensor([position + num_nodes])
    ids, sees = torch.zeros(1, num_nodes, dtype=torch.int64), Tree(torch.tensor([position]), tree.visible[0])
    return text.run(nodes, ForwardBatch.uniform(ids, position + tree.depths, lens, table, text.page_size, sees))


def move(text: Text, position: int, path: list[int]) -> None:
    """Move the rows of the nodes of a path to the slots behind the root."""
    sources = position + torch.tensor([path])
    for pool in text.pools.values():
        move_slots_(pool, torch.tensor(text.pages)[None], sources, position + torch.arange(len(path))[None])


@pytest.mark.parametrize(("page_size", "delta"), [(4, DELTA), (16, BY_CHANNEL), (64, DELTA)])
def test_each_path_of_a_tree_has_the_numbers_of_a_text_of_its_own(page_size: int, delta: DeltaConfig) -> None:
    """Rounds whose trees have wrong branches beside the path that the target takes. Some paths complete several blocks,
    whose states the next round writes: all are in the end those of one forward, bit for bit."""
    hidden, whole, text = hidden_states(delta=delta), Text(page_size, delta), Text(page_size, delta)
    expected, generator = whole.outputs(hidden, [NUM_TOKENS]), random.Random(5)
    position, num_drafts = 9, 10
    text.layer = replace(text.layer, longest_path=7)
    text.outputs(hidden, [position])
    while position < NUM_TOKENS - num_drafts:
        parents, path = tree_of(generator, num_drafts, generator.randrange(7))
        nodes = hidden_states(position, 1 + num_drafts, delta)
        nodes[path] = hidden[position : position + len(path)]
        outputs = run_tree(text, nodes, position, parents)
        torch.testing.assert_close(outputs[path], expected[position : position + len(path)], atol=1e-5, rtol=1e-5)
        move(text, position, path)
        position += len(path)
    text.run(hidden[position:], text.batch(NUM_TOKENS - position, position))
    for name in (DELTA_ROWS, DELTA_STATES):
        assert torch.equal(text.pools[name].nan_to_num(), whole.pools[name].nan_to_num()), name


def test_kernels_store_the_states_that_an_accepted_path_passes() -> None:
    """Trees with wrong branches, whose paths pass several edges at once, then a chunk."""
    pytest.importorskip("triton")
    hidden, text, generator = hidden_states(num_tokens=50), Text(4), random.Random(2)
    expected, position, num_drafts = Text(4).outputs(hidden, [50]), 6, 10
    with preferring("triton"):
        text.outputs(hidden, [position])
        for path_len in (9, 2, 7):
            parents, path = tree_of(generator, num_drafts, path_len)
            nodes = hidden_states(position, 1 + num_drafts)
            nodes[path] = hidden[position : position + len(path)]
            outputs = run_tree(text, nodes, position, parents)
            torch.testing.assert_close(outputs[path], expected[position : position + len(path)], atol=1e-4, rtol=1e-4)
            move(text, position, path)
            starts, table = torch.tensor([position]), torch.tensor(text.pages)[None]
            store_passed_states(DELTA, text.pools, table, starts, len(path), text.page_size)
            position += len(path)
        outputs = text.run(hidden[position:], text.batch(50 - position, position))
    torch.testing.assert_close(outputs, expected[position:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("defect", ["sibling", "decay of a sibling", "convolution by slots", "state of a sibling"])
def test_a_row_of_a_sibling_that_leaks_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root with two children, and a child of the second one. With the defect, the last one's numbers depend on the
    first child."""
    hidden, position = hidden_states(), 9

    def last(seed: int) -> Tensor:
        """Return the output of the grandchild, and of the token behind it when its path is taken."""
        text = Text(4)
        text.layer = replace(text.layer, longest_path=0 if defect == "state of a sibling" else 4)
        text.outputs(hidden, [position])
        nodes = torch.cat([hidden[position, None], hidden_states(seed, 1), hidden[position + 1 : position + 3]])
        outputs = run_tree(text, nodes, position, [0, 0, 2])
        move(text, position, [0, 2, 3])
        return torch.cat([outputs[-1:], text.run(hidden[position + 3, None], text.batch(1, position + 3))])

    if defect != "state of a sibling":
        assert torch.equal(last(1), last(2))
    compute, inputs = delta_rule._compute, delta_rule._inputs

    def wrong(own: Any, decay: Tensor, is_seen: Tensor, state: Tensor) -> Any:
        if defect == "sibling":
            is_seen = torch.ones_like(is_seen).tril()
        if defect == "decay of a sibling":
            decay = own.steps.cumsum(2)
        return compute(own, decay, is_seen, state)

    def by_slots(rows: Tensor, weights: DeltaWeights, sources: Any) -> Any:
        num = len(rows) - weights.num_before
        return inputs(rows, weights, [slice(tap, tap + num) for tap in range(len(sources))])

    monkeypatch.setattr(delta_rule, "_compute", wrong)
    if defect == "convolution by slots":
        monkeypatch.setattr(delta_rule, "_inputs", by_slots)
    assert not torch.equal(last(1), last(2))


def test_a_sequence_may_have_its_next_token_beside_its_chunk() -> None:
    """A round and the end of a prompt share a forward: the token follows those of the chunk."""
    hidden, text = hidden_states(num_tokens=20), Text(4)
    expected = Text(4).outputs(hidden, [20])
    text.outputs(hidden, [7])
    both = MixedBatch.of(text.batch(1, 19), text.batch(12, 7))
    outputs = text.run(torch.cat([hidden[19:], hidden[7:19]]), both)
    assert torch.equal(outputs, torch.cat([expected[19:], expected[7:19]]))


def test_a_rank_without_sequences_has_no_outputs() -> None:
    text = Text(4)
    batch = ForwardBatch.build([], 4, "cpu")
    assert text.run(torch.zeros(0, width(DELTA)), batch).shape == (0, DELTA.num_value_heads * DELTA.value_dim)


@pytest.mark.parametrize("delta", [DELTA, pytest.param(BY_CHANNEL, marks=pytest.mark.whole)])
def test_kernels_have_the_numbers_of_plain_torch(delta: DeltaConfig) -> None:
    """A chunk, a round over an edge, and the next token of the sequence beside its chunk."""
    pytest.importorskip("triton")
    delta = replace(delta, num_value_heads=delta.num_key_heads) if delta.decay_dim > 1 else delta
    hidden, text = hidden_states(num_tokens=50, delta=delta), Text(32, delta)
    expected = Text(32, delta).outputs(hidden, [50])
    with preferring("triton"):
        outputs = [text.run(hidden[:29], text.batch(29, 0))]
        position = torch.arange(29, 34)[None]
        lens, table = torch.tensor([34]), torch.tensor(text.pages)[None]
        outputs.append(text.run(hidden[29:34], ForwardBatch.uniform(position, position, lens, table, 32)))
        position = torch.tensor([[49]])
        first = ForwardBatch.uniform(position, position, torch.tensor([50]), table, 32)
        both = MixedBatch.of(first, text.batch(15, 34))
        mixed = text.run(torch.cat([hidden[49:], hidden[34:49]]), both)
        outputs += [mixed[1:], mixed[:1]]
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-4, rtol=1e-4)
