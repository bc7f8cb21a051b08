"""Time the kernels of the gated delta rule on a GPU at the shapes of Qwen3-Next and Qwen3.5-35B: 16 key heads and 32
value heads of 128 numbers, a convolution over 4 tokens, pages of 64 tokens, bfloat16. Parts named channel have the
shape of Kimi-Linear: 32 heads, whose states decay by channel.

    python tests/benchmarks/kernel_times/bench_kernels_delta.py \
        [--only rounds tiles prompts gates channel-rounds channel-prompts] \
        [--sequences 1 8 32 64] [--rows 1 2 4] [--chunk 2048 8192]

Rows, updates and states in pages are those of the reference, which every kernel is compared with. Sequences end at all
places of a block. A round's time is compared with reading the state, the rows since the edge and their updates, once.
If fla-core is installed, its kernels are timed beside ours. They have no convolution, and key heads are repeated for
them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from graph_times import Kernel, copies, measure, normal
from torch import Tensor

from baton.kernels.products.norm import Norm
from baton.kernels.state import triton_delta_round
from baton.kernels.state.delta_rule import DeltaOutputs, DeltaWeights, gated_delta_rule
from baton.kernels.state.paged_delta import DeltaInputs, DeltaPlan, DeltaPools, delta_prompt, delta_round, gate_heads

DIM, TAPS, BLOCK = 128, 4, 64
OUTPUT_ERROR, UPDATE_ERROR = 5e-3, {"rounds": 1e-4, "prompts": 5e-3}  # outputs are bfloat16, prompts' factors float16


class Heads(NamedTuple):
    """The heads of a layer."""

    keys: int = 16
    shared: int = 2  # value heads of a key head
    decay_dim: int = 1

    @property
    def channels(self) -> int:
        return (2 + self.shared) * DIM

    @property
    def parts(self) -> list[int]:
        """Numbers of a key head in the inputs: q, k, v, gates, b and a."""
        return [DIM, DIM, self.shared * DIM, self.shared * DIM, self.shared, self.shared * self.decay_dim]

    @property
    def used(self) -> int:
        """Numbers of a key head in a row of updates."""
        return DIM + self.shared * (DIM + self.decay_dim)

    @property
    def state_bytes(self) -> int:
        return self.keys * self.shared * DIM * DIM * 4

    @property
    def row_bytes(self) -> int:
        """Bytes of a row since the edge: updates, decays and key."""
        return self.keys * self.used * 4


BY_HEAD, BY_CHANNEL = Heads(), Heads(32, 1, DIM)


class Text(NamedTuple):
    """A text, what the reference makes of it, and its pages of one layer, [num_pages, 1, num_heads, BLOCK, width]."""

    heads: Heads
    weights: DeltaWeights
    inputs: Tensor  # [num_tokens, num_heads * width]
    expected: DeltaOutputs
    pages: DeltaPools

    @classmethod
    def make(cls, num_tokens: int, heads: Heads) -> Text:
        torch.manual_seed(0)
        num_heads, shared, decay_dim = heads
        taps = torch.randn(num_heads, TAPS, heads.channels, device="cuda") / TAPS**0.5
        a_log = torch.rand(num_heads, shared, device="cuda") - 3
        weights = DeltaWeights(taps, a_log, torch.randn(num_heads, shared, decay_dim, device="cuda"), DIM, DIM)
        inputs = normal(num_tokens, num_heads * sum(heads.parts))
        q, k, v, _, b, a = views(inputs, heads)
        rows = torch.cat([q, k, v, b, a], 2)
        state = torch.zeros(weights.state_shape, device="cuda")
        expected = gated_delta_rule(F.pad(rows, (0, 0, 0, 0, TAPS - 1, 0)), state, weights, BLOCK)
        pages = [each.unflatten(0, (-1, BLOCK)).transpose(1, 2).unsqueeze(1) for each in (rows, expected.updates)]
        states = torch.stack(expected.states).view(-1, 1, num_heads, BLOCK, shared * DIM * DIM // BLOCK)
        return cls(heads, weights, inputs, expected, DeltaPools(*(each.contiguous() for each in (*pages, states))))

    def pools(self, num_seqs: int, *, is_filled: bool) -> list[DeltaPools]:
        """Return copies of the pools of sequences of this text, whose pages follow each other behind a padding page."""
        num_pages, num_bytes = len(self.pages.rows), sum(each.nbytes for each in self.pages)
        made: list[DeltaPools] = []
        for _ in range(copies(num_seqs * num_bytes)):
            own = [each.new_zeros(1 + num_seqs * num_pages, *each.shape[1:]) for each in self.pages]
            for pool, pages in zip(own, self.pages, strict=True) if is_filled else ():
                pool[1:].view(num_seqs, *pages.shape).copy_(pages)
            made.append(DeltaPools(*own))
        return made

    def plan(self, num_seqs: int, lens: Tensor, num_tokens: int) -> DeltaPlan:
        """Return the plan of a round, or of a prompt of one sequence."""
        table = torch.arange(1, 1 + num_seqs * len(self.pages.rows), device="cuda").view(num_seqs, -1)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda") if num_seqs == 1 else None
        is_round = num_seqs > 1 or num_tokens <= TAPS
        return DeltaPlan.of(table, lens, None if is_round else starts, num_tokens, BLOCK, BLOCK)


def views(inputs: Tensor, heads: Heads) -> DeltaInputs:
    """Return the parts of each head, which lie side by side in Qwen's projections. In Kimi's, heads of a part do."""
    if heads == BY_HEAD:
        return DeltaInputs(*inputs.unflatten(1, (heads.keys, -1)).split(heads.parts, 2))
    parts = inputs.split([heads.keys * part for part in heads.parts], 1)
    return DeltaInputs(*(part.unflatten(1, (heads.keys, -1)) for part in parts))


def near(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return the norm of the difference over that of the expected numbers."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < tolerance, error
    return error


def rounds(options: argparse.Namespace, heads: Heads = BY_HEAD, *, has_peer: bool = True) -> Iterator[Kernel]:
    text = Text.make(2 * BLOCK, heads)
    for num_seqs, num_rows in itertools.product(options.sequences, options.rows):
        first = BLOCK + (torch.arange(num_seqs, device="cuda") * 37 + 32) % (BLOCK - num_rows)  # none ends a block
        places = first[:, None] + torch.arange(num_rows, device="cuda")
        inputs, plan = text.inputs[places].flatten(0, 1), text.plan(num_seqs, first + num_rows, num_seqs * num_rows)
        pools = text.pools(num_seqs, is_filled=True)

        def call(own: DeltaPools, inputs: Tensor = inputs, plan: DeltaPlan = plan) -> Tensor:
            return delta_round(views(inputs, heads), text.weights, own, plan, is_alone=True)

        def check(pools: Any = pools, places: Tensor = places, call: Any = call) -> float:
            seqs = torch.arange(len(places), device="cuda")[:, None].expand_as(places)
            pages, slots = 2 + 2 * seqs, places - BLOCK
            pools[0].updates[pages, 0, :, slots] = torch.nan  # the kernel writes them again
            found = call(pools[0])
            stored = pools[0].updates[pages, 0, :, slots]
            near(stored[..., : heads.used], text.expected.updates[places][..., : heads.used], UPDATE_ERROR["rounds"])
            return near(found.view(*places.shape, -1, DIM), text.expected.outputs[places], OUTPUT_ERROR)

        moved = num_seqs * heads.state_bytes + int((first - BLOCK).sum()) * heads.row_bytes + inputs.nbytes
        name = f"{num_seqs} x {num_rows}"
        yield Kernel(name, [lambda own=own, call=call: call(own) for own in pools], moved, check=check)
        if num_rows == 1 and has_peer and heads == BY_HEAD:
            yield from _peer(f"fla, {name}", text, num_seqs, 1, heads.state_bytes * num_seqs * 2)


def tiles(options: argparse.Namespace) -> Iterator[Kernel]:
    """Rounds of one row by other columns, warps and registers than the kernel chooses."""
    chosen = triton_delta_round.TILE_OF_STATE, triton_delta_round.REGISTERS_OF_STATE
    one = argparse.Namespace(sequences=options.sequences, rows=[1])
    for tile in ((32, 4, 128), (32, 2, 168), (32, 2, 200), (64, 2, 255)):
        triton_delta_round.TILE_OF_STATE, triton_delta_round.REGISTERS_OF_STATE = tile[:2], tile[2:]
        for kernel in rounds(one, has_peer=False):
            yield kernel._replace(name="{}, {} columns, {} warps, {} registers".format(kernel.name, *tile))
    triton_delta_round.TILE_OF_STATE, triton_delta_round.REGISTERS_OF_STATE = chosen


def prompts(options: argparse.Namespace, heads: Heads = BY_HEAD) -> Iterator[Kernel]:
    for chunk in options.chunk:
        text = Text.make(chunk, heads)
        plan, pools = text.plan(1, torch.tensor([chunk], device="cuda"), chunk), text.pools(1, is_filled=False)

        def call(own: DeltaPools, text: Text = text, plan: DeltaPlan = plan) -> Tensor:
            return delta_prompt(views(text.inputs, text.heads), text.weights, own, plan)

        def check(text: Text = text, pools: Any = pools, call: Any = call) -> float:
            found = call(pools[0])
            near(pools[0].states[1:], text.pages.states, UPDATE_ERROR["prompts"])
            assert torch.equal(pools[0].rows[1:], text.pages.rows)
            return near(found, text.expected.outputs, OUTPUT_ERROR)

        moved = sum(each.nbytes for each in text.pages) + text.inputs.nbytes
        yield Kernel(f"{chunk}", [lambda own=own, call=call: call(own) for own in pools], moved, check=check)
        if heads == BY_HEAD:
            yield from _peer(f"fla, {chunk}", text, 1, chunk, moved)


def _peer(name: str, text: Text, num_seqs: int, num_tokens: int, num_bytes: int) -> Iterator[Kernel]:
    """Yield the kernel of fla-core for rows of each sequence behind a state, if it is installed. Rows are convolved
    before."""
    try:
        ops = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        print(f"{name}: fla-core cannot be used ({error})")
        return
    rule = ops.fused_recurrent_gated_delta_rule if num_tokens == 1 else ops.chunk_gated_delta_rule
    num_heads, shared, _ = text.heads
    mixed = normal(num_seqs, num_tokens, num_heads, text.heads.channels)
    q, k, v = mixed.split([DIM, DIM, shared * DIM], 3)
    q, k = (each.repeat_interleave(shared, 2).contiguous() for each in (q, k))
    v = v.reshape(num_seqs, num_tokens, num_heads * shared, DIM).contiguous()
    g = -torch.rand(num_seqs, num_tokens, num_heads * shared, device="cuda")
    beta = torch.rand_like(g).bfloat16()
    num_copies = copies(num_seqs * text.heads.state_bytes)
    states = torch.randn(num_copies, num_seqs, num_heads * shared, DIM, DIM, device="cuda")

    def call(state: Tensor) -> object:
        more: dict[str, Any] = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return rule(q, k, v, g=g, beta=beta, **more)

    calls: list[Callable[[], object]] = [lambda state=state: call(state) for state in states]
    yield Kernel(name, calls, num_bytes)


def gates(options: argparse.Namespace) -> Iterator[Kernel]:
    for num in (*options.sequences, *options.chunk):
        num_heads, shared, _ = BY_HEAD
        outputs, inputs = normal(num, num_heads * shared, DIM), normal(num, num_heads * sum(BY_HEAD.parts))
        gate, norm = views(inputs, BY_HEAD).gate, Norm(1 + normal(DIM, scale=0.1), 1e-6)

        def check(outputs: Tensor = outputs, gate: Tensor = gate, norm: Norm = norm) -> float:
            normed = F.rms_norm(outputs.float(), (DIM,), norm.weight.float(), norm.eps)
            expected = normed * F.silu(gate.reshape(outputs.shape).float())
            return near(gate_heads(outputs, gate, norm), expected.flatten(1), 1e-2)

        calls = [lambda outputs=outputs, gate=gate, norm=norm: gate_heads(outputs, gate, norm)] * 20
        yield Kernel(f"{num} tokens", calls, 3 * outputs.nbytes, check=check)


if __name__ == "__main__":
    by_channel = {"channel-rounds": rounds, "channel-prompts": prompts}
    parts = {"rounds": rounds, "prompts": prompts, "gates": gates, "tiles": tiles}
    parts |= {name: functools.partial(part, heads=BY_CHANNEL) for name, part in by_channel.items()}
    measure(__doc__, "delta-rule", parts, sequences=[1, 8, 32, 64], rows=[1, 2, 4], chunk=[2048, 8192])
