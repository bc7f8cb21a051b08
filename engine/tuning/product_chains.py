"""Chains of a model's small products, in the order of a decode step: the surroundings in which tuning.py times them.

    layers of one shape    the first few decoder layers of the model, with attention; of a drafter, without
    feed-forward layers    that stand in no such layer: for all tokens beside experts, or behind attention to latents
    single products        the output matrix, a drafter's input projection, those of attention to latents

The products are found by walking the objects of the model and the drafter, so a new family or drafter needs no line
here. Of a product that ranks share, a rank measures its own share alone: a chain waits for no other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...kernels.products.linear_configs import ProductShape
from ..attention.context import AttentionContext
from ..layers.attention import Attention
from ..layers.decoder import DecoderBody, Mlp, Residual
from ..models.decoder import DecoderModel
from ..products.dense import DenseProduct
from ..products.linear import Linear

CHAIN_BYTES = 1 << 29  # of weights in a chain: several times the L2, so that no product finds its weights there
MAX_COPIES = 16  # of the weight of a single product
_EPS = 1e-5

T = TypeVar("T")


class Use(NamedTuple):
    """A product, and the way in which a layer uses it."""

    linear: Linear
    mode: Literal["plain", "gated", "added"]  # added: to the residual stream

    @property
    def weight(self) -> Tensor:
        """[out_size, in_size]."""
        assert isinstance(self.linear.product, DenseProduct)
        return self.linear.product.weight

    def shape(self, num_rows: int) -> ProductShape:
        assert isinstance(self.linear.product, DenseProduct)
        is_gated = self.mode == "gated" and self.linear.product.bias is None
        return ProductShape.of(num_rows, *self.weight.shape, is_gated=is_gated)

    def run(self, x: Tensor, norm: Tensor) -> Tensor:
        """Return the product of `x` [num_rows, in_size] as a layer computes it. `norm` [in_size]."""
        if self.mode == "plain":
            return self.linear(x)
        if self.mode == "gated":
            return Residual(x, _EPS).gated_product(self.linear, norm)
        stream = Residual(x.new_zeros(len(x), self.linear.out_size), _EPS)
        stream.add(self.linear, x)
        return stream.settled()


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Products in the order of a decode step, and their uses, one per shape."""

    uses: tuple[Use, ...]
    in_size: int
    run: Callable[[Tensor, Tensor, AttentionContext | None], object]  # of x [num_rows, in_size] and a norm [in_size]


_EMPTY = Chain((), 0, lambda *_: None)


def find_chains(model: DecoderModel, drafter: object = None) -> list[Chain]:
    """Return chains with every 16-bit dense product of a model and its drafter: decoder layers of equal shapes, then
    other feed-forward layers, then single products."""
    of_model, bodies = _bodies(model), _bodies([model, drafter])
    in_bodies = [body.mlp for body in bodies if isinstance(body.mlp, Mlp)]
    mlps = [mlp for mlp in _parts([model, drafter], Mlp) if not any(mlp is each for each in in_bodies)]
    in_layers = [linear for body in bodies for linear in (_attention(body).qkv, body.attention.out)]
    in_layers += [linear for mlp in (*in_bodies, *mlps) for linear in (mlp.gate_up, mlp.down)]
    known = {id(linear) for linear in in_layers}
    lone = [linear for linear in _parts([model, drafter], Linear) if id(linear) not in known]
    others = [body for body in bodies if not any(body is each for each in of_model)]
    of_model, others = list(map(_body_alone, of_model)), list(map(_body_alone, others))
    mlps, lone = list(map(_mlp_alone, mlps)), list(map(_alone, lone))
    found = [_chain(group, _body_uses(group[0]), _run_step) for group in _alike(of_model, _body_uses)]
    found += [_chain(group, _body_uses(group[0]), _run_products) for group in _alike(others, _body_uses)]
    found += [_chain(group, _mlp_uses(group[0]), _run_mlp) for group in _alike(mlps, _mlp_uses)]
    found += [_lone(group[0]) for group in _alike(lone, lambda linear: _measurable([Use(linear, "plain")]))]
    return [chain for chain in found if chain.uses]


def _bodies(roots: object) -> list[DecoderBody]:
    """Return the decoder layers whose attention has a product of q, k and v."""
    return [body for body in _parts(roots, DecoderBody) if isinstance(body.attention, Attention)]


def _attention(body: DecoderBody) -> Attention:
    assert isinstance(body.attention, Attention), body
    return body.attention


def _body_alone(body: DecoderBody) -> DecoderBody:
    """Return the layer with the products of this rank's shares. It computes other numbers, as fast."""
    of = _attention(body)
    attention = replace(of, qkv=_alone(of.qkv), out=_alone(of.out))
    mlp = _mlp_alone(body.mlp) if isinstance(body.mlp, Mlp) else body.mlp
    return replace(body, attention=attention, mlp=mlp)


