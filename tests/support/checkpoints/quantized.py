"""Checkpoints with FP8 weights, made of plain ones, the model in transformers that rounds as they say, and KV in FP8.

All are written anew from the formats' definitions, with nothing of the engine's: numbers are rounded by a table of
all e4m3 numbers.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from ties import Reference
from torch import Tensor, nn

_E4M3 = sorted(x for x in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() if x == x)
_NUMBERS = torch.tensor(_E4M3, dtype=torch.float64).unique()  # all of them, ascending
_WITHOUT_ROUNDING = "kv_b_proj"  # attention multiplies by parts of it, and rounds no row for them
_OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", _WITHOUT_ROUNDING)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_PROJECTIONS += (*_OF_LATENTS, "wq_b", "wk")  # the last two: of indexers
_PROJECTIONS += ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")  # of a delta rule, without b and a


class Roundings:
    """Rows that an engine has rounded, which a model in transformers follows where either result is right.

    Sums in another order differ in their last bits. So a number near the middle of two e4m3 numbers becomes the one on
    one processor and the other on another. One step is up to 1/14 of the largest number of its group, and all that
    follows differs by a part of it, which depends on the weights. So the model takes the engine's result if the middle
    of both results lies between the two numbers that were rounded. Nothing else is forgiven: all that follows must be
    equal to the last bits.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` holds a file for each process (recorded_roundings.py)."""
        self._folder = folder
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # by size: rows [num_rows, size], and what they became
        self.num_rounded = self.num_followed = 0  # numbers of the model

    def read(self) -> None:
        """Take the rows that the processes have written so far."""
        found = defaultdict[int, list[tuple[Tensor, Tensor]]](list)
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as file, suppress(EOFError):
                while True:
                    rows, rounded = map(torch.from_numpy, pickle.load(file))
                    found[rows.shape[1]].append((rows, rounded))
        for size, parts in found.items():
            rows, rounded = map(torch.cat, zip(*parts, strict=True))
            self._rows[size] = rows, rounded

    def forget(self) -> None:
        """Let the model round by itself again."""
        self._rows = {}

    def settled(self, row: Tensor, rounded: Tensor, group: int) -> Tensor:
        """Return `rounded`, what the model makes of `row` [size], with the engine's results where either is right.
        `group`: the numbers that share a scale."""
        self.num_rounded += len(row)
        theirs = self._found(row)
        if theirs is None:
            return rounded
        parts = zip(*(each.split(group) for each in (row, rounded, *theirs)), strict=True)
        return torch.cat([self._settled_group(*each) for each in parts])

    def _found(self, row: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the engine's row, and what it became. Each rank of an engine may have a part of the columns. If the
        engine computed a row several times, this is the last one."""
        bound = _NEAR * row.abs().max()
        for size in sorted(self._rows, reverse=True):
            if len(row) % size:
                continue
            rows, rounded = self._rows[size]
            near = [_near(rows, part, bound) for part in row.split(size)]
            if all(len(each) for each in near):
                last = torch.stack([each[-1] for each in near])
                return rows[last].flatten(), rounded[last].flatten()
        return None

    def _settled_group(self, x: Tensor, rounded: Tensor, theirs: Tensor, their_rounded: Tensor) -> Tensor:
        apart, largest = (x - theirs).abs(), x.abs().max()
        scales_apart = (theirs.abs().max() - largest).abs() / largest  # both scales have roundings, and both quotients
        middle_apart = (x - (rounded + their_rounded) / 2).abs()
        is_other = (rounded - their_rounded).abs() > _NEAR * x.abs()
        is_either = is_other & (middle_apart <= apart + x.abs() * (scales_apart + 4 * 2.0**-24))
        self.num_followed += int(is_either.sum())
        return torch.where(is_either, their_rounded, rounded)


def _near(rows: Tensor, row: Tensor, bound: Tensor) -> Tensor:
    """Return the indices of the rows whose numbers are all within `bound` of those of `row`."""
    index = ((rows[:, 0] - row[0]).abs() <= bound).nonzero()[:, 0]  # few: the rest is looked at for these alone
    return index[(rows[index] - row).abs().amax(1) <= bound]


_NEAR = 1e-4  # how far sums in another order are apart at most, as a part of the largest number of a row


class Scheme(NamedTuple):
    """One public form of FP8 checkpoints."""

    config: dict[str, Any]  # quantization_config
    weight: str  # "blocks", "rows" or "tensor": what has a scale
    inputs: str  # "groups", "rows", "stored" or "none": how x is rounded
    scale_name: str = "weight_scale"
    is_power_of_two: bool = False
    is_in_own_file: bool = False  # hf_quant_config.json
    shape: tuple[int, ...] = ()  # of one number


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": float8 | weights | {"dynamic": False},
        "input_activations": None if inputs is None else float8 | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_BLOCKS = _FP8 | {"weight_block_size": [128, 128]}
_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
SCHEMES = {
    "blocks": Scheme(_BLOCKS, "blocks", "groups", "weight_scale_inv"),
    "ue8m0": Scheme(_BLOCKS | {"scale_fmt": "ue8m0"}, "blocks", "groups", "weight_scale_inv", is_power_of_two=True),
    "fp8": Scheme(_FP8, "tensor", "rows"),
    "fp8-static": Scheme(_FP8 | {"activation_scheme": "static"}, "tensor", "stored"),
    "fp8-mistral": Scheme(
        _FP8 | {"activation_scheme": "static", "weight_block_size": None}, "tensor", "stored", "weight_scale_inv"
    ),
    "w8a8": Scheme(
        _compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), "rows", "rows", shape=(1,)
    ),
    "w8a8-static": Scheme(
        _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}), "tensor", "stored", shape=(1,)
    ),
    "w8a16": Scheme(_compressed({"strategy": "channel"}, None), "rows", "none"),
    "w8a8-blocks": Scheme(
        _compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        "blocks",
        "groups",
    ),
    "modelopt": Scheme(_MODELOPT, "tensor", "stored", is_in_own_file=True),
}
ONLINE = Scheme({}, "rows", "rows")


def quantized(plain: Path, path: Path, scheme: Scheme) -> Path:
    """Write the checkpoint `plain`, which is one file, to `path` in FP8, and return `path`."""
    shutil.copytree(plain, path)
    tensors, out = load_file(path / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.split(".")[-2] not in _PROJECTIONS or not name.endswith(".weight"):
            out[name] = tensor
            continue
        values, scales = _weight(tensor, scheme)
        out[name], last = values.float().to(torch.float8_e4m3fn), scheme.scale_name
        out[f"{name.removesuffix('weight')}{last}"] = scales.float().reshape(
            scheme.shape if scales.ndim == 0 else scales.shape
        )
        if scheme.inputs == "stored":
            own = "activation_scale" if scheme.scale_name == "weight_scale_inv" else "input_scale"
            out[f"{name.removesuffix('weight')}{own}"] = _stored_scale(name).float().reshape(scheme.shape)
        if scheme.is_in_own_file and name.endswith("k_proj.weight"):
            out[f"{name.removesuffix('weight')}k_scale"] = torch.ones(())
    save_file(out, path / "model.safetensors", {"format": "pt"})
    if scheme.is_in_own_file:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": scheme.config}))
        return path
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return path


def rounding_model(plain: Path, scheme: Scheme | None, roundings: Roundings | None = None, **config: Any) -> Any:
    """Return transformers' float32 model of the checkpoint `plain`, whose layers compute as `scheme` says and follow
    `roundings`. `config` overrides config.json."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, **config).eval()
    if scheme is None:
        return model
    for name, module in model.named_modules():
        if scheme is ONLINE and name.endswith(_WITHOUT_ROUNDING):
            continue
        if isinstance(module, nn.Linear) and name.split(".")[-1] in _PROJECTIONS:
            values, scales = _weight(module.weight.detach(), scheme)
            module.weight.data = _spread(values, scales.float().double(), scheme.weight).float()
            if not name.endswith(_WITHOUT_ROUNDING):
                module.forward = _rounded_forward(module, f"{name}.weight", scheme, roundings)
        elif hasattr(module, "gate_up_proj"):
            _round_experts(module, scheme, roundings)
    return model


class RoundingReference(Reference):
    """Transformers' model of a plain checkpoint that rounds as a scheme says. If the text of an engine differs from the
    model's, the model follows the engine's `roundings`, and then only a tie of float32 passes."""

    def __init__(self, plain: Path, scheme: Scheme, roundings: Roundings) -> None:
        self._scheme, self._roundings = scheme, roundings
        super().__init__(plain)

    def __post_init__(self) -> None:
        self.model = rounding_model(self.model_dir, self._scheme, self._roundings)
        self.model.generation_config.eos_token_id = None

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Return the greedy tokens after the prompt, which depend on the roundings that are followed."""
        return self.generate_batch([prompt_ids], max_new_tokens, eos_token_ids)[0]

    def assert_greedy(self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
        if list(ours) == list(theirs):
            return super().assert_greedy(prompt_ids, ours, theirs)
        self._roundings.read()
        super().assert_greedy(prompt_ids, ours, self.generate(prompt_ids, len(theirs)))
        self._roundings.forget()
        return None


def _round_experts(module: Any, scheme: Scheme, roundings: Roundings | None) -> None:
    """Let all experts of a layer compute as `scheme` says, one after the other."""
    gates, downs = (list(getattr(module, name).detach()) for name in ("gate_up_proj", "down_proj"))
    meant = [
        [
            torch.cat([_spread(*_weight(part, scheme), scheme.weight).float() for part in parts])
            for parts in ([*gate_up.chunk(2)], [down])
        ]
        for gate_up, down in zip(gates, downs, strict=True)
    ]

    def forward(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row, (experts, own) in enumerate(zip(chosen.tolist(), shares, strict=True)):
            for expert, share in zip(experts, own, strict=True):
                gate, up = (_row(x[row], "gate_proj", scheme, roundings) @ meant[expert][0].T).chunk(2)
                inner = nn.functional.silu(gate) * up
                out[row] += share * (_row(inner, "down_proj", scheme, roundings) @ meant[expert][1].T)
        return out

    module.forward = forward


def _rounded_forward(
    module: nn.Linear, name: str, scheme: Scheme, roundings: Roundings | None
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rounded = torch.stack([_row(row, name, scheme, roundings) for row in rows]).view(x.shape)
        return nn.functional.linear(rounded, module.weight, module.bias)

    return forward


def _row(row: Tensor, name: str, scheme: Scheme, roundings: Roundings | None) -> Tensor:
    """Return the numbers that a row is rounded to."""
    if scheme.inputs == "none":
        return row
    group = 128 if scheme.inputs == "groups" else len(row)
    parts = []
    for part in row.split(group):
        scale = _stored_scale(name).float() if scheme.inputs == "stored" else part.abs().max() / 448
        if scheme.is_power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
        parts.append(_nearest(part / scale).float() * scale)
    rounded = torch.cat(parts)
    return rounded if roundings is None else roundings.settled(row, rounded, group)


def _weight(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return values that are e4m3 numbers, float64, and their scales."""
    size = {"blocks": (128, 128), "rows": (1, weight.shape[1]), "tensor": weight.shape}[scheme.weight]
    rows = [
        torch.stack([part.abs().max() / 448 for part in band.split(size[1], 1)]) for band in weight.split(size[0], 0)
    ]
    scales = torch.stack(rows).float()
    values = _nearest(weight / _expanded(scales, size, weight.shape))
    return values, scales.reshape(()) if scheme.weight == "tensor" else scales


def _spread(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    size = {"blocks": (128, 128), "rows": (1, values.shape[1]), "tensor": values.shape}[kind]
    return values * _expanded(scales.reshape(1, 1) if scales.ndim == 0 else scales, size, values.shape)


def _expanded(scales: Tensor, size: Any, shape: Any) -> Tensor:
    return scales.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[: shape[0], : shape[1]]


def _stored_scale(name: str) -> Tensor:
    """Return the scale that a layer's rows have in a checkpoint: one for the projections that read the same rows."""
    kind = next(index for index, each in enumerate(("o_proj", "down_proj", "")) if each in name)
    return torch.tensor((0.006, 0.03, 0.015)[kind])


def _nearest(x: Tensor) -> Tensor:
    """Return the nearest e4m3 number of each number, the even one of two; float64."""
    wide = x.double().contiguous()
    above = torch.searchsorted(_NUMBERS, wide).clamp(1, len(_NUMBERS) - 1)
    low, high = _NUMBERS[above - 1], _NUMBERS[above]
    is_even = above % 2 == (len(_NUMBERS) // 2) % 2  # 0 is in the middle and even
    is_high = (wide - low > high - wide) | ((wide - low == high - wide) & is_even)
    return torch.where(is_high, high, low)


# --- KV ---


def fp8_rounded(rows: Tensor) -> Tensor:
    """Return keys or values as FP8 pages hold them, in their dtype: [..., head_dim], each row with a scale."""
    values, scales = _fp8_rows(rows)
    return (values.float() * scales).to(rows.dtype)


def fp8_pool(kv: Tensor) -> Tensor:
    """Return a pool or layer in e4m3 that holds the numbers of `kv` [..., page_size, head_dim] with scales behind each
    block, blocks at multiples of 16 bytes. A row of NaN keeps it."""
    *outer, page_size, head_dim = kv.shape
    num_values, num_scales = (-(-size // 16) * 16 for size in (page_size * head_dim, page_size * 4))
    pool = torch.full((*outer, num_values + num_scales), 0x55, dtype=torch.uint8, device=kv.device)
    values, scales = _fp8_rows(kv)
    found = pool[..., : page_size * head_dim].view(torch.float8_e4m3fn).unflatten(-1, (page_size, head_dim))
    found.view(torch.uint8).copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
    pool[..., num_values:][..., : page_size * 4].view(torch.float32).copy_(scales.squeeze(-1))
    return found


def fp8_numbers(kv: Tensor) -> Tensor:
    """Return the numbers of a pool or layer in e4m3, float32."""
    *outer, page_size, head_dim = kv.shape
    first = kv.storage_offset() + -(-page_size * head_dim // 16) * 16
    whole = torch.empty(0, dtype=torch.float32, device=kv.device).set_(
        kv.untyped_storage(), first // 4, (*outer, page_size), tuple(each // 4 for each in (*kv.stride()[:-2], 4))
    )
    return kv.float() * whole.unsqueeze(-1)


def _fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float().clamp(-57_344, 57_344)  # 448 times the largest scale
    least = wide.abs().amax(-1, keepdim=True).double() / 448
    scales = torch.where(least == 0, 1.0, torch.exp2(torch.ceil(torch.log2(least)))).float()
    values = _nearest((wide / scales).nan_to_num().cpu()).float().to(rows.device)
    return values, scales
