"""Synthetic checkpoints with random weights: real sizes, sane logits, a tokenizer that the router takes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
import tensor_files
import torch
from planted_models import random_prompt, small

from baton.engine.checkpoint.fingerprint import fingerprint
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models.registry import tensor_specs
from baton.engine.work import BatchRow
from baton.router.text.tokenizer import TextTokenizer


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.24),
        ("llama-3.1-8b", 8.03),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.53),
        ("deepseek-v2-lite", 15.71),
        ("gpt-oss-20b", 20.91),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_original(tmp_path: Path, name: str, billions: float) -> None:
    config = tensor_files.write_config(tmp_path, synthetic.ARCHITECTURES[name])
    num_parameters = sum(torch.Size(spec.shape).numel() for spec in tensor_specs(config))
    assert round(num_parameters / 1e9, 2) == billions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b"])
def test_random_logits_are_neither_certain_nor_arbitrary(tmp_path: Path, name: str, dtype: str) -> None:
    synthetic.write_random(tmp_path, small(name), seed=3)
    engine = Engine(EngineConfig(model=str(tmp_path), device="cpu", threads=1, num_pages=64, dtype=dtype))
    logits = engine.forward([BatchRow(random_prompt(48), 0, [1, 2, 3], num_logits=48)]).float()
    assert 1 < logits.std() < 6
    probs = logits.softmax(-1)
    entropy = -(probs * probs.clamp_min(1e-30).log()).sum(-1)
    assert 1.0 < entropy.quantile(0.1) < entropy.quantile(0.9) < 6.0, entropy  # ln(1024) is 6.9
    assert len(set(logits.argmax(-1).tolist())) > 24


def test_a_model_without_weights_is_for_dummies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = small("qwen3-30b-a3b") | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setitem(synthetic.ARCHITECTURES, "qwen3-30b-a3b", fields)
    synthetic.main(["qwen3-30b-a3b", str(tmp_path), "--config-only"])
    settings = {"device": "cpu", "threads": 1, "num_pages": 64, "load_format": "dummy", "quantization": "fp8"}
    engine = Engine(EngineConfig(model=str(tmp_path), **settings))
    assert engine.forward([BatchRow(random_prompt(20), 0, [1, 2])]).isfinite().all()


@pytest.mark.parametrize(
    ("architecture", "flags", "weight_scale"),
    [("gpt-oss-20b", [], "mxfp4"), ("llama-3.1-8b", ["--fp8-blocks"], "blocks")],
)
@pytest.mark.parametrize("load_format", ["dummy", "planted:maker"])
def test_quantized_weights_are_made_by_the_loader(
    architecture: str, flags: list[str], weight_scale: str, load_format: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(synthetic.ARCHITECTURES, architecture, small(architecture))
    planted = ["--planted"] if load_format == "planted:maker" else []
    synthetic.main([architecture, str(tmp_path), "--layers", "6", "--config-only", *flags, *planted])
    config = read_model_config(tmp_path)
    assert config.quantization is not None and config.quantization.weight_scale == weight_scale
    assert len(config.sliding_window) == 6
    engine = Engine(EngineConfig(model=str(tmp_path), device="cpu", threads=1, num_pages=64, load_format=load_format))
    logits = engine.forward([BatchRow(random_prompt(48), 0, [1, 2, 3], num_logits=48, tail=[1, 2, 3])]).float()
    assert 0.5 < logits.std() < 3
    assert len(set(logits.argmax(-1).tolist())) > 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-oss-20b"], "add --config-only"),
        (["llama-3.1-8b", "--fp8-blocks"], "add --config-only"),
        (["gpt-oss-20b", "--fp8-blocks", "--config-only"], "quantized already"),
    ],
)
def test_files_of_quantized_weights_are_not_written(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        synthetic.main([*arguments, str(tmp_path)])
    assert words in capsys.readouterr().err


def test_shards_are_bounded_indexed_and_alike_for_one_seed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed, shard_bytes in zip(paths, (3, 3, 4), (1 << 20, 1 << 30, 1 << 20), strict=True):
        synthetic.write_random(path, small("llama-3.1-8b"), seed=seed, shard_bytes=shard_bytes)
    a, b, c = (sorted(path.glob("*.safetensors")) for path in paths)
    assert len(a) > 3
    assert len(b) == 1
    assert all(path.stat().st_size < (1 << 20) + (1 << 16) for path in a)
    assert fingerprint(paths[0]) == fingerprint(paths[1]) != fingerprint(paths[2])
    assert len(c) == len(a)


def test_the_router_reads_the_tokenizer(tmp_path: Path) -> None:
    tensor_files.write_tokenizer(tmp_path, 1024)
    tokenizer = TextTokenizer((tmp_path / "tokenizer.json").read_bytes())
    ids = asyncio.run(tokenizer.encode("t5 t1023  t0\nt17", add_special_tokens=True))
    assert ids == [5, 1023, 0, 17]
    assert tokenizer.decode(ids) == "t5 t1023 t0 t17"
    assert tokenizer.inner.get_vocab_size() == 1024


def test_the_command_writes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.ARCHITECTURES, "llama-3.2-1b", small("llama-3.2-1b"))
    synthetic.main(["llama-3.2-1b", str(tmp_path), "--layers", "2", "--dtype", "float16", "--seed", "7"])
    config = read_model_config(tmp_path)
    assert (config.num_layers, config.checkpoint_dtype, config.tie_word_embeddings) == (2, "float16", True)
    assert config.eos_token_ids == ()
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"]["factor"] == 32.0
