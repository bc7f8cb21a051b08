"""What is read of a checkpoint's quantization, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mxfp4 import CONFIG
from quantized import SCHEMES

from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.quantization import Quantization
from baton.engine.checkpoint.read_quantization import read_quantization
from baton.metadata.errors import ModelError


def read(path: Path, config: Any, own: Any = None) -> Quantization | None:
    (path / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    if own is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    return read_quantization(ConfigFile(path / "config.json"), path)


def test_a_plain_checkpoint_has_none(tmp_path: Path) -> None:
    assert read(tmp_path, None) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_read(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    config, own = (None, scheme.config) if scheme.is_in_own_file else (scheme.config, None)
    found = read(tmp_path, config, own)
    assert found is not None
    assert (found.weight_scale, found.rounding, found.scale_name) == (scheme.weight, scheme.inputs, scheme.scale_name)
    assert found.has_power_of_two_scales == scheme.is_power_of_two and not found.is_online


@pytest.mark.parametrize("named", [{}, {"quant_method": "modelopt"}])
def test_modelopt_may_be_in_config_json(named: dict[str, str], tmp_path: Path) -> None:
    """Qwen3-32B-FP8-Static-PerTensor does not name it."""
    eight_bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    published = {
        "config_groups": {"group_0": {"input_activations": eight_bits, "weights": eight_bits}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": "FP8",
        "producer": {"name": "modelopt", "version": "0.31.0"},
        "quant_algo": "FP8",
    }
    assert read(tmp_path, published | named) == Quantization("tensor", "stored")


def test_a_number_has_two_names(tmp_path: Path) -> None:
    """MiniMax-M2 has the name of torch. Tensors tell which layers are in 16 bits, and not the list."""
    published = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert read(tmp_path, published) == read(tmp_path, published | {"fmt": "e4m3"})


def test_what_changes_no_number_is_left_out(tmp_path: Path) -> None:
    """Tensors tell which layers are in 16 bits, and pages have scales of their own."""
    cache = WEIGHTS | {"strategy": "tensor", "dynamic": False}
    extra = {"ignore": ["re:.*lm_head", "model.layers.0.mlp.gate"], "kv_cache_scheme": cache, "transform_config": {}}
    assert read(tmp_path, compressed({}, INPUTS) | extra) == read(tmp_path, compressed({}, INPUTS))


def test_fields_that_change_no_number_pass(tmp_path: Path) -> None:
    """They are those that llm-compressor writes."""
    unused = dict.fromkeys(("actorder", "block_structure", "group_size", "scale_dtype", "zp_dtype"))
    own = unused | {"observer": "memoryless_minmax", "observer_kwargs": {"averaging_constant": 0.01}}
    config = compressed(own | {"dynamic": False}, INPUTS | own, version="0.12.2", sparsity_config={"format": "dense"})
    config["config_groups"]["group_0"] |= {"targets": ["Linear"], "format": "float-quantized"}
    assert read(tmp_path, config) == Quantization("rows", "rows")


def test_mxfp4_rounds_nothing_else(tmp_path: Path) -> None:
    assert read(tmp_path, CONFIG) == Quantization("mxfp4", "none")


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": WEIGHTS | weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups} | more


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("fp8", "quantization_config = 'fp8' must be an object"),
        ({"quant_method": "awq"}, "quant_method = 'awq' is not served; fp8, compressed-tensors, modelopt, mxfp4 are"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq' is not served"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not served; None and 'e4m3' and 'float8_e4m3fn' are"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\] is not served"),
        ({"quant_method": "fp8", "activation_scheme": "other"}, "activation_scheme = 'other' is not served"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme = 'static' is not served; 'dynamic' is, beside weight_block_size",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "x"}, "scale_fmt = 'x' is not served"),
        ({"quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not served; 'FP8' is"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not served; 'FP8' is"),
        ({"quant_method": "compressed-tensors"}, "config_groups = None is not served; one group is"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}},
            r"config_groups.group_0.weights = None is not served; 8-bit floats are",
        ),
        (
            compressed({}, transform_config={"config_groups": {"R4": {"type": "hadamard"}}}),
            r"transform_config = \{'config_groups': .* is not served; rows that are multiplied as they are: \{\} is",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": WEIGHTS, "output_activations": INPUTS}},
            },
            r"config_groups.group_0.output_activations = \{.* is not served; None is",
        ),
        (
            {"quant_method": "fp8", "rotation": "hadamard"},
            "rotation = 'hadamard' is not served; it is unknown, and could",
        ),
        ({"quant_method": "mxfp4", "bits": 3}, "quantization_config.bits = 3 is not served; it is unknown"),
        (compressed({"scale_dtype": "torch.uint8"}), "group_0.weights.scale_dtype = 'torch.uint8' is not served"),
        (compressed({"group_size": 64}, INPUTS), "group_0.weights.group_size = 64 is not served; it is unknown"),
        (compressed({"dynamic": True}), "group_0.weights.dynamic = True is not served; False and None are"),
        (
            compressed({}, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config = .* weights that are stored",
        ),
        (
            compressed(
                {"strategy": "block", "block_structure": [128, 128]},
                INPUTS | {"strategy": "group", "group_size": 128, "dynamic": False},
            ),
            "input_activations.dynamic = False is not served; True is",
        ),
        (compressed({"num_bits": 4}), r"config_groups.group_0.weights.num_bits = 4 is not served; 8 is"),
        (compressed({"type": "int"}), "weights.type = 'int' is not served; 'float' is"),
        (compressed({"strategy": "group"}), "weights.strategy = 'group' is not served"),
        (compressed({"symmetric": False}), "weights.symmetric = False is not served"),
        (compressed({}, INPUTS | {"num_bits": 16}), "input_activations.num_bits = 16 is not served"),
        (compressed({}, INPUTS | {"strategy": "group"}), "input_activations.strategy = 'group' is not served"),
        (compressed({}, INPUTS | {"dynamic": "local"}), "input_activations.dynamic = 'local' is not served"),
        (compressed({}, INPUTS, quantization_status="calibration"), "quantization_status = 'calibration'"),
        (
            compressed({"strategy": "block", "block_structure": [128, 128]}),
            "input_activations = None is not served; activations in groups are, beside weights in blocks",
        ),
        (
            compressed({"strategy": "block", "block_structure": [64, 64]}, INPUTS | {"strategy": "group"}),
            "group_size = None is not served; 128 is",
        ),
    ],
)
def test_everything_else_is_refused_by_name(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, config)


def test_an_algorithm_of_modelopt_is_refused_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization.quant_algo = 'W4A8_AWQ' is not served"):
        read(tmp_path, None, {"quant_algo": "W4A8_AWQ"})
    with pytest.raises(ModelError, match=r"quantization.quantized_layers = \{.* is not served; it is unknown"):
        read(tmp_path, None, {"quant_algo": "FP8", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}})
