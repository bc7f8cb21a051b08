"""The weights of a checkpoint directory as they are trained: the engine reads a model from them, each under its name.

A directory is made like another one, with the same config.json and new numbers (`fresh`), and is read by the engine's
own readers. What they read stays float32 and takes gradients. `save` rounds it to bfloat16.
"""

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn import functional as F

from ....engine.models.tensors import HeadTensors
from ....engine.products.base import Product
from ....engine.products.linear import Linear
from ....kernels.operations import preferring

TOKENIZER = "tokenizer.json"
BRANCH_ENDS = ("o_proj.weight", "down_proj.weight")


class TrainedProduct(Product):
    """The product of one projection or several, each of which keeps its own weight. A branch of a layer may end in
    it: then a share `dropout` of its output is zeroed as long as gradients are taken."""

    __slots__ = ("_biases", "_dropout", "_weights", "in_size", "out_size")

    def __init__(self, weights: list[Tensor], biases: list[Tensor], dropout: float) -> None:
        self.in_size, self.out_size = weights[0].shape[1], sum(len(each) for each in weights)
        self._weights, self._biases, self._dropout = weights, biases, dropout

    @classmethod
    def build(cls, source: Any) -> None:
        """Serve no weight that serving reads."""

    def __call__(self, x: Tensor, *, norm: Any = None, residual: Any = None) -> Tensor:
        assert norm is None and residual is None, "nothing is fused here"
        product = F.linear(x, torch.cat(self._weights), torch.cat(self._biases) if self._biases else None)
        return F.dropout(product.to(x.dtype), self._dropout, torch.is_grad_enabled())  # float32 under autocast, too


class TrainedWeights(HeadTensors):
    """Reads the tensors of a directory, and keeps them in `parameters` by their names in the file."""

    def __init__(self, directory: Path, device: torch.device, dropout: float = 0.0) -> None:
        super().__init__(directory, torch.float32, device)
        self.parameters: dict[str, Tensor] = {}
        self._dropout = dropout

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        read = super().tensor(name, *shape, dtype=dtype).requires_grad_()
        return self.parameters.setdefault(self.full_name(name), read)

    def fused(self, out_sizes: Mapping[str, int], in_size: int, **_: Any) -> Linear:
        weights = [self.tensor(f"{name}.weight", size, in_size) for name, size in out_sizes.items()]
        biases = [self.tensor(f"{name}.bias", size) for name, size in out_sizes.items() if self.has(f"{name}.bias")]
        is_end = f"{next(iter(out_sizes))}.weight".endswith(BRANCH_ENDS)
        return Linear(TrainedProduct(weights, biases, self._dropout if is_end else 0.0))


def differentiable() -> AbstractContextManager[object]:
    """Return the context of a training step: operations are computed by their references, and a tensor that a layer
    overwrites is kept for the gradient."""
    context = ExitStack()
    context.enter_context(preferring("reference"))
    context.enter_context(allow_mutation_on_saved_tensors())
    return context


def fresh(like: Path, directory: Path, buffers: Mapping[str, Tensor], tokenizer: Path | None = None) -> None:
    """Write a directory like `like` with new weights in float32. `buffers` are tensors that are not drawn. A complete
    model takes its tokenizer from the folder `tokenizer`, by a link if that is the folder above.

    Each branch of a layer starts as nothing, so each layer starts as the identity. Each residual stream is read by one
    branch in turn, and is written by all."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (like / name).exists() and like != directory:
            shutil.copyfile(like / name, directory / name)
    own = directory / TOKENIZER
    if tokenizer is not None and not own.exists():
        if tokenizer == directory.parent:
            own.symlink_to(Path("..") / TOKENIZER)
        else:
            shutil.copyfile(tokenizer / TOKENIZER, own)
    stored = load_file(like / "model.safetensors")
    drawn = {name: _new(name, value.shape) for name, value in stored.items() if value.is_floating_point()}
    _write({name: value.contiguous() for name, value in (stored | drawn | dict(buffers)).items()}, directory)


def _new(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith(BRANCH_ENDS):
        return torch.zeros(shape)
    if name.endswith("_hc.mix"):
        return torch.eye(*shape)
    if name.endswith("_hc.read"):
        layer = next(int(part) for part in name.split(".") if part.isdecimal())
        return torch.eye(*shape)[(2 * layer + ("ffn_hc" in name)) % shape[0]]
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape) * (0.02 if "embed" in name else 0.5 * shape[1] ** -0.5)


def save(parameters: Mapping[str, Tensor], directory: Path) -> None:
    """Write the trained weights into `directory` in bfloat16; other tensors there stay as they are."""
    tensors = load_file(directory / "model.safetensors")
    trained = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in parameters.items()}
    _write(tensors | trained, directory)


def _write(tensors: dict[str, Tensor], directory: Path) -> None:
    partial = directory / "model.safetensors.partial"  # the file itself may be mapped
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")
