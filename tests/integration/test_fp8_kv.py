"""Nodes whose pools are in FP8: the engine against transformers with a cache that rounds, and all ways to one text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import drafters
import heads
import pytest
import torch
from matrix import PAGE_SIZE, Cell, Plain, run_cell
from node_pair import node_pairs
from quantized import fp8_rounded
from thinned import thinned
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prompts import known_tokens
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.kernels.products.fp8 import E4M3
from baton.kernels.state.fp8_pages import scales_of
from baton.metadata.handoff.schema.schema import differences, kv_layouts

LENGTH = 30
NEAR = 2e-3  # of logits up to 1: sums in another order round a number to the other neighbour, rarely
TWO = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
ODD_PAGE_SIZE = 5  # no block of a page, of values or of scales, ends at a multiple of 16 bytes


class RoundingCache(DynamicCache):
    """A cache that rounds each head of each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(fp8_rounded(key_states), fp8_rounded(value_states), *args, **kwargs)


def engine_of(model: Path, **settings: Any) -> Engine:
    common: dict[str, Any] = {"device": "cpu", "threads": 1, "page_size": PAGE_SIZE, "num_pages": 40}
    return Engine(EngineConfig(model=str(model), **(common | settings)))


@torch.inference_mode()
def logits_of(engine: Engine, token_ids: list[int], chunk: int) -> Tensor:
    """Return the logits of all tokens, [num_tokens, vocab_size], beside a row of another sequence."""
    pages = engine.pool.allocate(2 * -(-len(token_ids) // PAGE_SIZE), Owner.REQUEST)
    own, other = pages[::2], pages[1::2]
    found = []
    for start in range(0, len(token_ids), chunk):
        some = token_ids[start : start + chunk]
        rows = [BatchRow([5], start, other), BatchRow(some, start, own, len(some))]
        found.append(engine.forward(rows)[-len(some) :])
    engine.pool.release(pages)
    return torch.cat(found)


@pytest.mark.parametrize("window", [None, 7])
def test_logits_are_those_of_a_cache_that_rounds(window: int | None, checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("mistral", sliding_window=window)
    token_ids = torch.randint(1, 512, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    with torch.inference_mode():
        given = {"input_ids": torch.tensor([token_ids]), "use_cache": True}
        plain = reference(**given).logits[0]
        rounded = reference(**given, past_key_values=RoundingCache(config=reference.config)).logits[0]
    engine = engine_of(model, kv_dtype="fp8")
    assert engine.kv.dtype == E4M3
    scale = float(plain.abs().max())
    assert float((rounded - plain).abs().max()) > 5 * NEAR * scale
    for chunk in (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, LENGTH):
        found = logits_of(engine, token_ids, chunk)
        assert float((found - rounded).abs().max()) < NEAR * scale, chunk


# --- nodes ---


class Case(NamedTuple):
    """A pair of nodes with a drafter."""

    drafter: str
    topk: int = 1
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    page_size: int = PAGE_SIZE

    def __str__(self) -> str:
        nodes = (*self.prefill.values(), *self.decode.values(), f"page{self.page_size}")
        return "-".join([self.drafter, str(self.topk), *map(str, nodes)])


CASES = (
    Case("eagle", 3, {"transport": "local"}, {"tp": 2, "transport": "local"}, ODD_PAGE_SIZE),
    Case("eagle3", 3, {"tp": 2}, {}),
    Case("standalone", 1, {"transport": "zmq"}, {"transport": "zmq"}, ODD_PAGE_SIZE),
    Case("mtp3-deepseek", 1, {}, {"dp_attention": 2}),
    Case("frozen-kv-mtp", 3),
    Case("ngram"),
)
CELLS = (Cell(False, True, False), Cell(True, True, True))


@pytest.fixture(autouse=True)
def ranks_know_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are shorter than what ranks get to know around a chunk. Let them know what a drafter reads."""
    monkeypatch.setattr(known_tokens, "MARGIN", 4)


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which drafters are often right."""
    return drafters.make_bigram(checkpoint("llama", **TWO), tmp_path_factory.mktemp("model") / "target", 0.5)


@pytest.fixture(scope="module")
def plain(target: Path) -> Plain:
    """The output of one rank without speculation, of whole prompts, one request at a time."""
    return Plain.of(target, kv_dtype="fp8")


def settings_of(case: Case, model: Path, directory: Path) -> dict[str, Any]:
    tree = {"draft_topk": case.topk, "draft_tokens": 8} if case.topk > 1 else {}
    if case.drafter == "ngram":
        return {"speculative": "ngram", "draft_steps": 3}
    if case.drafter == "standalone":
        draft = drafters.perturbed(model, directory / "standalone", 0.1)
        return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}
    if case.drafter in ("eagle", "frozen-kv-mtp"):
        head = drafters.make_right(case.drafter, model, directory / case.drafter)
        return {"speculative": heads.ALGORITHM[case.drafter], "draft_model": str(head), "draft_steps": 3, **tree}
    return {**drafters.settings(case.drafter, model, directory, steps=3), **tree}


@pytest.mark.parametrize("case", thinned(CASES, lambda i, _: i in (0, 3)), ids=str)
def test_output_does_not_depend_on_how_it_is_computed(case: Case, target: Path, plain: Plain, tmp_path: Path) -> None:
    """Chunks of 5 tokens, batches, drafts, prefix hits, preemptions, and ranks that have some heads each."""
    both = {"page_size": case.page_size, "num_pages": 190, "max_running": 10, "chunk_tokens": 5, "kv_dtype": "fp8"}
    both |= settings_of(case, target, tmp_path)
    with node_pairs() as start:
        pair = start(target, prefill={**both, **case.prefill}, decode={**both, **case.decode})
        for cell in CELLS:
            run_cell(pair, cell, plain.cases)
        stats = pair.decode.rounds.stats
        assert stats.num_drafted > 0
        assert stats.num_accepted > (20 if case.drafter in ("eagle", "frozen-kv-mtp", "standalone") else -1), stats


@pytest.mark.parametrize("page_size", [PAGE_SIZE, ODD_PAGE_SIZE])
def test_the_pools_of_target_and_draft_have_the_bytes_that_the_schema_states(
    page_size: int, target: Path, tmp_path: Path
) -> None:
    head = heads.write_head(tmp_path / "eagle", "eagle", target)
    drafting = {"speculative": "eagle", "draft_model": str(head), "page_size": page_size}
    engine = engine_of(target, kv_dtype="fp8", **drafting)
    config, draft = engine.model_config, engine.speculation.draft
    assert draft is not None
    blocks = [each.num_layers * 2 * each.num_kv_heads for each in (config, draft)]
    sizes = [sum(-(-page_size * each // 16) * 16 for each in (own.head_dim, 4)) for own in (config, draft)]
    assert page_size == PAGE_SIZE or blocks[0] * sizes[0] == 1280
    assert engine.pool_bytes == 40 * engine.page_bytes == 40 * sum(map(int.__mul__, blocks, sizes))
    assert [kv.dtype for kv in engine.kvs] == [E4M3, E4M3]
    plain = engine_of(target, **drafting)
    fp8, float32 = "2 heads x 24 float8_e4m3fn + 4 bytes aligned to 16 bytes", "2 heads x 24 float32"
    refusal = differences(engine.schema, plain.schema)  # the sentences with which the nodes refuse each other
    assert refusal[:2] == [f"target.plane {i}: {n}: {fp8} here, {n}: {float32} there" for i, n in enumerate("kv")]
    assert [line.partition(":")[0] for line in refusal[2:]] == ["draft.plane 0", "draft.plane 1"]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_kernels_find_values_and_scales_where_the_layout_says(
    num_kv_heads: int, checkpoint: Callable[..., Path]
) -> None:
    engine = engine_of(checkpoint("llama", num_attention_heads=4, num_key_value_heads=num_kv_heads), kv_dtype="fp8")
    [layout], [pool] = kv_layouts(engine.schema), engine._pools
    pool.random_(256)
    for index, plane in enumerate(layout.planes):
        values, extras = (
            pool.as_strided(view.shape, view.strides, view.offset)
            for view in (layout.values(plane, 40), layout.extras(plane, 40))
        )
        assert torch.equal(values, engine.kv[:, :, index].view(torch.uint8))
        scales = scales_of(engine.kv)[:, :, index].unsqueeze(-1)
        assert torch.equal(extras.view(torch.float32).nan_to_num(), scales.nan_to_num())


def test_a_page_is_copied_with_its_scales(target: Path) -> None:
    engine = engine_of(target, kv_dtype="fp8")
    token_ids = list(range(1, 1 + PAGE_SIZE))
    with torch.inference_mode():
        first = engine.forward([BatchRow(token_ids, 0, [1])])
        engine.copy_page(1, 2)
        assert torch.equal(engine._pools[0][:, 1], engine._pools[0][:, 2]) and engine._pools[0][:, 1].any()
        second = [engine.forward([BatchRow([9], PAGE_SIZE, [page, 3])]) for page in (1, 2)]
    assert torch.equal(*second) and not torch.equal(first, second[0])
