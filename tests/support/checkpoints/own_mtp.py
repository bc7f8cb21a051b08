"""A prediction layer (MTP) of a target's own family in the target's checkpoint, and its formula (DeepSeek-V3,
arXiv:2412.19437, 2.2) computed with the family's decoder layer in transformers: whole sequences, without a cache.

    x_i = eh_proj([enorm(E(t_{i+1})) ; hnorm(h_i)]);  g_i = layer(x)_i;  logits = lm_head(shared_head.norm(g_i))

MiMo-V2-Flash has final_layernorm for shared_head.norm, hands on the state after it, and its layer is dense, with
a window.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from quantized import Scheme, rounding_model
from safetensors.torch import load_file, save_file
from torch import Tensor

_MIMO_NAMES = {"post_attention_layernorm": "pre_mlp_layernorm", "shared_head.norm": "final_layernorm"}


def with_mtp(source: Path, path: Path, num_layers: int = 1) -> Path:
    """Return a copy of a checkpoint with a random layer behind its last one, and copies of embedding and head.
    `num_layers`: of MiMo-V2-Flash, which may have several."""
    if json.loads((source / "config.json").read_text())["model_type"] == "deepseek_v4":
        return _with_stream_mtp(source, path)
    shutil.copytree(source, path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    generator, num = torch.Generator().manual_seed(7), config["num_hidden_layers"]
    if config["model_type"] == "mimo_v2_flash":
        for layer in range(num_layers):
            tensors |= _mimo_layer(tensors, config, generator, f"model.mtp.layers.{layer}.")
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_layers}))
        return path
    last, own = f"model.layers.{num - 1}.", f"model.layers.{num}."
    alike = {own + name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    for name, tensor in tensors.items():  # an indexer, which the last layer may share with another one
        _, is_indexer, rest = name.partition(".self_attn.indexer.")
        if is_indexer:
            alike[f"{own}self_attn.indexer.{rest}"] = tensor
    for name, tensor in alike.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0)
        tensors[name] = noise if tensor.ndim == 2 else tensor + 0.1 * noise
    size = config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{own}{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    tensors[f"{own}eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) / 8
    tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def _with_stream_mtp(source: Path, path: Path) -> Path:
    """Do the same for DeepSeek-V4, whose layer has the names `mtp.0` and attention to a window alone: that of
    the first layer without its entries."""
    shutil.copytree(source, path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    generator, last = torch.Generator().manual_seed(7), f"model.layers.{config['num_hidden_layers'] - 1}."
    for name, tensor in list(tensors.items()):
        if ".compressor." in name or ".indexer." in name:
            continue
        own = name.removeprefix("model.layers.0.attn.").replace("norm.weight", "kv_norm.weight", 1)
        own = own.replace("q_kv_norm", "q_norm")
        is_attention = name.startswith("model.layers.0.attn.")
        if is_attention or (name.startswith(last) and ".attn." not in name):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0)
            new = f"mtp.0.attn.{own}" if is_attention else f"mtp.0.{name.removeprefix(last)}"
            tensors[new] = noise if tensor.ndim == 2 else tensor + 0.1 * noise
    size, hc_mult = config["hidden_size"], config["hc_mult"]
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    for name in ("e_proj", "h_proj"):
        tensors[f"mtp.0.{name}.weight"] = torch.randn(size, size, generator=generator) / 8
    for name, shape in (("fn", (hc_mult, hc_mult * size)), ("base", (hc_mult,)), ("scale", (1,))):
        tensors[f"mtp.0.hc_head_{name}"] = torch.randn(shape, generator=generator)
    tensors["mtp.0.emb.tok_emb.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["mtp.0.head.weight"] = tensors["head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def _mimo_layer(
    tensors: dict[str, Tensor], config: dict[str, Any], generator: torch.Generator, own: str
) -> dict[str, Tensor]:
    """Return a random dense layer with a window."""
    size, windowed = config["hidden_size"], config["layer_types"].index("sliding_attention")
    dense, found = config["mlp_layer_types"].index("dense"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.startswith((f"model.layers.{windowed}.self_attn.", f"model.layers.{dense}.mlp.")):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0)
            found[own + name.split(".", 3)[3]] = noise
    for name in ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm"):
        found[f"{own}{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    return found | {f"{own}eh_proj.weight": torch.randn(size, 2 * size, generator=generator) / 8}


def with_qwen_mtp(source: Path, path: Path, num_layers: int = 1) -> Path:
    """Return a copy of a Qwen3-Next or Qwen3.5 with random prediction layers, as their files name them."""
    shutil.copytree(source, path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    generator, size = torch.Generator().manual_seed(7), config["hidden_size"]
    last = f"model.layers.{max(i for i, kind in enumerate(config['layer_types']) if kind == 'full_attention')}."
    alike = {name.removeprefix(last): each for name, each in tensors.items() if name.startswith(last)}
    for layer in range(num_layers):
        for name, tensor in alike.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0)
            tensors[f"mtp.layers.{layer}.{name}"] = noise if tensor.ndim > 1 else tensor + 0.1 * noise
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(size, generator=generator)
    tensors["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=generator) / 8
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": num_layers}))
    return path


@torch.no_grad()
def qwen_mtp_states(model: Path, ids: list[int], hidden: Tensor, place: int = 0) -> Tensor:
    """Return the states of prediction layer `place` of a checkpoint of `with_qwen_mtp` after the last norm, by a
    decoder layer of transformers: [num_rows, hidden_size] of tokens `ids`, each with a state of `hidden`."""
    reference, layer, tensors = _qwen_layer(model, place)

    def norm(x: Tensor, name: str) -> Tensor:
        scale = 1 + tensors[f"mtp.{name}.weight"]
        return x * (x.pow(2).mean(-1, keepdim=True) + reference.config.rms_norm_eps).rsqrt() * scale

    embedded = norm(reference.model.embed_tokens(torch.tensor(ids)), "pre_fc_norm_embedding")
    x = (torch.cat([embedded, norm(hidden, "pre_fc_norm_hidden")], 1) @ tensors["mtp.fc.weight"].T)[None]
    positions = torch.arange(len(ids))[None]
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    rotary = reference.model.rotary_emb(x, positions)
    return norm(layer(x, position_embeddings=rotary, attention_mask=mask)[0], "norm")


@functools.cache
def _qwen_layer(model: Path, place: int) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return a model of transformers, one of its layers with the weights of prediction layer `place`, and all tensors
    of the checkpoint."""
    reference = copy.deepcopy(rounding_model(model, None))
    tensors, own = load_file(model / "model.safetensors"), f"mtp.layers.{place}."
    layer = reference.model.layers[reference.config.layer_types.index("full_attention")]
    weights = {name.removeprefix(own): each for name, each in tensors.items() if name.startswith(own)}
    experts = [name for name in weights if ".experts." in name]
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        num = len({each.split(".")[2] for each in experts})
        stacked = [torch.cat([weights[f"mlp.experts.{i}.{part}.weight"] for part in parts]) for i in range(num)]
        weights |= {f"mlp.experts.{name}": torch.stack(stacked)} if stacked else {}
    layer.load_state_dict({name: each for name, each in weights.items() if name not in experts})
    return reference, layer, tensors


