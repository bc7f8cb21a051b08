"""Models with pools beside that of KV between two nodes: the text does not depend on drafts, on hits, preemptions,
moves, ranks or the place of a prompt. DeepSeek-V3.2 and GLM-5 have indexers (DSA), MiMo-V2-Flash and Gemma 4 have other
heads in layers with a window, and narrow values or shared keys. DeepSeek-V4 has entries of several tokens. Qwen3-Next,
Qwen3.5 and Kimi-Linear have states of a gated delta rule: a block is a page of four tokens, so most rounds pass an
edge, and rejected drafts lie on both sides of it. Most draft by their own prediction layer.

What one node computes equals transformers: tests/engine/models/test_odd_shapes.py."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from heads import write_head
from matrix import ASKS, CELLS, PAGE_SIZE, Plain, Watch, coach, force_steps, run_cell
from node_pair import NodePair, check_moves, node_pairs, params
from own_mtp import with_mtp, with_qwen_mtp
from thinned import is_whole, thinned

from baton.engine.rounds import device_executor
from baton.metadata.handoff.schema.schema import handoff_bytes

SIZES = {"num_attention_heads": 6, "intermediate_size": 96, "hidden_size": 96}  # so that two and three ranks share them
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
DELTA = {"num_key_value_heads": 6, "linear_num_key_heads": 6, "linear_num_value_heads": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {},
    "deepseek_v32": {},
    "mimo_v2_flash": {"num_attention_heads": 12, "num_key_value_heads": 6},
    "gemma4_text": {"num_key_value_heads": 6, "num_global_key_value_heads": 1, "attention_k_eq_v": True, **EXPERTS},
    "gemma3_text": {"num_key_value_heads": 1},
    "deepseek_v4": {"o_groups": 6},
    "qwen3_next": {**DELTA, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, "shared_expert_intermediate_size": 48},
    "kimi_linear": {"linear_num_heads": 6},
}
CHAINS_ONLY = ("deepseek_v4",)
IN_GATE = {"glm_moe_dsa": "tree", "qwen3_next": "chain"}  # pages of all tokens and of states, and drafts


@pytest.fixture(scope="module", params=thinned(FAMILIES, lambda _, name: name in IN_GATE))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, checkpoint: Callable[..., Path]) -> Path:
    source = checkpoint(family, **SIZES | FAMILIES[family])
    path = source.with_name(f"{source.name}-mtp")
    if family.startswith("gemma") or family == "kimi_linear":
        return source
    return path if path.exists() else (with_qwen_mtp if "qwen" in family else with_mtp)(source, path)


@pytest.fixture(scope="module")
def drafter(family: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings that say how the model drafts."""
    if not (family.startswith("gemma") or family == "kimi_linear"):
        return {"speculative": "mtp"}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    head = write_head(tmp_path_factory.mktemp("head"), "eagle", model, **heads)
    return {"speculative": "eagle", "draft_model": str(head)}


@functools.cache
def plain_of(model: Path) -> Plain:
    return Plain.of(model, ASKS if is_whole() else ASKS[:4])


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return plain_of(model)  # once, though pytest makes the fixture anew for each test


@pytest.fixture
def make_pair(
    family: str, model: Path, drafter: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., NodePair]]:
    """`make_pair(buckets, prefill=..., decode=...)`: a pair of nodes whose rounds use these buckets."""
    with node_pairs() as start:

        def make(
            buckets: tuple[int, ...] = (),
            *,
            prefill: Any = (),
            decode: Any = (),
            is_adaptive: bool = False,
            **both: Any,
        ) -> NodePair:
            monkeypatch.setattr(device_executor, "graph_sizes", lambda *_: list(buckets))
            num_pages = 280 if family == "kimi_linear" else 190  # twelve sequences and their states at once
            both = {"num_pages": num_pages, "chunk_tokens": 5, **drafter, **both}
            both = {"page_size": PAGE_SIZE, "max_running": 10, **both}
            nodes = {"prefill": both | dict(prefill), "decode": both | dict(decode)}
            return start(model, **nodes, overlaps=bool(buckets), is_adaptive=is_adaptive)

        yield make


