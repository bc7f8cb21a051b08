"""The gated delta rule by Triton against its reference, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest
import torch
from thinned import thinned
from torch import Tensor
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.products.norm import Norm
from baton.kernels.state.delta_rule import DeltaOutputs, DeltaWeights, gated_delta_rule, gated_delta_tree
from baton.kernels.state.paged_delta import MAX_ROUND_LEN, DeltaInputs, DeltaPlan, DeltaPools, DeltaSizes
from baton.kernels.state.trees import ancestry, move_slots_ref_
from baton.kernels.state.triton_delta_gate import gate_heads
from baton.kernels.state.triton_delta_prompt import delta_prompt
from baton.kernels.state.triton_delta_round import delta_round
from baton.kernels.state.triton_delta_tree import delta_tree, pass_edges

TAPS = 4


class Sizes(NamedTuple):
    """The sizes of a layer and its pages."""

    num_heads: int = 2
    num_shared: int = 2
    key_dim: int = 12
    value_dim: int = 10
    page_size: int = 32
    decay_dim: int = 1
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> dict[str, float]:
        """How far outputs and updates may be from the reference, whose sums and factors are float32."""
        is_exact = self.dtype == self.state_dtype == torch.float32
        return {"atol": 2e-5, "rtol": 1e-5} if is_exact else {"atol": 2e-2, "rtol": 1e-2}

    @property
    def block(self) -> int:
        return min(64, self.page_size)

    @property
    def num_channels(self) -> int:
        return 2 * self.key_dim + self.num_shared * self.value_dim

    def weights(self) -> DeltaWeights:
        heads = self.num_heads, self.num_shared
        taps, biases = random(self.num_heads, TAPS, self.num_channels, seed=1), random(*heads, self.decay_dim, seed=3)
        return DeltaWeights(taps, random(*heads, seed=2), biases, self.key_dim, self.value_dim)

    def inputs(self, num_tokens: int) -> Tensor:
        """The projections' output for a text, q, k, v, gates, b and a of each key head, [num_tokens, heads, width]."""
        width = self.num_channels + self.num_shared * (self.value_dim + 1 + self.decay_dim)
        return random(num_tokens, self.num_heads, width, seed=4).to(self.dtype)

    def views(self, inputs: Tensor) -> DeltaInputs:
        of_values = self.num_shared * self.value_dim
        gates = self.num_shared, self.num_shared * self.decay_dim
        return DeltaInputs(*inputs.split([self.key_dim, self.key_dim, of_values, of_values, *gates], 2))

    def rows(self, inputs: Tensor) -> Tensor:
        """What a pool keeps of a text."""
        q, k, v, _, b, a = self.views(inputs)
        return torch.cat([q, k, v, b, a], 2)

    def expected(self, inputs: Tensor) -> DeltaOutputs:
        rows = self.rows(inputs)
        rows = torch.cat([rows.new_zeros(TAPS - 1, *rows.shape[1:]), rows])
        own = self.weights()
        start = torch.zeros(own.state_shape, dtype=self.state_dtype, device=DEVICE)
        return gated_delta_rule(rows, start, own, self.block)


