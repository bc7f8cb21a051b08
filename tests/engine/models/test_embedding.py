"""The ends of a model: rows of a table, and the product that shares it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.engine.models.decoder import Embedding, LmHead
from baton.engine.products.dense import DenseProduct
from baton.engine.products.linear import Linear


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_rows_are_copies() -> None:
    embedding, ids = Embedding(table()), torch.tensor([3, 3, 11, 0])
    rows = embedding(ids)
    assert torch.equal(rows, table()[ids])
    rows.zero_()
    assert torch.equal(embedding(ids), table()[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_multiplies_by_the_table(dtype: torch.dtype) -> None:
    embedding, x = Embedding(table(dtype)), torch.ones(2, 8, dtype=dtype)
    torch.testing.assert_close(LmHead.tied(embedding)(x), F.linear(x, table(dtype)))


def test_a_tied_head_in_sixteen_bits_takes_no_memory_of_its_own() -> None:
    embedding = Embedding(table(torch.bfloat16))
    product = LmHead.tied(embedding).linear.product
    assert isinstance(product, DenseProduct) and product.weight is embedding.weight


def test_logits_are_those_of_the_product() -> None:
    linear, x = Linear.dense(table(), torch.ones(12)), torch.ones(2, 8)
    assert torch.equal(LmHead(linear)(x), F.linear(x, table(), torch.ones(12)))
