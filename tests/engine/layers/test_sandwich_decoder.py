"""The layer of Gemma against its formula, in torch. Whole models are compared with transformers' in ../models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.decoder import Residual
from baton.engine.layers.sandwich_decoder import GeluMlp, SandwichBody
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import rms_norm_ref

SIZE, INNER, EPS = 12, 20, 1e-6


@dataclass
class _Doubled:
    """An attention that returns twice its input."""

    reader: Linear
    out: Linear

    def __call__(self, normed: Any, context: Any) -> Tensor:
        return 2 * normed


def test_outputs_of_sublayers_are_normed_before_they_are_added() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    out, gate_up, down = draw(SIZE, SIZE), draw(2 * INNER, SIZE), draw(SIZE, INNER)
    norms = [draw(SIZE) for _ in range(3)]
    hidden, x = draw(5, SIZE), draw(5, SIZE)
    mlp = GeluMlp(Linear.of(gate_up), Linear.of(down))
    body = SandwichBody(_Doubled(Linear.of(out), Linear.of(out)), norms[0], mlp, norms[1], norms[2])
    stream = Residual(hidden.clone(), EPS)
    body(stream, x, None)  # type: ignore[arg-type]
    expected = hidden + rms_norm_ref(2 * x @ out.T, norms[1], EPS)
    gate, up = (rms_norm_ref(expected, norms[0], EPS) @ gate_up.T).chunk(2, 1)
    expected += rms_norm_ref((F.gelu(gate, approximate="tanh") * up) @ down.T, norms[2], EPS)
    torch.testing.assert_close(stream.settled(), expected, atol=1e-4, rtol=1e-5)
