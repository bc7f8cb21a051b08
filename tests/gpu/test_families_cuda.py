"""Families with experts, latents and entries on CUDA, and FP8: text and logits are those of the CPU, which other tests
compare with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import drafters
import mxfp4
import pytest
import torch
from entry_formats import in_published_formats
from matrix import CELLS, PAGE_SIZE, Plain, run_cell
from model_pools import pages_for
from node_pair import NodePair, Result, params
from own_mtp import with_qwen_mtp
from quantized import SCHEMES, quantized

from baton.engine import engine
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.work import BatchRow

Checkpoint = Callable[..., Path]
NUM_TOKENS = 70
# Largest differences of logits from the CPU's, median and worst of all rows, of the logits' spread. A last bit of
# float32 rounds some number of FP8 the other way, rarely. FP8 tensor cores add with fewer bits (errors of 1.3e-4 of a
# sum), so this is frequent, and some rows choose another expert. On a CPU an error of that size has the same effect.
EXACT, ROUNDED, BY_TENSOR_CORES = (1e-3, 4e-3), (2e-3, 0.5), (0.3, 4.0)
IN_16_BITS = (0.2, 4.5)  # each sum and each number between kernels is rounded; some rows choose another expert
OTHER_EXPERTS = (0.4, 9.0)  # a state keeps what another expert did to a row: 0.23 and 6.8 on a CPU in bfloat16
SENSITIVE = (0.8, 4.5)  # on a CPU, noise of 1e-4 in the embedding moves such logits by 0.74 (median) and 4.1 (maximum)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "minimax_m2": ("minimax_m2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v2": ("deepseek_v2", {"first_k_dense_replace": 1, "num_hidden_layers": 3}),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 1, "num_hidden_layers": 3, "q_lora_rank": 48}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "ministral3": ("ministral3", {}),
    "mistral4": ("mistral4", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {"num_kv_shared_layers": 1, "head_dim": 32, "global_head_dim": 64}),
    "gemma4 of published heads": ("gemma4_text", {"head_dim": 256, "global_head_dim": 512, "sliding_window": 33}),
    "gemma4 with experts": (  # few kernels to compile: heads of one width
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 32,
            "global_head_dim": 32,
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_next of published heads": ("qwen3_next", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear of published heads": ("kimi_linear", {"linear_head_dim": 128}),
    "mimo": ("mimo_v2_flash", {}),
    "mimo of published heads": ("mimo_v2_flash", {"head_dim": 192, "v_head_dim": 128, "sliding_window": 33}),
    "gemma3 of published heads": ("gemma3_text", {"head_dim": 256, "num_key_value_heads": 1, "sliding_window": 33}),
}
DRAFTED = [(name, drafter) for name in FAMILIES for drafter in ("eagle3", "ngram")]
DRAFTED.remove(("gemma4 with experts", "eagle3"))  # the attention of trees is that of gemma4
DELTA_RULES = ["qwen3_next", "qwen3_5", "qwen3_next of published heads"]
DELTA_RULES += ["kimi_linear", "kimi_linear of published heads"]
DRAFTED = [each for each in DRAFTED if each[1] == "ngram" or each[0] not in DELTA_RULES]  # these have tests below

# entries of 4 and of 128 tokens, and a window of 128
PUBLISHED_ENTRIES: dict[str, Any] = {"compress_rates": None, "sliding_window": 128, "index_n_heads": 32, "hc_mult": 4}


@pytest.fixture(autouse=True)
def _no_tf32(no_tf32: None) -> None:
    """Products are float32."""


@pytest.mark.parametrize(("name", "drafter"), DRAFTED)
def test_text_of_both_nodes_is_that_of_the_cpu(name: str, drafter: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    family, config = FAMILIES[name]
    model = checkpoint(family, **config)
    if drafter == "ngram":
        check_texts(model, {"speculative": "ngram", "draft_steps": 3})
    else:
        drafts = drafters.settings(drafter, model, tmp_path, steps=3)
        check_texts(model, drafts | {"draft_topk": 2, "draft_tokens": 8})


@pytest.mark.parametrize(
    "name", ["mtp-of-glm4", "mtp-of-deepseek", "mtp-of-glm-dsa", "mtp-of-mimo", drafters.STREAM_MTP]
)
def test_drafts_by_prediction_layers_of_the_checkpoint(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = drafters.target_of(name, checkpoint)
    check_texts(model, drafters.settings(name, model, tmp_path, steps=3))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_delta_rules_with_drafts_by_their_layer(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_texts(with_qwen_mtp(checkpoint(family), tmp_path / "model"), {"speculative": "mtp", "draft_steps": 3})


@pytest.fixture
def _trees_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees under delta rules are refused on a GPU until these tests have passed on one."""
    monkeypatch.setattr(engine, "_check_kernels", lambda *_: None)


