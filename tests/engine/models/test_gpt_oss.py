"""gpt-oss: published files, MXFP4, and its text through the handoff. Logits are compared in test_qwen3_moe.py."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
import triton_device
from heads import write_head
from mxfp4 import in_mxfp4
from node_pair import NodePair, node_pairs, params
from published_configs import PUBLISHED
from safetensors.torch import load_file, save_file
from thinned import is_whole, thinned
from ties import Reference

from baton.engine.checkpoint.quantization import Quantization
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, read_target
from baton.engine.layers.moe import MoeMlp
from baton.engine.models.decoder import DecoderStack
from baton.engine.models.registry import load_model, tensor_specs
from baton.engine.products.experts import GroupedExperts, TorchExperts
from baton.engine.ranks.shares import check_shares
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.kernels.formats import SwigluClamp
from baton.kernels.operations import preferring
from baton.metadata.errors import ConfigError, ModelError

Checkpoint = Callable[..., Path]
LENGTH = 20 if is_whole() else 8
GPT_OSS = PUBLISHED["gpt-oss-20b"]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 512), k=num_tokens)


PROMPTS = [prompt(length, seed) for seed, length in enumerate((3, 17, 40, 40, 29))]
PROMPTS[3] = PROMPTS[2][:20] + PROMPTS[3][20:]  # its beginning is in the prefix cache


def write(path: Path, fields: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return path


def test_published_files_are_read(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, GPT_OSS))
    assert config.sliding_window == (128, None) * 12 and config.has_sinks
    assert (config.qkv_bias, config.attention_bias, config.context_len) == (True, True, 131072)
    assert (config.rope.rope_type, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    assert config.rope.attention_factor == pytest.approx(1.3465735902799727)
    assert config.quantization == Quantization("mxfp4", "none")
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_active, experts.inner_size) == (32, 4, 2880)
    assert experts.norm_topk_prob and experts.clamp == SwigluClamp(7.0, 1.702)
    check_shares(config, 8, "gpt-oss")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": None}, "layer_types is missing"),
        ({"swiglu_limit": None}, "swiglu_limit is missing"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0 must be a positive number"),
        ({"layer_types": ["full_attention"]}, "layer_types = .* must list 24 layers"),
        ({"layer_types": ["chunked_attention"] * 24}, "full_attention and sliding_attention are"),
        ({"sliding_window": None}, "has sliding_attention but no sliding window"),
        ({"num_experts_per_tok": 33}, r"num_experts_per_tok = 33 is more than there are experts \(32\)"),
    ],
)
def test_refusals_name_the_value(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(write(tmp_path, GPT_OSS | fields))


def experts_of(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    stack = load_model(model, read_model_config(model), dtype, "cpu").stack
    assert isinstance(stack, DecoderStack)
    mlp = stack.layers[0].body.mlp
    assert isinstance(mlp, MoeMlp)
    return mlp.experts


def test_mxfp4_is_exact_in_16_bits_and_stays_packed_on_a_gpu(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, meant = in_mxfp4(checkpoint("gpt_oss", intermediate_size=96), tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = experts_of(packed, dtype), experts_of(meant, dtype)
        assert isinstance(ours, TorchExperts)
        for x, each in ((torch.eye(64, dtype=dtype), "gate_up"), (torch.eye(96, dtype=dtype), "down")):
            for own, other in zip(getattr(ours, each), getattr(theirs, each), strict=True):
                assert torch.equal(own(x), other(x)) and own(x).dtype is dtype
    with preferring("triton"):
        ours = experts_of(packed)
    assert isinstance(ours, GroupedExperts) and ours.gate_up.is_packed and ours.down.is_packed
    assert ours.gate_up.values.nbytes == 5 * 2 * 96 * 64 / 2  # 4 bits each


def test_transformers_reads_the_same_numbers(models: dict[str, Path]) -> None:
    """It unpacks the checkpoint by itself, so the tests' checkpoints are in the public format."""
    import transformers

    unpack = transformers.Mxfp4Config(dequantize=True)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        models["mxfp4"], dtype=torch.float32, quantization_config=unpack
    )
    ids = torch.tensor([prompt(30)])
    with torch.inference_mode():
        assert torch.equal(theirs(ids).logits, Reference(models["plain"]).model(ids).logits)


def test_the_tensors_of_mxfp4_are_listed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = in_mxfp4(checkpoint("gpt_oss", intermediate_size=96), tmp_path)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(packed / "model.safetensors").items()}
    assert {spec.name: spec.shape for spec in tensor_specs(read_model_config(packed), written)} == written


def test_a_tensor_that_is_missing_or_unknown_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, meant = in_mxfp4(checkpoint("gpt_oss", intermediate_size=96), tmp_path)
    for path, name in ((packed, "mlp.experts.down_proj_scales"), (meant, "self_attn.sinks")):
        tensors = load_file(path / "model.safetensors")
        del tensors[f"model.layers.1.{name}"]
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=rf"lacks tensors .* model.layers.1.{name}$"):
            experts_of(path)
    shutil.copy(meant / "config.json", packed / "config.json")
    with pytest.raises(ModelError, match=r"lacks tensors that its config.json calls for: .*gate_up_proj"):
        experts_of(packed)  # the configuration names no quantization


