"""S4 and S6 for several MTP layers: every layer's KV and input, and the proposals, equal a recompute from scratch.

The recompute is plain torch without pages or batches. The test compares before every round of a decode node: after
the handoff, after rounds that accept 0 to K drafts, and after preemptions. Each known defect is put back and caught."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from drafters import target_of
from heads import HYPER_LAYERED, LAYERED, write_head
from node_pair import NodePair, node_pairs, params
from safetensors.torch import load_file

from baton.decode_node.config import DecodeConfig
from baton.engine import prompts as engine_prompts
from baton.engine.batch import ForwardBatch
from baton.engine.draft_shape import DraftShape
from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.drafters.speculation import read_speculation
from baton.engine.model_config import ModelConfig
from baton.engine.models.decoder import DecoderModel
from baton.engine.trees import Drafts
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError
from baton.prefill_node import scheduler as prefill_scheduler

from .test_speculation import SETTINGS, prompts

NUM_LAYERS = 3
CASES = prompts((1, 2, 3, 4, 5, 8, 9, 13, 14, 15, 24), seed=3)


class Scratch(NamedTuple):
    """The layers' KV and proposals, computed only from tokens and the target's states."""

    keys: list[torch.Tensor]  # by layer: [num_rows, num_kv_heads, head_dim]
    values: list[torch.Tensor]
    proposals: list[int]


class ScratchLayers:
    """The layers of a head's directory, computed by the formulas of docs/drafter_checkpoints.md."""

    def __init__(self, directory: Path, target: DecoderModel) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")
        self.target = target
        self.is_mimo = any("mtp_layers" in name for name in self.tensors)
        first = 0 if self.is_mimo else self.config["num_hidden_layers"]
        stem = "model.mtp_layers" if self.is_mimo else "model.layers"
        self.prefixes = [f"{stem}.{first + m}" for m in range(NUM_LAYERS)]
        self.num_streams = self.config.get("hc_mult") or 1
        if self.num_streams > 1:
            self.prefixes = [f"mtp.{m}" for m in range(NUM_LAYERS)]

    def run(self, token_ids: list[int], states: torch.Tensor) -> Scratch:
        """Compute all layers for `token_ids` 0 .. L and the target's `states` [L, handoff width], greedily."""
        tokens, scratch, inputs = list(token_ids), Scratch([], [], []), states
        for m, prefix in enumerate(self.prefixes):
            embedded = self.target.embed(torch.tensor(tokens[1 + m : 1 + m + len(states)]))
            layer = self._layer if self.num_streams == 1 else self._layer_over_streams
            state, logits, k, v = layer(prefix, embedded, inputs)
            scratch.keys.append(k)
            scratch.values.append(v)
            scratch.proposals.append(int(logits[-1].argmax()))
            tokens.append(scratch.proposals[-1])
            inputs = states if self.is_mimo else state  # DeepSeek's are chained
        return scratch

    def _parts(self, prefix: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        """Return a layer's norms and its linear layers, by name."""

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            weight = self.tensors[f"{prefix}.{name}.weight"]
            return weight * x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, self.tensors[f"{prefix}.{name}.weight"], self.tensors.get(f"{prefix}.{name}.bias"))

        return norm, linear

    def _layer_over_streams(
        self, prefix: str, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """s_a = e_proj(enorm(E)) + h_proj(hnorm(h_a)), one layer over streams, and the sum of them to the head."""
        norm, linear = self._parts(prefix)
        states = hidden.unflatten(1, (self.num_streams, -1))
        streams = linear(norm(states, "hnorm"), "h_proj") + linear(norm(embedded, "enorm"), "e_proj").unsqueeze(1)

        def site(name: str, branch: Callable[[torch.Tensor], torch.Tensor]) -> None:
            nonlocal streams
            read, write, mix = (self.tensors[f"{prefix}.{name}.{part}"] for part in ("read", "write", "mix"))
            added = branch(torch.einsum("a,rah->rh", read, streams))
            streams = torch.einsum("ab,rah->rbh", mix, streams) + torch.einsum("b,rh->rbh", write, added)

        stored: list[torch.Tensor] = []

        def attention(x: torch.Tensor) -> torch.Tensor:
            out, k, v = self._attend(norm(x, "input_layernorm"), linear)
            stored.extend((k, v))
            return out

        def mlp(x: torch.Tensor) -> torch.Tensor:
            y = norm(x, "post_attention_layernorm")
            return linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")

        site("attn_hc", attention)
        site("ffn_hc", mlp)
        return streams.flatten(1), self.target.logits(norm(streams.sum(1), "norm")), stored[0], stored[1]

    def _attend(self, y: torch.Tensor, linear: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the attention's output, K and V."""
        q, k, v = (linear(y, f"self_attn.{name}_proj").view(len(y), -1, self.config["head_dim"]) for name in "qkv")
        q, k = self._rotate(q), self._rotate(k)
        groups = q.shape[1] // k.shape[1]
        wide = [each.repeat_interleave(groups, dim=1).transpose(0, 1) for each in (k, v)]
        attended = F.scaled_dot_product_attention(q.transpose(0, 1), *wide, is_causal=True)
        return linear(attended.transpose(0, 1).flatten(1), "self_attn.o_proj"), k, v

    def _layer(self, prefix: str, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm, linear = self._parts(prefix)
        if self.is_mimo:
            embedded = embedded.clone()
            embedded[0] = 0
            halves = [norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")]
        else:
            halves = [norm(embedded, "enorm"), norm(hidden, "hnorm")]
        x = linear(torch.cat(halves, dim=1), "input_proj" if self.is_mimo else "eh_proj")
        attended, k, v = self._attend(norm(x, "input_layernorm"), linear)
        x = x + attended
        y = norm(x, "post_attention_layernorm")
        x = x + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
        last = norm(x, "final_layernorm" if self.is_mimo else "shared_head.norm")
        return (last if self.is_mimo else x), self.target.logits(last), k, v

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.config["head_dim"] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(len(x)).unsqueeze(1) * frequencies).unsqueeze(1)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


class Checked:
    """A pair whose drafter is checked before every round of the decode node. Its proposals are then replaced, so that
    rounds accept 0, 2, 3, 1, ... tokens."""

    def __init__(self, pair: NodePair, head: Path, plain: dict[str, list[int]]) -> None:
        self.pair, self.plain, self.num_checked = pair, plain, 0
        engine = pair.decode.executor.engine
        self._layers = ScratchLayers(head, engine.model)
        self._num_right = itertools.cycle([0, 2, 3, 1, 3, 3, 0, 1])
        self.drafter = engine.drafter
        self._sequences: list[Any] = []  # of the round that runs
        self._submit, self._propose = pair.decode.rounds.submit, engine.drafter.propose
        pair.decode.rounds.submit, engine.drafter.propose = self._submitting, self._checked

    def generate(self, name: str, max_tokens: int = 19) -> None:
        for i, prompt in enumerate(CASES):
            self.pair.submit(f"{i} {name}", prompt, params(max_tokens), n=1 + i % 2)
        results = self.pair.run()
        for (rid, _), result in results.items():
            assert result.ids == self.plain[rid.split()[0]], rid

    def _submitting(self, sequences: Any, *rest: Any) -> Any:
        self._sequences = sequences
        return self._submit(sequences, *rest)

    def _checked(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        drafted = self._propose(rows, shape).tokens.clone()
        for row, sequence in enumerate(self._sequences):
            self._check(sequence, rows.draft.row(row), drafted[row].tolist())
            text, at = self.plain[sequence.unit.rid.split()[0]], sequence.num_generated
            num_right = next(self._num_right)
            for step in range(shape.num_steps):
                token = text[at + step] if at + step < len(text) else 0
                drafted[row, step] = token if step < num_right else (token + 1) % 512
        return Drafts(drafted)

    def _check(self, sequence: Any, draft: DraftState, proposed: list[int]) -> None:
        self.num_checked += 1
        engine, num_rows = self.pair.decode.executor.engine, sequence.num_computed
        page_size = engine.pool.page_size
        pages = list(range(1, 2 + num_rows // page_size))
        batch = ForwardBatch.build([BatchRow(sequence.token_ids[:num_rows], 0, pages)], page_size, "cpu")
        kv = torch.zeros_like(engine.kv[:, : len(pages) + 1])
        states = engine.model.forward_with_aux(batch, kv, ()).handoff
        scratch = self._layers.run(sequence.token_ids, states)

        kept = min(NUM_LAYERS - 1, num_rows)
        assert draft.rows is not None and draft.recent is not None
        rows, recent = draft.rows[0], draft.recent[0].tolist()
        assert rows.shape == (NUM_LAYERS - 1, states.shape[1])
        assert recent[NUM_LAYERS - 1 - kept :] == sequence.token_ids[num_rows + 1 - kept :], sequence.unit
        assert torch.allclose(rows[NUM_LAYERS - 1 - kept :], states[num_rows - kept :], atol=1e-4), sequence.unit
        kv = self.drafter._kv[:, sequence.pages].transpose(2, 4).flatten(1, 2)  # [layer, slot, kv head, K|V, head_dim]
        for m in range(NUM_LAYERS):
            num_final = max(0, num_rows - m)  # the others were computed from proposals, or not yet after a preemption
            for which, expected in enumerate((scratch.keys[m], scratch.values[m])):
                stored = kv[m, :num_final, :, which]
                assert torch.allclose(stored, expected[:num_final], atol=1e-4), (sequence.unit, m, which)
        assert proposed == scratch.proposals[: len(proposed)], (sequence.unit, proposed, scratch.proposals)


MakeChecked = Callable[..., Checked]


@pytest.fixture
def make_checked(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[MakeChecked]:
    with node_pairs(checks_books=False) as start:

        def pair_of(model: Path, decode: dict[str, Any], **both: Any) -> NodePair:
            settings = {**SETTINGS, "num_pages": 200, **both}
            return start(model, prefill=settings, decode={**settings, **decode})

        def make(kind: str, decode: dict[str, Any] | None = None, **both: Any) -> Checked:
            model = target_of(kind, checkpoint)
            plain = pair_of(model, {})
            for i, prompt in enumerate(CASES):
                plain.submit(str(i), prompt, params(24))
            texts = {rid: result.ids[:19] for (rid, _), result in plain.run().items()}
            head = write_head(tmp_path / kind, kind, model)
            return Checked(pair_of(model, decode or {}, speculative="mtp", draft_model=str(head), **both), head, texts)

        yield make


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 64])
@pytest.mark.parametrize("kind", (*LAYERED, HYPER_LAYERED))
def test_layers_equal_a_recompute_after_handoff_and_partial_acceptance(
    kind: str, chunk_tokens: int, make_checked: MakeChecked
) -> None:
    checked = make_checked(kind, chunk_tokens=chunk_tokens)
    checked.generate("cold")
    checked.generate("again")  # prefix hits in both caches
    stats = checked.pair.decode.rounds.stats
    assert checked.num_checked > 200
    assert 0 < stats.accepted_at[2] < stats.accepted_at[1] < stats.accepted_at[0] < stats.num_verified, stats
    checked.pair.check_books()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("kind", (*LAYERED, HYPER_LAYERED))
def test_layers_equal_a_recompute_after_preemption(kind: str, page_size: int, make_checked: MakeChecked) -> None:
    checked = make_checked(kind, {"num_pages": 1 + 100 // page_size}, page_size=page_size)
    checked.generate("cold")
    assert checked.pair.decode.stats().preemptions > 0
    checked.pair.check_books()


def _rows_of_the_whole_round(checked: Checked) -> None:
    """The defect: the rows kept are the last ones of the verify, not those before the accepted token."""
    observe = checked.drafter.observe

    def mutated(rows: RoundRows, hidden: torch.Tensor, *more: Any) -> DraftState:
        state = observe(rows, hidden, *more)
        return replace(state, rows=torch.cat([rows.draft.rows, hidden], dim=1)[:, 1 - NUM_LAYERS :])

    checked.drafter.observe = mutated


def _no_second_computation(checked: Checked) -> None:
    """The defect: rows that were computed from proposals are not computed again."""
    drafter = checked.drafter
    observe = drafter.observe

    def mutated(rows: RoundRows, *more: Any) -> DraftState:
        before = drafter._kv.clone()
        state = observe(rows, *more)
        for length, pages in zip(rows.lengths.tolist(), rows.block_table.tolist(), strict=True):
            for position in range(max(0, length + 1 - NUM_LAYERS), length):
                page, slot = pages[position // 4], position % 4
                drafter._kv[:, page, :, :, slot] = before[:, page, :, :, slot]
        return state

    drafter.observe = mutated


def _other_chaining(checked: Checked) -> None:
    """The defect: each layer takes the input of the other family."""
    drafter = checked.drafter
    drafter._is_chained = not drafter._is_chained


def _rows_of_the_last_chunk_alone(checked: Checked) -> None:
    """The defect: the prefill node forgets the states of earlier chunks."""

    def mutated(kept: torch.Tensor | None, states: torch.Tensor, num_rows: int) -> torch.Tensor:
        missing = states.new_zeros(num_rows, states.shape[1])
        return torch.cat([missing, states])[-num_rows:]

    engine_prompts._latest = mutated


def _shared_tail_pages(checked: Checked) -> None:
    """The defect: the prefill node copies only the last page per choice, though more depend on the first token."""
    prefill_scheduler.shared_pages = lambda num_tokens, page_size, _lookahead: (num_tokens - 1) // page_size


DEFECTS = (
    _rows_of_the_whole_round,
    _no_second_computation,
    _other_chaining,
    _rows_of_the_last_chunk_alone,
    _shared_tail_pages,
)


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("kind", (*LAYERED, HYPER_LAYERED))
def test_the_recompute_catches(
    kind: str, defect: Callable[[Checked], None], make_checked: MakeChecked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_prompts, "_latest", engine_prompts._latest)  # put back afterwards
    monkeypatch.setattr(prefill_scheduler, "shared_pages", prefill_scheduler.shared_pages)
    checked = make_checked(kind, chunk_tokens=1)
    defect(checked)
    with pytest.raises(AssertionError):
        checked.generate("cold")


@pytest.mark.parametrize("steps", [1, 2])
def test_fewer_steps_than_layers(steps: int, checkpoint: Callable[..., Path], make_checked: MakeChecked) -> None:
    checked = make_checked("mtp3-deepseek", {"draft_steps": steps})  # prefill has three: the schema is the same
    checked.generate("cold")
    assert len(checked.pair.decode.rounds.stats.accepted_at) == steps
    checked.pair.check_books()


def test_more_steps_than_layers_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama")
    head = write_head(tmp_path, "mtp3-mimo", model)

    def read(steps: int | None) -> int:
        config = DecodeConfig(model=str(model), speculative="mtp", draft_model=str(head), draft_steps=steps)
        return read_speculation(config, model, ModelConfig.from_dir(model), "float32").shape.num_steps

    assert (read(1), read(3), read(None)) == (1, 3, 3)
    with pytest.raises(ConfigError, match=r"draft_steps is 4, but .* has 3 MTP layers"):
        read(4)