DRAFTS = {
    "chain": ({"draft_steps": 3}, "local", (2, 5), 64),
    "one": ({"draft_steps": 1}, "zmq", (), PAGE_SIZE + 1),
    "ten": ({"draft_steps": 10}, "zmq", (), PAGE_SIZE),
    "tree": ({"draft_steps": 3, "draft_topk": 3, "draft_tokens": 10}, "local", (2, 5), PAGE_SIZE - 1),
    "wide tree": ({"draft_steps": 5, "draft_topk": 2, "draft_tokens": 16}, "zmq", (), 64),
    **{f"{num}": ({"draft_steps": num}, "local", (2, 5), num) for num in (2, 4, 5, 6, 7, 8, 9)},
}


@pytest.mark.parametrize(
    ("family", "name"),
    thinned(
        [(each, name) for each in FAMILIES for name in DRAFTS if "tree" not in name or each not in CHAINS_ONLY],
        lambda _, family, name: IN_GATE.get(family) == name,
    ),
    indirect=["family"],
)
def test_output_is_that_of_speculation_off(name: str, plain: Plain, make_pair: Callable[..., NodePair]) -> None:
    """Drafts are sometimes right, and the rows of those that are not are written again, with the states behind them."""
    shape, transport, buckets, chunk = DRAFTS[name]
    pair = make_pair(buckets, transport=transport, chunk_tokens=chunk, **shape)
    coach(pair.decode.executor.engine.drafter, plain.truths)
    watch = Watch.of(pair)
    for cell in CELLS if is_whole() else CELLS[5::2]:  # mixed batches, cold, and hits with preemptions
        run_cell(pair, cell, plain.cases)
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > stats.num_accepted > 0
    assert (watch.num_moves > 0) == ("tree" in name)  # of accepted rows, to the slots behind the text


@pytest.mark.whole
def test_a_number_of_drafts_that_changes_with_each_round_changes_no_text(
    plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    """Rounds without drafts among them, so that the drafter has to catch up."""
    pair = make_pair(draft_steps=10, is_adaptive=True)
    force_steps(pair, lambda index: (0, 10, 1, 0, 0, 7, 4, 9, 2, 0, 6, 3, 8, 5)[index % 14])
    coach(pair.decode.executor.engine.drafter, plain.truths)
    for cell in CELLS:
        run_cell(pair, cell, plain.cases, "mixed")
    assert pair.decode.rounds.stats.num_accepted > 0


@pytest.mark.whole
@pytest.mark.parametrize("family", [name for name in FAMILIES if "qwen" in name or "kimi" in name], indirect=True)
@pytest.mark.parametrize("page_size", [1, 2, 3, 6])
def test_a_convolution_may_read_more_rows_than_a_block_has(
    page_size: int, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    """Its four rows lie in as many blocks. Pages of three or six tokens have blocks of one or two."""
    pair = make_pair(page_size=page_size, speculative="none", draft_model=None)
    for cell in CELLS[:2]:
        run_cell(pair, cell, plain.cases)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    thinned([(1, 2), (2, 1), (3, 1), (1, 3), (1, "dp"), ("dp", "dp")], lambda *_: False),
)
def test_ranks_of_any_number_have_the_same_text(
    prefill: Any, decode: Any, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    ranks = [{"dp_attention": 2} if each == "dp" else {"tp": each} for each in (prefill, decode)]
    pair = make_pair(prefill=ranks[0], decode=ranks[1], draft_steps=3)
    for case in plain.cases:
        pair.submit(case.ask.name, case.prompt, case.params, n=case.ask.n)
    results = pair.run()
    for case in plain.cases:
        case.check([results[case.ask.name, choice] for choice in range(case.ask.n)])
    assert pair.decode.stats().num_drafted > 0


@pytest.mark.whole
def test_a_handoff_moves_the_bytes_that_the_schema_says(make_pair: Callable[..., NodePair]) -> None:
    pair = make_pair(draft_steps=2, prefix_cache=False)
    schema, moved = pair.hellos["decode"].layout, 0
    for length in (*range(1, 14), 31, 32, 33, 61):
        pair.submit(f"{length}", random.Random(length).choices(range(1, 512), k=length), params(3))
        pair.run()
        moved, before, size = pair.decode.stats().bytes_moved, moved, handoff_bytes(schema, length)
        assert moved - before == size.target_kv + size.draft_kv, length


def test_a_request_that_moved_has_the_same_text(plain: Plain, make_pair: Callable[..., NodePair]) -> None:
    check_moves(make_pair(draft_steps=2), plain.cases[0].prompt * 3)  # more tokens than are picked