def _mlp_alone(mlp: Mlp) -> Mlp:
    return replace(mlp, gate_up=_alone(mlp.gate_up), down=_alone(mlp.down))


def _alone(linear: Linear) -> Linear:
    alone = linear.product.alone
    return linear if alone is linear.product else Linear(alone)


def _parts(roots: object, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a type that are reachable from `roots` through the engine's own objects, each once."""
    seen: set[int] = set()
    stack: list[Any] = [roots]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            yield each
        if isinstance(each, list | tuple):
            stack += reversed(each)
        elif isinstance(each, dict):
            stack += reversed(list(each.values()))
        elif type(each).__module__.startswith(__name__.rsplit(".", 2)[0]):
            names = [name for base in type(each).__mro__ for name in getattr(base, "__slots__", ())]
            names += getattr(each, "__dict__", ())
            stack += [getattr(each, name) for name in reversed(names) if hasattr(each, name)]


def _measurable(uses: Sequence[Use]) -> tuple[Use, ...]:
    """Return the uses of 16-bit dense weights."""
    return tuple(
        use
        for use in uses
        if isinstance(use.linear.product, DenseProduct) and use.weight.dtype in (torch.bfloat16, torch.float16)
    )


def _body_uses(body: DecoderBody) -> tuple[Use, ...]:
    uses = [Use(_attention(body).qkv, "plain"), Use(body.attention.out, "added")]
    return _measurable(uses) + (_mlp_uses(body.mlp) if isinstance(body.mlp, Mlp) else ())


def _mlp_uses(mlp: Mlp) -> tuple[Use, ...]:
    return _measurable([Use(mlp.gate_up, "gated"), Use(mlp.down, "added")])


def _alike(parts: Sequence[T], uses: Callable[[T], tuple[Use, ...]]) -> list[list[T]]:
    """Return the parts in groups of equal shapes."""
    groups: dict[tuple[ProductShape, ...], list[T]] = defaultdict(list)
    for part in parts:
        groups[tuple(use.shape(1) for use in uses(part))].append(part)
    return list(groups.values())


def _chain(
    parts: Sequence[T],
    uses: tuple[Use, ...],
    run: Callable[[T, Residual, Tensor, AttentionContext | None], None],
) -> Chain:
    """Return a chain of so many parts that their weights fill CHAIN_BYTES. All of them add to the residual stream."""
    num_bytes = sum(use.weight.nbytes for use in uses)
    some = parts[: -(-CHAIN_BYTES // max(1, num_bytes))]
    hidden_size = next((use.linear.out_size for use in uses if use.mode == "added"), 0)

    def run_all(hidden: Tensor, norm: Tensor, step: AttentionContext | None) -> Tensor:
        stream = Residual(hidden.clone(), _EPS)
        for part in some:
            run(part, stream, norm, step)
        return stream.normed(norm)

    return Chain(uses if hidden_size else (), hidden_size, run_all)


def _run_step(body: DecoderBody, stream: Residual, norm: Tensor, step: AttentionContext | None) -> None:
    """Run a layer of the model."""
    if step is None or not isinstance(body.mlp, Mlp):
        _run_products(body, stream, norm, step)
    else:
        body(stream, stream.normed(norm), step)


def _run_products(body: DecoderBody, stream: Residual, norm: Tensor, step: AttentionContext | None) -> None:
    """Run the products of a layer whose attention has no pool here: a part of q, k and v replaces its output."""
    del step
    qkv, out = _attention(body).qkv, body.attention.out
    stream.add(out, _of_width(qkv(_of_width(stream.normed(norm), qkv.in_size)), out.in_size))
    if isinstance(body.mlp, Mlp):
        body.mlp.add_to(stream, norm)


def _run_mlp(mlp: Mlp, stream: Residual, norm: Tensor, step: AttentionContext | None) -> None:
    del step
    mlp.add_to(stream, norm)


def _of_width(x: Tensor, size: int) -> Tensor:
    return x[:, :size] if x.shape[1] >= size else torch.cat([x] * -(-size // x.shape[1]), dim=1)[:, :size]


def _lone(linear: Linear) -> Chain:
    """Return a chain of one product, over as many copies of its weight as the L2 cannot hold."""
    uses = _measurable([Use(linear, "plain")])
    if not uses:
        return _EMPTY
    weight, product = uses[0].weight, linear.product
    assert isinstance(product, DenseProduct)
    num_copies = min(MAX_COPIES, -(-(CHAIN_BYTES // 2) // weight.nbytes))
    copies: list[Linear] = []  # made by the first run, since most starts measure nothing

    def run_all(x: Tensor, norm: Tensor, step: AttentionContext | None) -> Tensor:
        del step
        y = x
        copies.extend(Linear.dense(weight.clone(), product.bias) for _ in range(num_copies - 1 - len(copies)))
        for each in (*copies, linear):
            y = each(Residual(x, _EPS).normed(norm))
        return y

    return Chain(uses, linear.in_size, run_all)