class OwnMtpOracle:
    """The layer of a checkpoint of `with_mtp`, after the target's states. With a scheme, both round as it says."""

    kind = "mtp-deepseek"

    def __init__(self, path: Path, scheme: Scheme | None = None, layer: int = 0) -> None:
        """`layer`: which one of MiMo-V2-Flash."""
        self.target = rounding_model(path, scheme)
        num, types = self.target.config.num_hidden_layers, getattr(self.target.config, "mlp_layer_types", None)
        # the extra layer's tensors are those of one more ordinary layer, like the last
        more = {} if types is None else {"mlp_layer_types": [*types, types[-1]]}
        self.is_mimo = self.target.config.model_type == "mimo_v2_flash"
        if self.is_mimo:
            more["mlp_layer_types"][-1] = "dense"
            more["layer_types"] = [*self.target.config.layer_types, "sliding_attention"]
        for name, own in (("indexer_types", "full"), ("layer_types", "indexed_attention")):
            if getattr(self.target.config, "index_topk", None) and getattr(self.target.config, name, None):
                more[name] = [*getattr(self.target.config, name), own]
        deeper = rounding_model(path, scheme, num_hidden_layers=num + 1, **more)
        self._layer, self._rotary = deeper.model.layers[num], deeper.model.rotary_emb
        own = f"model.mtp.layers.{layer}." if self.is_mimo else f"model.layers.{num}."
        self._tensors = {
            name.removeprefix(own): tensor
            for name, tensor in load_file(path / "model.safetensors").items()
            if name.startswith(own)
        }

        if self.is_mimo:
            again = {mine: theirs for theirs, mine in _MIMO_NAMES.items()} | {"attention_sink_bias": "sinks"}
            for mine, theirs in again.items():
                self._tensors = {name.replace(mine, theirs): each for name, each in self._tensors.items()}
            own_names = self._layer.state_dict()
            self._layer.load_state_dict({name: self._tensors[name] for name in own_names})

    @torch.no_grad()
    def rows(self, tokens: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
        """Do as `Oracle.rows`."""
        hidden = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state
        ids = tokens[1:]
        state = self._forward(hidden, ids)
        for token in drafted:
            hidden, ids = torch.cat((hidden, state[:, -1:]), dim=1), [*ids, token]
            state = self._forward(hidden, ids)
        normed = state if self.is_mimo else self._norm(state, "shared_head.norm")
        return state[0], self.target.lm_head(normed)[0]

    @torch.no_grad()
    def proposed(self, hidden: Tensor, ids: list[int]) -> int:
        """Return the best token after rows of the target's states [num_rows, hidden_size] and the tokens `ids`."""
        return int(self.target.lm_head(self._forward(hidden[None], ids))[0, -1].argmax())

    def _forward(self, hidden: Tensor, ids: list[int]) -> Tensor:
        embedded = self.target.model.embed_tokens(torch.tensor([ids]))
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), dim=-1)
        x = both @ self._tensors["eh_proj.weight"].T
        num = len(ids)
        mask = torch.full((num, num), float("-inf")).triu(1)[None, None]
        positions = torch.arange(num)[None]
        kind = ("sliding_attention",) if self.is_mimo else ()
        if self.is_mimo:
            is_far = torch.ones(num, num, dtype=torch.bool).tril(-self.target.config.sliding_window)
            mask = mask.masked_fill(is_far, float("-inf"))
        out = self._layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=self._rotary(x, positions, *kind)
        )
        out = out[0] if isinstance(out, tuple) else out
        return self._norm(out, "shared_head.norm") if self.is_mimo else out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self._tensors[f"{name}.weight"]


