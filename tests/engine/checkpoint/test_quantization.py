"""Quantized models: what is read of a checkpoint and what is refused by name, --quantization, shares of ranks, and
their text through the handoff, which is that of transformers' model that rounds alike, for every batch, chunk and
number of drafts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import drafters
import pytest
import torch
from mxfp4 import CONFIG
from node_pair import NodePair, node_pairs, params
from quantized import ONLINE, SCHEMES, RoundingReference, Scheme, quantized
from recorded_roundings import recorded_roundings
from thinned import is_whole, thinned

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.fingerprint import fingerprint
from baton.engine.checkpoint.quantization import (
    ONLINE_FP8,
    Quantization,
    Rounding,
    WeightScale,
    chosen,
    read_quantization,
)
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.weights import CheckpointWeights
from baton.engine.config import EngineConfig
from baton.engine.engine import read_target
from baton.engine.layers.latent_attention import LatentAttention
from baton.engine.models.decoder import DecoderStack
from baton.engine.models.registry import load_model
from baton.engine.products.base import INNER_IN, INNER_OUT
from baton.engine.products.fp8 import Fp8ProductOnCpu
from baton.engine.ranks.group import OneRank
from baton.engine.ranks.ranks import Ranks
from baton.engine.ranks.shares import check_shares
from baton.metadata.errors import ConfigError, ModelError

BLOCKS = SCHEMES["blocks"]


def config(**more: Any) -> EngineConfig:
    return EngineConfig(router="tcp://127.0.0.1:1", **more)


def test_auto_takes_the_checkpoint_as_it_is(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = checkpoint("llama")
    assert read_target(plain, config()).quantization is None
    path = quantized(plain, tmp_path / "fp8", BLOCKS)
    found = read_target(path, config()).quantization
    assert found is not None and not found.is_online
    assert chosen(found, "auto") is found


def test_nodes_of_both_refuse_each_other(checkpoint: Callable[..., Path]) -> None:
    plain = checkpoint("llama")
    online = read_target(plain, config(quantization="fp8"))
    assert online.quantization == ONLINE_FP8
    here, there = fingerprint(plain, online), fingerprint(plain, read_target(plain, config()))
    assert here.endswith(" fp8 online") and " " not in there and here != there


def test_every_quantization_fits_into_a_fingerprint() -> None:
    """Two schemes with the same words would still differ in the digest."""
    every = itertools.product(get_args(WeightScale), get_args(Rounding), (False, True), (False, True))
    for weight_scale, rounding, is_exact, is_online in every:
        scheme = Quantization(weight_scale, rounding, has_power_of_two_scales=is_exact, is_online=is_online)
        assert 32 + len(" " + scheme.words) <= 64, scheme.words
    assert Quantization("blocks", "groups").words == "fp8 blocks, rounding groups"


def test_a_quantized_checkpoint_is_not_quantized_again(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = quantized(checkpoint("llama"), tmp_path / "fp8", BLOCKS)
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is quantized already; leave the option"):
        read_target(path, config(quantization="fp8"))


def test_ranks_that_would_round_other_rows_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    blocks = read_model_config(quantized(checkpoint("llama"), tmp_path / "fp8", BLOCKS))
    with pytest.raises(ConfigError, match="2 ranks would have 64 hidden units each, which cuts a block; use fewer"):
        check_shares(blocks, 2, "the model", has_all_heads=True)
    wide = dataclasses.replace(blocks, intermediate_size=256)
    check_shares(wide, 2, "the model", has_all_heads=True)
    with pytest.raises(ConfigError, match="2 ranks would have 32 numbers of query heads each"):
        check_shares(wide, 2, "the model")


@pytest.mark.parametrize("has_all_heads", [False, True])
def test_ranks_share_whole_blocks_of_experts(
    has_all_heads: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 256}
    plain = checkpoint("qwen3_moe", **sizes, moe_intermediate_size=128)
    blocks = read_model_config(quantized(plain, tmp_path / "fp8", BLOCKS))
    with pytest.raises(ConfigError, match="2 ranks would have 64 hidden units of an expert each, which cuts a block"):
        check_shares(blocks, 2, "the model", has_all_heads=has_all_heads)
    assert blocks.experts is not None
    wide = dataclasses.replace(blocks, experts=dataclasses.replace(blocks.experts, inner_size=256))
    check_shares(wide, 2, "the model", has_all_heads=has_all_heads)


def test_ranks_share_whole_blocks_of_attention_to_latents(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Of 4 heads each rank has 2, whose keys and values are those of the whole model."""
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 256}
    path = quantized(checkpoint("deepseek_v3", **sizes), tmp_path / "fp8", BLOCKS)
    own = read_model_config(path)
    ups = []
    for ranks in (Ranks(), Ranks(OneOf(0, 2)), Ranks(OneOf(1, 2))):
        stack = load_model(path, own, torch.float32, torch.device("cpu"), ranks=ranks).stack
        assert isinstance(stack, DecoderStack)
        attention = stack.layers[1].body.attention
        assert isinstance(attention, LatentAttention)
        ups.append(attention.up)
    whole, first, second = ups
    assert len(first) == 2 and torch.equal(whole, torch.cat((first, second)))
    odd = read_model_config(quantized(checkpoint("deepseek_v3", intermediate_size=256), tmp_path / "odd", BLOCKS))
    with pytest.raises(ConfigError, match="2 ranks would have 72 numbers of query heads each"):
        check_shares(odd, 2, "the model")