@pytest.mark.usefixtures("_trees_are_served")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_next of published heads"])
def test_delta_rules_with_trees_of_drafts_by_their_layer(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    family, config = FAMILIES[name]
    tree = {"draft_steps": 3, "draft_topk": 3, "draft_tokens": 10}
    check_texts(with_qwen_mtp(checkpoint(family, **config), tmp_path / "model"), {"speculative": "mtp", **tree})


@pytest.mark.usefixtures("_trees_are_served")
@pytest.mark.parametrize("name", ["kimi_linear", "kimi_linear of published heads"])
def test_states_that_decay_by_channel_with_trees_of_drafts(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    family, config = FAMILIES[name]
    model = checkpoint(family, **config)
    check_texts(model, drafters.settings("eagle3", model, tmp_path, steps=3) | {"draft_topk": 2, "draft_tokens": 8})


@pytest.mark.usefixtures("_trees_are_served")
def test_trees_of_drafts_pass_edges_of_pages_of_the_usual_length(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = with_qwen_mtp(checkpoint("qwen3_next"), tmp_path / "model")
    tree = {"speculative": "mtp", "draft_steps": 5, "draft_topk": 2, "draft_tokens": 12}
    check_pages(model, {"page_size": 64, **tree}, (1, 3, 55, 61, 63, 64, 65, 127))


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_delta_rules_in_pages_of_the_usual_length(steps: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Prompts end on both sides of edges, cold and as prefix hits, and rounds pass edges."""
    model = with_qwen_mtp(checkpoint("qwen3_next"), tmp_path / "model")
    drafts = {"speculative": "mtp", "draft_steps": steps} if steps else {"speculative": "none"}
    check_pages(model, {"page_size": 64, **drafts}, (1, 3, 61, 63, 64, 65, 127, 131))


def test_entries_with_drafts_by_ngrams(checkpoint: Checkpoint) -> None:
    check_texts(checkpoint("deepseek_v4"), {"speculative": "ngram", "draft_steps": 3})


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_entries_in_pages_of_the_published_length(steps: int, checkpoint: Checkpoint) -> None:
    """Prompts end on both sides of pages and entries, cold and as prefix hits."""
    model = drafters.target_of(drafters.STREAM_MTP, checkpoint, **PUBLISHED_ENTRIES)
    drafts = {"speculative": "mtp", "draft_steps": steps} if steps else {"speculative": "none"}
    check_pages(model, {"page_size": 128, **drafts}, (3, 125, 127, 128, 129, 131, 255, 260))


def check_pages(model: Path, settings: dict[str, Any], lens: Sequence[int]) -> None:
    """Compare the texts behind prompts of these lengths with those of the CPU, cold and as prefix hits."""
    common: dict[str, Any] = {"num_pages": 40, "chunk_tokens": 100, "max_running": 4, **settings}
    found: list[list[Result]] = []
    for device in ("cpu", "cuda"):
        both = common | {"device": device, "dtype": "float32"}
        with closing(NodePair(model, prefill=both, decode=both)) as pair:
            for is_hit in (False, True):
                for num in lens:
                    prompt = torch.randint(1, 512, (num,), generator=torch.Generator().manual_seed(num)).tolist()
                    pair.submit(f"{num} {is_hit}", prompt, params(12))
                pair.run()
            pair.check_books()
            found.append([pair.results[key] for key in sorted(pair.results)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.ids == theirs.ids and ours.failed is None, (ours, theirs)


def check_texts(model: Path, drafts: dict[str, Any]) -> None:
    """Compare the texts of two nodes on CUDA, alone and in batches, with those of the CPU."""
    reference = Plain.of(model)
    both: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": PAGE_SIZE, "num_pages": 190}
    both |= {"max_running": 10, "chunk_tokens": 7, "tune": False, **drafts}
    with closing(NodePair(model, prefill=both, decode=both)) as pair:
        for cell in CELLS[::3]:
            run_cell(pair, cell, reference.cases)
        pair.check_books()
        assert pair.decode.stats().num_drafted > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, checkpoint: Checkpoint) -> None:
    family, config = FAMILIES[name]
    check_logits(checkpoint(family, **config), EXACT)


@pytest.mark.parametrize("name", [*FAMILIES, "deepseek_v4"])
def test_logits_in_16_bits(name: str, checkpoint: Checkpoint) -> None:
    """Other kernels serve than in float32, with a family's own dtypes of norms, tables and states."""
    family, config = FAMILIES.get(name, (name, {}))
    bounds = SENSITIVE if name == "glm_moe_dsa" else IN_16_BITS  # picks of few keys
    if name in ("qwen3_next", "kimi_linear"):
        bounds = OTHER_EXPERTS
    check_logits(checkpoint(family, "bfloat16", **config), bounds, dtype="bfloat16")


@pytest.mark.parametrize(
    ("config", "num_tokens", "chunks"),
    [({}, 70, [33, 1, 1, 20, 15]), (PUBLISHED_ENTRIES, 300, [100, 27, 1, 1, 130, 1, 40])],
    ids=["small", "published"],
)
def test_logits_of_entries(config: dict[str, Any], num_tokens: int, chunks: list[int], checkpoint: Checkpoint) -> None:
    page_size = 128 if config else 16
    check_logits(checkpoint("deepseek_v4", **config), EXACT, num_tokens, chunks, page_size=page_size)


@pytest.mark.parametrize("name", DELTA_RULES)
def test_logits_of_delta_rules_over_edges(name: str, checkpoint: Checkpoint) -> None:
    family, config = FAMILIES[name]
    check_logits(checkpoint(family, **config), EXACT, 300, [100, 27, 1, 1, 130, 1, 40], page_size=64)


@pytest.mark.parametrize("name", ["qwen3_next of published heads", "kimi_linear of published heads"])
def test_logits_of_states_in_bfloat16(name: str, checkpoint: Checkpoint) -> None:
    family, config = FAMILIES[name]
    model, chunks = checkpoint(family, **config), [100, 27, 1, 1, 130, 1, 40]
    check_logits(model, ROUNDED, 300, chunks, page_size=64, state_dtype="bfloat16")


def test_logits_of_entries_in_published_formats(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8, "q_lora_rank": 128}
    check_logits(in_published_formats(checkpoint("deepseek_v4", **sizes), tmp_path / "published"), SENSITIVE)


@pytest.mark.parametrize("scheme", ["blocks", "ue8m0", "fp8-static", "w8a8", "w8a16"])
@pytest.mark.parametrize("family", ["llama", "minimax_m2", "deepseek_v3"])
def test_logits_of_fp8_weights(family: str, scheme: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256} if family != "deepseek_v3" else {}
    model = quantized(checkpoint(family, **sizes), tmp_path / scheme, SCHEMES[scheme])
    check_logits(model, ROUNDED if scheme == "w8a16" else BY_TENSOR_CORES)


def test_logits_of_mxfp4(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = mxfp4.in_mxfp4(checkpoint("gpt_oss", hidden_size=64, intermediate_size=64), tmp_path / "mxfp4")
    check_logits(packed, ROUNDED)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # with sinks and windows
def test_logits_of_fp8_kv(family: str, checkpoint: Checkpoint) -> None:
    check_logits(checkpoint(family), ROUNDED, kv_dtype="fp8")


def check_logits(
    model: Path,
    bounds: tuple[float, float],
    num_tokens: int = NUM_TOKENS,
    small: Sequence[int] = (33, 1, 1, 20, 15),
    **settings: Any,
) -> None:
    """Compare the logits of a prompt, whole and in small chunks, with those on the CPU in float32."""
    ids = torch.randint(1, 512, (num_tokens,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = logits(model, "cpu", ids, [num_tokens], **settings | {"dtype": "float32"})
    spread = float(expected.std())
    assert spread > 0.5
    for chunks in ([num_tokens], small):
        rows = (logits(model, "cuda", ids, chunks, **settings) - expected).abs().amax(1) / spread
        found = float(rows.median()), float(rows.max())
        print(f"{model.name} {settings} {len(chunks)} chunks: {found}")
        assert found[0] < bounds[0] and found[1] < bounds[1], (chunks, found, bounds)


def logits(model: Path, device: str, ids: list[int], chunks: Sequence[int], **settings: Any) -> torch.Tensor:
    """Return the logits of all tokens, [len(ids), vocab_size], on the CPU."""
    settings = {"dtype": "float32", "num_pages": 40, "tune": False} | settings
    engine = Engine(EngineConfig(model=str(model), device=device, **settings))
    pages, tail = pages_for(engine.pool, len(ids))
    table = None if tail is None else tail.pages
    found: list[torch.Tensor] = []
    at = 0
    for num_new in chunks:
        found.append(engine.forward([BatchRow(ids[at : at + num_new], at, pages, num_new, tail=table)]).float().cpu())
        at += num_new
    return torch.cat(found)
