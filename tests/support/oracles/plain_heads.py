"""Models and draft heads in plain torch: the formulas of docs/drafter_checkpoints.md on the tensors of a file.

They take whole sequences, float32, without pages, batches or any of the engine's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Branch = tuple[int, ...]  # the tokens of a path through a tree, from its root
Choose = Callable[[Tensor, list[int]], int]  # logits [vocab_size], proposals so far -> the next proposal


class KeyValue(NamedTuple):
    """KV that a layer stores for the rows of one sequence; the keys are rotated."""

    keys: Tensor  # [num_rows, num_kv_heads, head_dim]
    values: Tensor  # [num_rows, num_kv_heads, head_dim]


class Rows(NamedTuple):
    """The result of a head or a model for the rows of one sequence."""

    recurrent: Tensor  # [num_rows, width]; of a model, the states after its last norm
    logits: Tensor  # [num_rows, vocab_size]
    kv: list[KeyValue]  # by layer


class TargetRows(NamedTuple):
    """States that a target leaves for its head and for drafters, of one sequence."""

    final: Tensor  # [num_rows, hidden_size], after the last norm
    residuals: list[Tensor]  # entry j: the residual stream at the input of layer j; the last: before the last norm
    kv: list[KeyValue]  # by layer


class Ends(Protocol):
    """The target's embedding and output matrix: those of a file, or of a loaded model."""

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Plain:
    """The tensors of one directory, and the layers that are made of them. A leading `model.` of names is dropped."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        self.tensors = {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.tensors["embed_tokens.weight"][token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.tensors.get("lm_head.weight", self.tensors["embed_tokens.weight"]))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return self.tensors[f"{name}.weight"] * x * scale

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def model(self, token_ids: Sequence[int]) -> Rows:
        """Run a whole Llama."""
        rows = self.target_rows(token_ids)
        return Rows(rows.final, self.logits(rows.final), rows.kv)

    def target_rows(self, token_ids: Sequence[int]) -> TargetRows:
        """Run a whole Llama."""
        residuals, stored = [self.embed(torch.tensor(token_ids))], list[KeyValue]()
        for i in range(self.config["num_hidden_layers"]):
            x, kv = self.layer(f"layers.{i}", residuals[-1])
            stored.append(kv)
            residuals.append(x)
        return TargetRows(self.norm(residuals[-1], "norm"), residuals, stored)

    def layer(self, prefix: str, x: Tensor, attended: Tensor | None = None) -> tuple[Tensor, KeyValue]:
        """Run a decoder layer on `x` [num_rows, hidden_size]. `attended`: what the attention reads, if it is not the
        normed `x`."""
        out, kv = self.attention(prefix, self.norm(x, f"{prefix}.input_layernorm") if attended is None else attended)
        return self.with_mlp(prefix, x + out), kv

    def attention(self, prefix: str, x: Tensor) -> tuple[Tensor, KeyValue]:
        """Attend causally. Row i is at position i."""
        positions = torch.arange(len(x))
        q, k, v = (self.heads(prefix, x, part) for part in "qkv")
        kv = KeyValue(self.rotate(k, positions), v)
        return self.attend(prefix, self.rotate(q, positions), kv, is_causal=True), kv

    def attend(self, prefix: str, q: Tensor, kv: KeyValue, *, is_causal: bool) -> Tensor:
        """Return the outputs of the attention, whose queries `q` [num_rows, num_heads, head_dim] are rotated."""
        groups = q.shape[1] // kv.keys.shape[1]
        keys, values = (each.repeat_interleave(groups, dim=1).transpose(0, 1) for each in kv)
        scores = q.transpose(0, 1) @ keys.mT * self.config["head_dim"] ** -0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        return self.linear(attended, f"{prefix}.self_attn.o_proj")

    def with_mlp(self, prefix: str, x: Tensor) -> Tensor:
        return x + self.mlp(prefix, x)

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        """Return the second half of a layer, its norm included, without the residual."""
        y = self.norm(x, f"{prefix}.post_attention_layernorm")
        gated = F.silu(self.linear(y, f"{prefix}.mlp.gate_proj")) * self.linear(y, f"{prefix}.mlp.up_proj")
        return self.linear(gated, f"{prefix}.mlp.down_proj")

    def heads(self, prefix: str, x: Tensor, part: str) -> Tensor:
        return self.linear(x, f"{prefix}.self_attn.{part}_proj").view(len(x), -1, self.config["head_dim"])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn the pairs of `x` [num_rows, num_heads, head_dim]."""
        rope = self.config.get("rope_parameters") or self.config
        half = self.config["head_dim"] // 2
        angles = positions.view(-1, 1, 1) * rope["rope_theta"] ** (-torch.arange(half) / half)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