class StreamMtpOracle:
    """The same of DeepSeek-V4, whose states are all residual streams side by side:

    s_a = e_proj(enorm(E(t_{i+1}))) + h_proj(hnorm(h_ia));  g_i = layer(s)_i;  logits = lm_head(norm(collapse(g_i)))
    """

    kind = "mtp-deepseek"

    def __init__(self, path: Path) -> None:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

        self.target = rounding_model(path, None)
        config, tensors = self.target.config, load_file(path / "model.safetensors")
        num, own = config.num_hidden_layers, "mtp.0."
        deeper = path.with_name(f"{path.name}-deeper")
        shutil.copytree(path, deeper)
        self._tensors = {name.removeprefix(own): each for name, each in tensors.items() if name.startswith(own)}
        as_layer = {f"model.layers.{num}.{name}": each.clone() for name, each in self._tensors.items()}
        as_layer = {name: each for name, each in as_layer.items() if "attn" in name or "ffn" in name}
        save_file(tensors | as_layer, deeper / "model.safetensors", {"format": "pt"})
        more = {
            "num_hidden_layers": num + 1,
            "layer_types": [*config.layer_types, "sliding_attention"],
            "mlp_layer_types": [*config.mlp_layer_types, "moe"],
        }
        model = rounding_model(deeper, None, **more).model
        self._layer, self._rotary = model.layers[num], model.rotary_emb
        self._head = DeepseekV4HyperHead(config)
        self._head.load_state_dict({f"hc_{each}": self._tensors[f"hc_head_{each}"] for each in ("fn", "base", "scale")})
        self._streams: Tensor | None = None  # of the target, before they collapse

        def keep(_: object, args: tuple[Tensor]) -> None:
            self._streams = args[0]

        self.target.model.hc_head.register_forward_pre_hook(keep)

    @torch.no_grad()
    def rows(self, tokens: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
        """Do as `Oracle.rows`."""
        self.target.model(torch.tensor([tokens[:-1]]), use_cache=False)
        assert self._streams is not None
        hidden, ids = self._streams, tokens[1:]
        state = self._forward(hidden, ids)
        for token in drafted:
            hidden, ids = torch.cat((hidden, state[:, -1:]), dim=1), [*ids, token]
            state = self._forward(hidden, ids)
        return state[0].flatten(1), self.target.lm_head(self._norm(self._head(state), "norm"))[0]

    def _forward(self, hidden: Tensor, ids: list[int]) -> Tensor:
        embedded = self._norm(self.target.model.embed_tokens(torch.tensor([ids])), "enorm")
        embedded = embedded @ self._tensors["e_proj.weight"].T
        streams = self._norm(hidden, "hnorm") @ self._tensors["h_proj.weight"].T + embedded.unsqueeze(2)
        num = len(ids)
        behind = torch.arange(num)[:, None] - torch.arange(num)
        is_hidden = (behind < 0) | (behind >= self.target.config.sliding_window)
        mask = torch.zeros(num, num).masked_fill(is_hidden, float("-inf"))[None, None]
        positions = torch.arange(num)[None]
        turns = {name: self._rotary(streams, positions, layer_type=name) for name in ("main", "compress")}
        return self._layer(
            streams,
            input_ids=torch.tensor([ids]),
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=turns,
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self._tensors[f"{name}.weight"]