class OneOf(OneRank):
    """A place among ranks that never meet."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("name", ["blocks", "fp8-static", "w8a8-static", "w8a16"])
def test_the_shares_of_ranks_sum_to_the_whole(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A feed-forward layer of 256 hidden units on two ranks: each rounds the rows as one rank does."""
    plain = checkpoint("llama", intermediate_size=256)
    path = quantized(plain, tmp_path / name, SCHEMES[name])
    quantization, cpu = read_model_config(path).quantization, torch.device("cpu")
    x, prefix = torch.randn(5, 64, generator=torch.Generator().manual_seed(5)), "model.layers.0.mlp"
    results = []
    for ranks in ([Ranks()], [Ranks(OneOf(rank, 2)) for rank in range(2)]):
        parts = []
        for own in ranks:
            weights = CheckpointWeights(Checkpoint(path), torch.float32, cpu, ranks=own, quantization=quantization)
            sizes = {f"{prefix}.gate_proj": 256, f"{prefix}.up_proj": 256}
            gate_up = weights.fused(sizes, 64, bias=False, split=INNER_OUT)
            down = weights.linear(f"{prefix}.down_proj", 64, 256, bias=False, split=INNER_IN)
            assert isinstance(down.product.alone, Fp8ProductOnCpu)
            parts.append(down.product.alone(gate_up.gated(x)))
        results.append(torch.stack(parts).sum(0))
    torch.testing.assert_close(*results)


PROMPTS = [random.Random(seed).choices(range(1, 512), k=length) for seed, length in enumerate((3, 17, 40, 40, 29))]
PROMPTS[3] = PROMPTS[2][:20] + PROMPTS[3][20:]  # its beginning is in the prefix cache
PROMPTS = PROMPTS if is_whole() else [PROMPTS[0], *PROMPTS[2:4]]
LENGTH = 16 if is_whole() else 8


@pytest.fixture
def start() -> Iterator[Callable[..., NodePair]]:
    with node_pairs() as start:
        yield start


@functools.cache
def texts_of(plain: Path, name: str) -> list[list[int]]:
    """Return the text for each of PROMPTS of the model that rounds as the scheme of that name says."""
    with recorded_roundings() as nothing:
        reference = RoundingReference(plain, scheme_of(name), nothing)
        return [reference.generate(prompt, LENGTH) for prompt in PROMPTS]


def scheme_of(name: str) -> Scheme:
    return ONLINE if name == "online" else SCHEMES[name]


@pytest.mark.parametrize(
    ("name", "drafter", "nodes"),
    thinned(
        [
            ("blocks", "none", {"chunk_tokens": 7}),
            ("blocks", "eagle", {"chunk_tokens": 64}),
            ("ue8m0", "standalone", {"chunk_tokens": 5}),
            ("w8a8", "eagle3", {"chunk_tokens": 9}),
            ("fp8-static", "ngram", {"chunk_tokens": 64}),
            ("w8a16", "mtp-deepseek", {"chunk_tokens": 11}),
            ("online", "none", {"chunk_tokens": 6, "quantization": "fp8"}),
            ("online", "eagle", {"chunk_tokens": 64, "quantization": "fp8"}),
            ("w8a8", "eagle", {"chunk_tokens": 9, "decode": {"tp": 2}}),
            ("fp8", "none", {"chunk_tokens": 9, "prefill": {"tp": 2}}),
            ("online", "none", {"chunk_tokens": 9, "quantization": "fp8", "decode": {"dp_attention": 2}}),
            ("online", "none", {"chunk_tokens": 9, "quantization": "fp8", "prefill": {"tp": 2}}),
            ("fp8-mistral", "ngram", {"chunk_tokens": 64}),
        ],
        lambda i, *_: i in (2, 4, 5, 8, 10),
    ),
)
def test_the_text_is_that_of_a_model_that_rounds_alike(
    name: str,
    drafter: str,
    nodes: dict[str, Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    start: Callable[..., NodePair],
) -> None:
    plain, scheme = checkpoint("llama", intermediate_size=200), scheme_of(name)
    model = plain if name == "online" else quantized(plain, tmp_path / name, scheme)
    speculation = {} if drafter == "none" else drafters.settings(drafter, plain, tmp_path, steps=3)
    own = {role: nodes.get(role, {}) for role in ("prefill", "decode")}
    nodes = {name: value for name, value in nodes.items() if name not in own}
    both = {"page_size": 4, "num_pages": 240, "max_running": 10, **nodes, **speculation}
    expected = texts_of(plain, name)
    with recorded_roundings() as roundings:
        pair = start(model, **{role: both | more for role, more in own.items()})
        reference = RoundingReference(plain, scheme, roundings)
        for turn in ("first", "again"):  # alone at first, then in company
            for index, prompt in enumerate(PROMPTS):
                pair.submit(f"{turn} {index}", prompt, params(LENGTH))
                if turn == "first":
                    pair.run()
            results = pair.run()
            for index, prompt in enumerate(PROMPTS):
                reference.assert_greedy(prompt, results[f"{turn} {index}", 0].ids, expected[index])
    assert reference.num_compared == 2 * len(PROMPTS) and reference.num_ties == 0, reference.num_ties


# What is read of a checkpoint, and what is refused


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
