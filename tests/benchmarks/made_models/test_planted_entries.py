"""A planted text in DeepSeek-V4: the engine continues any prompt by the rule, and each defect changes the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
import tensor_files
import torch
from node_pair import node_pairs, params
from planted import PLANTED, planted_model, write_planted
from planted_entries import PlantedEntries
from planted_models import random_prompt
from solo import Solo
from thinned import thinned

from baton.engine.attention.compressed import KV
from baton.engine.attention.gathered_entries import GatheredEntries
from baton.engine.attention.pool_rows import PoolRows
from baton.engine.checkpoint.model_config import ENTRY_POOLS
from baton.kernels.streams import streams
from baton.metadata.errors import ModelError

FLASH = synthetic.ARCHITECTURES["deepseek-v4-flash"]
SMALL: dict[str, Any] = {
    key: value for key, value in FLASH.items() if key not in ("quantization_config", "expert_dtype")
} | {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 4, 128, 4, 128, 0, 0],
    "compress_rate_hca": 16,
    "sliding_window": 12,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 1,  # so that an indexer that is one entry off shows
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 0,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
PROMPT_LEN, NUM_TOKENS = 130, 40
PAGE_SIZE = 16
Planted = tuple[Path, PlantedEntries]


FORMATS = ("32 bits", "published")  # the second has FP8 in blocks, and experts in FP4


@pytest.fixture(scope="module")
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A directory and its model, of a format that a test may ask for."""
    directory, name = tmp_path_factory.mktemp("planted"), getattr(request, "param", FORMATS[0])
    if name == FORMATS[0]:
        model = write_planted(directory, SMALL | {"dtype": "float32"})
    else:
        formats = {key: FLASH[key] for key in ("quantization_config", "expert_dtype")}
        config = tensor_files.write_config(directory, SMALL | formats | PLANTED | {"dtype": "float32"})
        tensor_files.write_tokenizer(directory, config.vocab_size)
        model = planted_model(config)
    assert isinstance(model, PlantedEntries)
    return directory, model


def generated(directory: Path, prompt_len: int, num_steps: int = 3, **settings: Any) -> list[int]:
    if not (directory / "model.safetensors.index.json").exists():
        settings |= {"load_format": "planted:maker"}
    solo = Solo(directory, speculative="ngram", page_size=PAGE_SIZE, **settings)
    sequence = solo.start(random_prompt(prompt_len, 3, SMALL["vocab_size"]), params(NUM_TOKENS + 8), chunk=37)
    return solo.run(sequence, NUM_TOKENS, num_steps)


@pytest.mark.parametrize(
    ("planted", "prompt_len"),
    thinned([(name, num) for name in FORMATS for num in (1, 20, PROMPT_LEN)], lambda i, *_: i in (1, 5)),
    indirect=["planted"],
)
def test_rounds_with_drafts_continue_as_the_rule_says(prompt_len: int, planted: Planted) -> None:
    directory, model = planted
    prompt = random_prompt(prompt_len, 3, SMALL["vocab_size"])
    text = model.continuation(prompt, NUM_TOKENS)
    assert len(set(text)) > NUM_TOKENS * 0.8
    assert generated(directory, prompt_len) == text


def test_every_kind_of_layer_is_read(planted: Planted) -> None:
    _, model = planted
    kinds = {(model.compressed.kinds[read.layer], read.aim.of_entries) for read in model.reads if read.aim is not None}
    assert {("window", False), ("sparse", True), ("heavy", True)} <= kinds
    assert model.reads[-1].aim is None


@pytest.mark.whole
def test_prefill_and_decode_continue_as_the_rule_says(planted: Planted) -> None:
    directory, model = planted
    both = {"page_size": PAGE_SIZE, "num_pages": 200, "chunk_tokens": 64}
    with node_pairs() as start:
        pair = start(directory, prefill=both, decode=both)
        for num in (5, 90, 200):
            prompt = random_prompt(num, num, SMALL["vocab_size"])
            pair.submit(f"{num}", prompt, params(30))
            assert pair.run()[f"{num}", 0].ids == model.continuation(prompt, 30)


def _off_by_one(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Rows of a pool that an earlier forward stored are read one token too early."""

    def put(patch: pytest.MonkeyPatch) -> None:
        read = PoolRows.read

        def early(self: PoolRows, pool: str, place: int, pages: Any, first: int, stop: int) -> Any:
            off = int(pool == name and first > 0)
            return read(self, pool, place, pages, first - off, stop - off)

        patch.setattr(PoolRows, "read", early)

    return put


def _shifted(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Entries of a pool stand one window too late."""

    def put(patch: pytest.MonkeyPatch) -> None:
        entries = GatheredEntries.entries

        def late(self: GatheredEntries, pool: Any, new: Any) -> Any:
            found = entries(self, pool, new)
            return torch.cat([found[:1], found[:-1]]) if pool.entries == name else found

        patch.setattr(GatheredEntries, "entries", late)

    return put


def _mixes_back(patch: pytest.MonkeyPatch) -> None:
    """Streams move to the stream before, not to the next: the mix is transposed."""
    write = streams.write_streams

    def back(states: Any, y: Any, shares: Any) -> Any:
        return write(states, y, shares._replace(mix=shares.mix.transpose(1, 2)))

    patch.setattr(streams, "write_streams", back)


def _hashes_the_next_id(patch: pytest.MonkeyPatch) -> None:
    """A hash layer takes the experts of another token id."""
    from baton.engine.layers.moe import ExpertRouter

    choose = ExpertRouter.__call__

    def other(self: ExpertRouter, x: Any, input_ids: Any = None, *rest: Any) -> Any:
        return choose(self, x, None if input_ids is None else (input_ids + 1) % SMALL["vocab_size"], *rest)

    patch.setattr(ExpertRouter, "__call__", other)


DEFECTS = {
    "keys of windows": _off_by_one(KV),
    "inputs of sparse entries": _off_by_one(ENTRY_POOLS["sparse"].inputs),
    "inputs of heavy entries": _off_by_one(ENTRY_POOLS["heavy"].inputs),
    **{f"{names.entries}": _shifted(names.entries) for names in ENTRY_POOLS.values()},
    "streams": _mixes_back,
    "hash": _hashes_the_next_id,
}


@pytest.mark.parametrize(
    ("planted", "defect"),
    thinned(
        [(name, defect) for name in FORMATS for defect in DEFECTS], lambda i, *_: i == list(DEFECTS).index("streams")
    ),
    indirect=["planted"],
)
def test_each_defect_changes_the_text(defect: str, planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, model = planted
    expected = model.continuation(random_prompt(PROMPT_LEN, 3, SMALL["vocab_size"]), NUM_TOKENS)
    DEFECTS[defect](monkeypatch)
    assert generated(directory, PROMPT_LEN) != expected


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_real_sizes_have_room_for_the_text(name: str, tmp_path: Path) -> None:
    model = PlantedEntries(tensor_files.write_config(tmp_path, synthetic.ARCHITECTURES[name]))
    layers = [read.layer for read in model.reads[:-1]]
    assert layers == sorted(set(layers)) and layers[0] == 0 and layers[-1] == model.config.num_layers - 1
    text = model.continuation(random_prompt(300, 1, model.config.vocab_size), 3)
    assert len(set(text)) == 3


def test_a_model_that_cannot_hold_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="are too small"):
        PlantedEntries(tensor_files.write_config(tmp_path, SMALL | {"o_lora_rank": 4}))