class PlainHead(Plain):
    """A head that takes rows of (state, next token): `kind` as support/checkpoints/heads.py names it."""

    def __init__(self, kind: str, directory: Path, target: Ends) -> None:
        super().__init__(directory)
        self.kind, self.target = kind, target
        ends = (".eh_proj.weight", ".input_proj.weight")
        found = {name.rsplit(".", 2)[0] for name in self.tensors if name.endswith(ends)}
        self.prefixes = sorted(found, key=lambda prefix: int(prefix.rsplit(".", 1)[1]))  # of MTP layers

    def extend(self, rows: TargetRows) -> Tensor:
        """Return the target's states [num_rows, extend width] that the head takes."""
        if self.kind != "eagle3":
            return rows.final
        return torch.cat([rows.residuals[j] for j in self.config["eagle_aux_hidden_state_layer_ids"]], 1)

    def begin(self, extend: Tensor) -> Tensor:
        """Return what the first layer takes of the target's states [num_rows, extend width]."""
        return self.linear(extend, "fc") if self.kind == "eagle3" else extend

    def rows(self, hidden: Tensor, token_ids: Sequence[int], layer: int = 0) -> Rows:
        """Compute row i of (`hidden`[i], `token_ids`[i]) at position i. `hidden` is what `begin` returns, then the
        head's own states. `layer`: which MTP layer."""
        ids = torch.tensor(token_ids)
        match self.kind:
            case "eagle":
                return self._eagle(hidden, self._embedded(ids))
            case "eagle3":
                return self._eagle3(hidden, self._embedded(ids))
            case _ if self.is_mimo:
                return self._mimo(self.prefixes[layer], hidden, self.target.embed(ids))
        return self._deepseek(self.prefixes[layer], hidden, self.target.embed(ids))

    def _embedded(self, ids: Tensor) -> Tensor:
        return (self if "embed_tokens.weight" in self.tensors else self.target).embed(ids)

    @property
    def is_mimo(self) -> bool:
        return "mimo" in self.kind

    def after(self, extend: Tensor, token_ids: Sequence[int], drafted: Sequence[int]) -> Rows:
        """Return the rows of `token_ids`, with the target's states `extend`, and of the `drafted` tokens after them,
        each with the state of the row before."""
        hidden, found = self.begin(extend), self.rows(self.begin(extend), token_ids)
        for num in range(1, len(drafted) + 1):
            hidden = torch.cat([hidden, found.recurrent[-1:]])
            found = self.rows(hidden, [*token_ids, *drafted[:num]])
        return found

    def chain(self, extend: Tensor, token_ids: Sequence[int], num_steps: int, choose: Choose) -> list[int]:
        """Draft `num_steps` tokens after the rows of `token_ids`."""
        drafted: list[int] = []
        for _ in range(num_steps):
            drafted.append(choose(self.after(extend, token_ids, drafted).logits[-1], drafted))
        return drafted

    def layered(self, states: Tensor, token_ids: Sequence[int], choose: Choose) -> tuple[list[KeyValue], list[int]]:
        """Run all MTP layers over the target's `states` [L, width] and `token_ids` 0 .. L; each layer proposes a token.
        Return the layers' KV and the proposals. DeepSeek's layers are chained and MiMo's are not, unless config.json
        says otherwise."""
        tokens, proposals, stored, inputs = list(token_ids), list[int](), list[KeyValue](), states
        for m in range(len(self.prefixes)):
            found = self.rows(inputs, tokens[1 + m : 1 + m + len(states)], m)
            proposals.append(choose(found.logits[-1], proposals))
            tokens.append(proposals[-1])
            stored += found.kv
            if self.config.get("mtp_chained", not self.is_mimo):
                inputs = found.recurrent
        return stored, proposals

    def _eagle(self, hidden: Tensor, embedded: Tensor) -> Rows:
        x, stored = self.linear(torch.cat([embedded, hidden], 1), "fc"), []
        for i in range(self.config["num_hidden_layers"]):
            x, kv = self.layer(f"layers.{i}", x, None if i else x)
            stored.append(kv)
        return Rows(x, self.target.logits(x), stored)

    def _eagle3(self, hidden: Tensor, embedded: Tensor) -> Rows:
        normed = [self.norm(embedded, "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm")]
        residual = normed[1] if self.config.get("norm_before_residual") else hidden
        x, kv = self.layer("midlayer", residual, torch.cat(normed, 1))
        logits = x.new_full((len(x), self.config["vocab_size"]), float("-inf"))
        ids = self.tensors["d2t"].long() + torch.arange(self.config["draft_vocab_size"])
        logits[:, ids] = self.linear(self.norm(x, "norm"), "lm_head")
        return Rows(x, logits, [kv])

    def _mimo(self, prefix: str, hidden: Tensor, embedded: Tensor) -> Rows:
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])  # position 0 has none
        halves = [self.norm(hidden, f"{prefix}.hidden_layernorm"), self.norm(embedded, f"{prefix}.token_layernorm")]
        x, kv = self.layer(prefix, self.linear(torch.cat(halves, 1), f"{prefix}.input_proj"))
        last = self.norm(x, f"{prefix}.final_layernorm")
        return Rows(last, self.target.logits(last), [kv])

    def _deepseek(self, prefix: str, hidden: Tensor, embedded: Tensor) -> Rows:
        halves = [self.norm(embedded, f"{prefix}.enorm"), self.norm(hidden, f"{prefix}.hnorm")]
        x, kv = self.layer(prefix, self.linear(torch.cat(halves, 1), f"{prefix}.eh_proj"))
        return Rows(x, self.target.logits(self.norm(x, f"{prefix}.shared_head.norm")), [kv])