class Texts:
    """Sequences of the same text in pools that are full of NaN, with scattered pages."""

    def __init__(self, sizes: Sizes, num_tokens: int, num_seqs: int = 1) -> None:
        self.sizes, self.weights = sizes, sizes.weights()
        self.inputs, self.expected = sizes.inputs(num_tokens), sizes.expected(sizes.inputs(num_tokens))
        page_size, heads, shared = sizes.page_size, sizes.num_heads, sizes.num_shared
        per_seq = -(-num_tokens // page_size)
        order = torch.randperm(num_seqs * per_seq, generator=torch.Generator().manual_seed(0)) + 1
        self.table = order.view(num_seqs, per_seq).to(DEVICE)
        part = -(-shared * sizes.key_dim * sizes.value_dim // sizes.block)
        widths = self.weights.width, self.weights.update_width, part
        shape = num_seqs * per_seq + 1, 1, heads, page_size
        rows, *others = (torch.full((*shape, width), torch.nan, device=DEVICE) for width in widths)
        self.pools = DeltaPools(rows.to(sizes.dtype), others[0], others[1].to(sizes.state_dtype))

    def run(self, spans: Sequence[tuple[int, int]], *, is_round: bool, is_alone: bool = True) -> None:
        """Compute a span of each sequence and compare."""
        inputs = torch.cat([self.inputs[slice(*span)] for span in spans])
        lens = [stop - start for start, stop in spans]
        starts = torch.tensor([0, *lens], dtype=torch.int32, device=DEVICE).cumsum(0).int()
        seq_lens = torch.tensor([stop for _, stop in spans], device=DEVICE)
        page_size, block = self.sizes.page_size, self.sizes.block
        plan = DeltaPlan.of(self.table, seq_lens, None if is_round else starts, sum(lens), page_size, block)
        assert plan.is_round == is_round
        views = self.sizes.views(inputs)
        if is_round:
            out = delta_round(views, self.weights, self.pools, plan, is_alone=is_alone)
        else:
            out = delta_prompt(views, self.weights, self.pools, plan)
        expected = torch.cat([self.expected.outputs[slice(*span)] for span in spans])
        torch.testing.assert_close(out.float(), expected, **self.sizes.tolerance)

    def check(self, seq: int, stop: int) -> None:
        """Compare what lies in the pools for a sequence of `stop` tokens."""
        sizes, (rows, updates, states) = self.sizes, (pool[self.table[seq], 0].transpose(1, 2) for pool in self.pools)
        rows, updates = rows.flatten(0, 1), updates.flatten(0, 1)
        assert torch.equal(rows[:stop], sizes.rows(self.inputs)[:stop]) and rows[stop:].isnan().all()
        since_edge = slice(stop // sizes.block * sizes.block, stop)
        used = slice(sizes.key_dim + sizes.num_shared * (sizes.value_dim + sizes.decay_dim))
        expected = self.expected.updates[since_edge, :, used]
        torch.testing.assert_close(updates[since_edge, :, used], expected, **sizes.tolerance)
        assert updates[stop:].isnan().all()
        size, states = sizes.num_shared * sizes.key_dim * sizes.value_dim, states.flatten(0, 1)
        for i in range(len(states) // sizes.block):
            own = states[i * sizes.block : (i + 1) * sizes.block].transpose(0, 1).flatten(1)
            if (i + 1) * sizes.block > stop:
                assert own.isnan().all()
                continue
            expected = self.expected.states[i].flatten(1)
            torch.testing.assert_close(own[:, :size], expected, **sizes.tolerance)


@pytest.mark.parametrize("page_size", [32, *(pytest.param(each, marks=pytest.mark.whole) for each in (4, 128))])
def test_rounds_are_the_text_however_many_rows_they_have(page_size: int) -> None:
    """Rounds of 1 to 11 rows over edges of blocks, some of which begin at one, with the drafts of a round rejected."""
    num = 2 * min(64, page_size) + 8
    text = Texts(Sizes(page_size=page_size), num)
    start, round_len = 0, 1
    while start < num:
        stop = min(num, start + round_len)
        text.run([(start, stop)], is_round=True, is_alone=start % 2 == 0)
        start, round_len = max(start + 1, stop - round_len // 3), round_len % 11 + 5 if round_len < 11 else 1
    text.check(0, num)


@pytest.mark.parametrize("decay_dim", [1, 20])
def test_bits_of_a_round_depend_neither_on_its_rows_nor_on_other_sequences(decay_dim: int) -> None:
    """Rounds of 1, 2 and 11 rows over an edge, of one sequence and of two."""
    sizes = Sizes(num_heads=1, num_shared=1 if decay_dim > 1 else 2, page_size=16, key_dim=20, decay_dim=decay_dim)
    found: list[Texts] = []
    for round_len, num_seqs in ((1, 1), (2, 2), (11, 1), (11, 2)):
        found.append(Texts(sizes, 22, num_seqs))
        for start in range(0, 22, round_len):
            found[-1].run([(start, start + round_len)] * num_seqs, is_round=True)
    for text in found[1:]:
        for pool, expected in zip(text.pools, found[0].pools, strict=True):
            for own, others in zip(text.table[-1], found[0].table[0], strict=True):
                assert torch.equal(pool[own].nan_to_num(), expected[others].nan_to_num())


@pytest.mark.parametrize("page_size", [4, 64, pytest.param(128, marks=pytest.mark.whole)])
def test_prompts_are_the_text_however_they_are_divided(page_size: int) -> None:
    """Chunks that end at edges, between them, and in their own block."""
    sizes = Sizes(page_size=page_size)
    num = 2 * sizes.block + 2 + sizes.block // 4
    text, start = Texts(sizes, num), 0
    for stop in (1, 3, sizes.block + 1, 2 * sizes.block, num):
        text.run([(start, stop)], is_round=False)
        start = stop
    text.check(0, num)
    whole = Texts(sizes, num)
    whole.run([(0, num)], is_round=False)
    whole.check(0, num)
    for pool, expected in zip(text.pools[::2], whole.pools[::2], strict=True):
        assert torch.equal(pool.nan_to_num(), expected.nan_to_num())


def test_sequences_of_a_forward_are_apart() -> None:
    """Chunks behind rounds, and rounds behind chunks, of two sequences, with 3 value heads for each key head."""
    sizes = Sizes(num_shared=3, page_size=16)
    text = Texts(sizes, 60, num_seqs=2)
    text.run([(0, 21), (0, 2)], is_round=False)
    text.run([(21, 24), (2, 5)], is_round=True)
    text.run([(24, 50), (5, 23)], is_round=False)
    text.run([(50, 52), (23, 25)], is_round=True)
    text.check(0, 52)
    text.check(1, 25)


def test_states_that_decay_by_channel() -> None:
    """A prompt of two tiles of rows, rounds over an edge, a chunk from the edge once more, and a round."""
    text = Texts(Sizes(num_shared=1, decay_dim=12), 70)
    text.run([(0, 22)], is_round=False)
    text.run([(22, 27)], is_round=True)
    text.run([(27, 38)], is_round=True)
    text.run([(38, 65)], is_round=False)
    text.run([(65, 70)], is_round=True)
    text.check(0, 70)


@pytest.mark.parametrize(("decay_dim", "page_size"), [(1, 64), (12, 16)])
def test_factors_of_16_bits_stay_near(decay_dim: int, page_size: int) -> None:
    """A prompt, a round over an edge, and a chunk from the edge once more, with inputs of bfloat16. A GPU has other
    products for blocks of 64 rows."""
    num_shared = 2 if decay_dim == 1 else 1
    sizes = Sizes(num_shared=num_shared, decay_dim=decay_dim, page_size=page_size, dtype=torch.bfloat16)
    first = page_size - 2
    text = Texts(sizes, page_size + 12)
    text.run([(0, first)], is_round=False)
    text.run([(first, first + 5)], is_round=True)
    text.run([(first + 5, page_size + 12)], is_round=False)
    text.check(0, page_size + 12)


@pytest.mark.parametrize("decay_dim", [1, pytest.param(12, marks=pytest.mark.whole)])
def test_states_in_bfloat16_are_rounded_at_edges_alone(decay_dim: int) -> None:
    """A prompt in one forward, in chunks that end at edges and elsewhere, and rounds over edges: all start a block from
    the state that is kept. The interpreter rounds towards zero, the reference to the nearest number."""
    num_shared = 2 if decay_dim == 1 else 1
    sizes = Sizes(num_shared=num_shared, decay_dim=decay_dim, page_size=16, state_dtype=torch.bfloat16)
    text, whole = Texts(sizes, 40), Texts(sizes, 40)
    start = 0
    for stop in (16, 21, 40):
        text.run([(start, stop)], is_round=False)
        start = stop
    whole.run([(0, 40)], is_round=False)
    assert torch.equal(text.pools.states.nan_to_num(), whole.pools.states.nan_to_num())
    assert text.pools.states.dtype == torch.bfloat16
    text.check(0, 40)
    rounds = Texts(sizes, 40)
    rounds.run([(0, 12)], is_round=False)
    for start in range(12, 40, 7):
        rounds.run([(start, start + 7)], is_round=True)
    rounds.check(0, 40)


class Branch(NamedTuple):
    """A tree of drafts."""

    parents: list[int]  # of nodes 1 and later
    path: list[int]  # nodes from the root on that are accepted

    @classmethod
    def random(cls, seed: int, num_nodes: int, path_len: int) -> Branch:
        """Return a tree of which a path of `path_len` nodes is accepted. No path is longer than kernels take."""
        drawn = Random(seed)
        path, parents, depths = [0, *sorted(drawn.sample(range(1, num_nodes), path_len - 1))], [0], [0]
        for node in range(1, num_nodes):
            own = [each for each in range(node) if depths[each] < MAX_ROUND_LEN - 1]
            parents.append(path[path.index(node) - 1] if node in path else drawn.choice(own))
            depths.append(depths[parents[-1]] + 1)
        return cls(parents[1:], path)


def run_tree(text: Texts, starts: Sequence[int], trees: Sequence[Branch]) -> None:
    """Verify a tree of each sequence, compare all nodes with plain torch, and go on behind the accepted paths."""
    sizes, own, num_nodes = text.sizes, text.weights, len(trees[0].parents) + 1
    visible = ancestry(torch.tensor([each.parents for each in trees], device=DEVICE), num_nodes).visible.flatten(0, 1)
    nodes = random(len(trees), num_nodes, *text.inputs.shape[1:], seed=sum(starts)).to(sizes.dtype)
    for seq, (start, tree) in enumerate(zip(starts, trees, strict=True)):
        nodes[seq, tree.path] = text.inputs[start : start + len(tree.path)]
    lens = torch.tensor(starts, device=DEVICE) + num_nodes
    plan = DeltaPlan.of_trees(text.table, lens, visible, sizes.block)
    found = delta_tree(sizes.views(nodes.flatten(0, 1)), own, text.pools, plan).unflatten(0, (-1, num_nodes))
    used = slice(sizes.key_dim + sizes.num_shared * (sizes.value_dim + sizes.decay_dim))
    for seq, (start, tree) in enumerate(zip(starts, trees, strict=True)):
        rows = torch.cat([sizes.rows(text.inputs[:start]), sizes.rows(nodes[seq])])
        rows = torch.cat([rows.new_zeros(TAPS - 1, *rows.shape[1:]), rows])
        sees = visible.unflatten(0, (-1, num_nodes))[seq]
        begin = torch.zeros(own.state_shape, dtype=sizes.state_dtype, device=DEVICE)
        expected = gated_delta_tree(rows, begin, own, sizes.block, sees)
        torch.testing.assert_close(found[seq].float(), expected.outputs, **sizes.tolerance)
        kept = text.pools.updates[text.table[seq], 0].transpose(1, 2).flatten(0, 1)[start : start + num_nodes, :, used]
        torch.testing.assert_close(kept, expected.updates[:, :, used], **sizes.tolerance)
        sources = start + torch.tensor([tree.path], device=DEVICE)
        targets = start + torch.arange(len(tree.path), device=DEVICE)[None]
        for pool in text.pools:
            move_slots_ref_(pool[None], text.table[seq, None], sources, targets)
    of_layer = DeltaSizes(sizes.num_shared, sizes.key_dim, sizes.value_dim, sizes.decay_dim, sizes.block)
    longest = max(len(each.path) for each in trees)
    updates, states = (pool[None] for pool in text.pools[1:])
    pass_edges(updates, states, of_layer, text.table, torch.tensor(starts, device=DEVICE), longest)


TREES = [
    Sizes(page_size=16),
    Sizes(num_shared=1, decay_dim=12, page_size=16),
    Sizes(page_size=16, dtype=torch.bfloat16),
    Sizes(num_shared=1, decay_dim=40, key_dim=40, page_size=32, dtype=torch.bfloat16),
    Sizes(num_shared=3, page_size=4),
]


@pytest.mark.parametrize("sizes", thinned(TREES, lambda i, _: i < 3))
def test_nodes_of_trees_are_texts_of_their_own(sizes: Sizes) -> None:
    """Random trees of two sequences behind prompts, whose paths pass edges. Then a chain, and a chunk."""
    num, starts = 110, [5, 18]
    text, drawn = Texts(sizes, num, num_seqs=2), Random(3)
    text.run([(0, start) for start in starts], is_round=False)
    for number in range(4):
        num_nodes = drawn.choice([7, 20, 3])
        trees = [Branch.random(10 * number + seq, num_nodes, drawn.randint(1, min(num_nodes, 12))) for seq in (0, 1)]
        run_tree(text, starts, trees)
        starts = [start + len(tree.path) for start, tree in zip(starts, trees, strict=True)]
    text.run([(start, start + 3) for start in starts], is_round=True)
    text.run([(start + 3, start + 25) for start in starts], is_round=False)


def test_nodes_without_a_slot_are_zeros_and_write_nothing() -> None:
    """As at the end of the pages of a sequence that ended in the round before."""
    text = Texts(Sizes(page_size=16), 30)
    text.run([(0, 27)], is_round=False)
    visible = ancestry(torch.tensor([[0, 0, 1, 2, 3, 4, 5]], device=DEVICE), 7).visible.flatten(0, 1)
    plan = DeltaPlan.of_trees(text.table, torch.tensor([27 + 8], device=DEVICE), visible, 16)
    before = text.pools.updates.clone()
    out = delta_tree(text.sizes.views(text.inputs[:8]), text.weights, text.pools, plan)
    assert out[:5].all() and not out[5:].any()  # of 32 slots
    own = text.table[0, 1]
    assert not torch.equal(text.pools.updates[own, ..., 11:, :], before[own, ..., 11:, :])
    text.pools.updates[own, ..., 11:, :] = before[own, ..., 11:, :]
    assert torch.equal(text.pools.updates.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_and_gated(dtype: torch.dtype) -> None:
    outputs, gate = random(3, 6, 10, dtype=dtype), random(3, 2, 47, dtype=dtype, seed=1)[:, :, 5:35]
    norm = Norm(random(10, dtype=dtype, seed=2), 1e-6)
    normed = torch.nn.functional.rms_norm(outputs.float(), (10,), norm.weight.float(), norm.eps)
    expected = normed * torch.nn.functional.silu(gate.reshape(3, 6, 10).float())
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-6
    found = gate_heads(outputs, gate, norm)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.flatten(1), atol=tolerance, rtol=tolerance)