def test_quantization_of_what_is_quantized_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    packed, _ = in_mxfp4(checkpoint("gpt_oss", intermediate_size=96), tmp_path)
    config = EngineConfig(router="tcp://127.0.0.1:1", model=str(packed), quantization="fp8")
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is quantized already"):
        read_target(packed, config)


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model: in MXFP4, and with the numbers that it stands for."""
    packed, meant = in_mxfp4(checkpoint("gpt_oss", intermediate_size=96), tmp_path_factory.mktemp("gpt-oss"))
    return {"mxfp4": packed, "plain": meant}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> list[list[int]]:
    """The text of transformers for each of PROMPTS."""
    reference = Reference(models["plain"])
    return [reference.generate(ids, LENGTH) for ids in PROMPTS]


@pytest.mark.parametrize(
    ("kind", "drafter", "nodes", "tp", "transport"),
    thinned(
        [
            ("plain", "none", {"chunk_tokens": 7}, (1, 1), "local"),
            ("plain", "eagle3", {"chunk_tokens": 9, "draft_topk": 3}, (1, 1), "zmq"),
            ("plain", "standalone", {"chunk_tokens": 64}, (1, 1), "zmq"),
            ("mxfp4", "none", {"chunk_tokens": 11}, (1, 2), "local"),
            ("mxfp4", "standalone", {"chunk_tokens": 5}, (2, 1), "zmq"),
            ("mxfp4", "eagle3", {"chunk_tokens": 64}, (1, 2), "local"),
        ],
        lambda i, *_: i in (1, 4),
    ),
)
def test_the_text_is_that_of_transformers(
    kind: str,
    drafter: str,
    nodes: dict[str, Any],
    tp: tuple[int, int],
    transport: str,
    models: dict[str, Path],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    """Alone at first, then in company: with prefix hits and a preemption."""
    model, reference = models[kind], Reference(models["plain"])
    speculation = {} if drafter == "none" else drafters.settings(drafter, models["plain"], tmp_path, steps=3)
    both = {"page_size": 4, "num_pages": 240, "max_running": 10, "transport": transport, **nodes, **speculation}
    with node_pairs() as start:
        pair: NodePair = start(
            model, prefill=both | {"tp": tp[0]}, decode=both | {"tp": tp[1]}, overlaps=transport == "zmq"
        )
        for turn in ("first", "again"):
            for index, ids in enumerate(PROMPTS):
                pair.submit(f"{turn} {index}", ids, params(LENGTH))
                if turn == "first":
                    pair.run()
        pair.step_until(lambda: len(pair.decode.scheduler.running) > 1)
        pair.decode.settle()
        pair.decode.scheduler.preempt(pair.decode.scheduler.running[-1])
        results = pair.run()
        assert pair.decode.stats().preemptions > 0
        assert (pair.decode.stats().num_drafted > 0) == (drafter != "none")
    for turn in ("first", "again"):
        for index, ids in enumerate(PROMPTS):
            reference.assert_greedy(ids, results[f"{turn} {index}", 0].ids, expected[index])
    assert reference.num_compared == 2 * len(PROMPTS) and reference.num_ties <= 1, reference.num_ties


@pytest.mark.timeout(600)  # the interpreter is slow on a busy machine
@pytest.mark.skipif(not triton_device.IS_INTERPRETED, reason="a GPU runs the kernels themselves (tests/gpu)")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud
def test_the_kernels_of_a_gpu_give_the_text_of_transformers(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes in Triton's interpreter, with MXFP4 and drafts."""
    head = write_head(tmp_path / "eagle3", "eagle3", models["plain"])
    reference, prompts = Reference(models["plain"]), [prompt(9, 1), prompt(2, 2)] if is_whole() else [prompt(7, 1)]
    both = {"page_size": 4, "num_pages": 64, "max_running": 4, "chunk_tokens": 8}
    both |= {"speculative": "eagle3", "draft_model": str(head), "draft_steps": 2}
    monkeypatch.setattr(DeviceExecutor, "warm_up", lambda self, progress, **_: None)
    monkeypatch.setattr(Engine, "capture_prompts", lambda self, progress: None)
    monkeypatch.setattr(Engine, "warm_up", lambda self, chunk_tokens: None)
    with preferring("triton"), node_pairs() as start:
        pair: NodePair = start(models["mxfp4"], prefill=both, decode=both, overlaps=True)
        for index, ids in enumerate(prompts):
            pair.submit(f"{index}", ids, params(3))
        results = pair.run(500)
    for index, ids in enumerate(prompts):
        reference.assert_greedy(ids, results[f"{index}", 0].ids, reference.generate(ids, 3))
    assert reference.num_ties == 0