class PlainFrozenHead(Plain):
    """The FROZEN_KV_MTP head over the KV of a target's layers."""

    def __init__(self, directory: Path, target: Ends) -> None:
        super().__init__(directory)
        self.target = target

    def step(self, hidden: Tensor, token: int, kv: Sequence[KeyValue]) -> tuple[Tensor, Tensor]:
        """Return the state after and the logits, [width] and [vocab_size], of one `token` with its state `hidden`
        [width]. `kv`: of every target layer, the rows before the bonus token; the last one's position is the head's."""
        x = self.linear(torch.cat([self.target.embed(torch.tensor([token])), hidden.unsqueeze(0)], 1), "pre_projection")
        for i, source in enumerate(self.config["target_layers"]):
            prefix, rows = f"layers.{i}", kv[source]
            q = self.heads(prefix, self.norm(x, f"{prefix}.input_layernorm"), "q")
            q = self.rotate(q, torch.tensor([len(rows.keys) - 1]))
            x = self.with_mlp(prefix, x + self.attend(prefix, q, rows, is_causal=False))
        final = self.norm(x, "norm")
        output = self.tensors.get("lm_head.weight", self.tensors["embed_tokens.weight"])
        return self.linear(final, "post_projection")[0], F.linear(final, output)[0]

    def logits_after(self, hidden: Tensor, bonus: int, kv: Sequence[KeyValue], drafted: Sequence[int]) -> Tensor:
        """Return logits [vocab_size] after the `bonus` token and the `drafted` ones."""
        logits = torch.empty(0)
        for token in (bonus, *drafted):
            hidden, logits = self.step(hidden, token, kv)
        return logits


def grow(num_steps: int, topk: int, num_tokens: int, logits_after: Callable[[Branch], Tensor]) -> set[Branch]:
    """Grow a dynamic tree (EAGLE-2): each step gives the `topk` best paths `topk` children. Return the `num_tokens`
    best paths of all. A path's score is the sum of log-softmax of its tokens."""
    scores: dict[Branch, float] = {(): 0.0}
    best: list[Branch] = [()]
    for _ in range(num_steps):
        children: dict[Branch, float] = {}
        for path in best:
            found = logits_after(path).log_softmax(-1).topk(topk)
            for value, token in zip(found.values.tolist(), found.indices.tolist(), strict=True):
                children[(*path, token)] = scores[path] + value
        scores |= children
        best = sorted(children, key=lambda path: -children[path])[:topk]
    del scores[()]
    return set(sorted(scores, key=lambda path: -scores[path])[:num_tokens])
