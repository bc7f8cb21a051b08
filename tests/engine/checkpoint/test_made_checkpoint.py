"""Weights that are made: a directory without files of weights serves, on both nodes alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxfp4
import pytest
import torch
from node_pair import node_pairs, params
from quantized import SCHEMES

from baton.engine.checkpoint.checkpoint import TensorSpec
from baton.engine.checkpoint.made_checkpoint import EveryName, MadeCheckpoint, dummy_tensor
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.kernels.experts.mxfp4 import unpacked
from baton.metadata.errors import ConfigError, ModelError

CPU = torch.device("cpu")


def without_weights(source: Path, path: Path, **fields: Any) -> Path:
    path.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("gpt_oss", {"quantization_config": mxfp4.CONFIG, "intermediate_size": 96}),
        ("llama", {"quantization_config": SCHEMES["blocks"].config}),
        ("glm4_moe", {"quantization_config": SCHEMES["w8a8-static"].config}),
    ],
)
def test_nodes_serve_without_files(
    family: str, fields: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = without_weights(checkpoint(family), tmp_path / "model", **fields)
    texts = set[tuple[int, ...]]()
    for _ in range(2):
        with node_pairs() as start:
            both = {"page_size": 4, "num_pages": 60, "load_format": "dummy"}
            pair = start(model, prefill=both, decode=both)
            pair.submit("r", [5, 9, 300], params(8))
            texts.add(tuple(pair.run()["r", 0].ids))
            assert len({hello.target_fingerprint for hello in pair._hellos.values()}) == 1
    [ids] = texts
    assert len(set(ids)) > 1, "the text varies"


def test_without_the_option_the_files_are_missed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = without_weights(checkpoint("llama"), tmp_path / "model")
    with pytest.raises(ModelError, match=r"has no \*.safetensors files"), node_pairs() as start:
        start(model)


def make_ones(config: ModelConfig) -> Callable[[TensorSpec], torch.Tensor]:
    """A function of the operator's."""
    assert config.architecture == "LlamaForCausalLM"
    return lambda spec: torch.ones(spec.shape) / spec.shape[-1]


def test_a_function_of_the_operator_makes_them(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = without_weights(checkpoint("llama"), tmp_path / "model")
    own = f"{__name__}:make_ones"
    engine = Engine(EngineConfig(model=str(model), device="cpu", threads=1, num_pages=9, load_format=own))
    assert engine.model.embed(torch.tensor([3])).unique().tolist() == [1 / 64]
    dummy = Engine(EngineConfig(model=str(model), device="cpu", threads=1, num_pages=9, load_format="dummy"))
    assert engine.fingerprints != dummy.fingerprints


@pytest.mark.parametrize("name", ["other", "no_module:f", f"{__name__}:no_function"])
def test_a_function_that_is_not_there_is_refused(name: str, checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=9, load_format=name)
    with pytest.raises(ConfigError, match=f"--load-format {name}: .*; use safetensors, dummy, or MODULE:FUNCTION"):
        Engine(config)


def test_numbers_follow_from_the_name() -> None:
    specs = [TensorSpec("a.weight", (64, 256)), TensorSpec("b.weight", (64, 256), ("F8_E4M3",)), TensorSpec("n", (9,))]
    a, b, norm = specs
    made = MadeCheckpoint(Path(), specs, lambda spec: dummy_tensor(spec, CPU))
    assert made.names == {"a.weight", "b.weight", "n"}
    assert torch.equal(made.read("a.weight"), dummy_tensor(a, CPU))
    assert abs(float(made.read("a.weight").std()) * 16 - 1) < 0.05
    assert dummy_tensor(b, CPU).dtype is torch.float8_e4m3fn and torch.equal(dummy_tensor(norm, CPU), torch.ones(9))
    assert made.check(specs) == 2 * 64 * 256 + 64 * 256 + 2 * 9


@pytest.mark.parametrize("in_size", [96, 512, 2880])
def test_numbers_of_mxfp4_keep_the_scale_of_their_input(in_size: int) -> None:
    blocks = TensorSpec("experts.down_proj_blocks", (2, 64, in_size // 32, 16), ("U8",))
    scales = TensorSpec("experts.down_proj_scales", (2, 64, in_size // 32), ("U8",))
    packed, powers = (dummy_tensor(spec, CPU).flatten(0, 1) for spec in (blocks, scales))
    numbers = unpacked(packed.flatten(1), powers, 32)
    assert numbers.shape == (128, in_size)
    assert 0.7 < float(numbers.std()) * in_size**0.5 < 1.5


def test_biases_are_zero() -> None:
    """They would be equal for all tokens, and a router would send all tokens to few experts."""
    for name in ("self_attn.o_proj.bias", "mlp.experts.down_proj_bias"):
        assert not dummy_tensor(TensorSpec(name, (4, 8)), CPU).any()


def test_every_scale_is_there_and_no_bias() -> None:
    names = EveryName()
    assert "model.layers.0.mlp.up_proj.weight_scale" in names and "lm_head.weight_scale" not in names
    assert "model.layers.0.self_attn.q_proj.bias" not in names
