"""The fingerprint is of the content: every byte counts, and how files are split does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import xxhash
from checkpoints import shard

from baton.engine.checkpoint.checkpoint import tensor_digests
from baton.engine.checkpoint.fingerprint import fingerprint, fingerprint_of
from baton.engine.checkpoint.read_config import read_model_config

Checkpoint = Callable[..., Path]
EARLY_ROPE = (
    "rope_type",
    "theta",
    "factor",
    "original_context_len",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
)


@pytest.fixture
def model_dir(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A private copy, to change."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def test_fingerprint_is_of_the_content(model_dir: Path, checkpoint: Checkpoint) -> None:
    original = fingerprint(model_dir)
    assert len(original) == 32 and original == fingerprint(checkpoint("llama"))
    shard(model_dir, 2)
    assert fingerprint(model_dir) == original
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert fingerprint(model_dir) == original
    (model_dir / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert fingerprint(model_dir) != original
    assert fingerprint(checkpoint("llama", seed=1)) != original
    assert fingerprint(checkpoint("llama", "bfloat16")) != original


def test_what_other_families_have_is_not_in_the_fingerprint(model_dir: Path) -> None:
    """Plain dense models keep the digest of releases that knew neither experts nor quantization, so that nodes of both
    find each other."""
    fields = asdict(read_model_config(model_dir))
    for name in ("experts", "quantization", "rotary_dim", "has_wide_norms", "latent", "has_sinks", "index", "further"):
        assert not fields.pop(name)
    assert fields.pop("value_scale") == 1.0
    for name in ("window", "norm_offset", "score_scale", "gemma4", "softcap", "value_dim", "predicts_in_window"):
        assert not fields.pop(name)
    for name in ("has_tail", "tail_rows", "compressed", "delta", "has_output_gate"):
        assert not fields.pop(name)
    fields["rope"] = {name: fields["rope"][name] for name in EARLY_ROPE}
    digest = xxhash.xxh3_128(json.dumps(fields, sort_keys=True).encode())
    tensors = tensor_digests(model_dir / "model.safetensors")
    for name in sorted(tensors):
        digest.update(tensors[name])
    assert fingerprint(model_dir) == digest.hexdigest()


def test_the_type_of_a_nodes_states_is_not_in_the_fingerprint(checkpoint: Checkpoint) -> None:
    """It is in the schema. Files of pages, and nodes of a release that knew no such type, stay valid."""
    config = read_model_config(checkpoint("qwen3_next"))
    assert config.delta is not None
    other = replace(config, delta=replace(config.delta, state_dtype="bfloat16"))
    assert fingerprint_of(other, {}) == fingerprint_of(config, {})


def test_fingerprint_sees_one_byte(model_dir: Path) -> None:
    original = fingerprint(model_dir)
    path = model_dir / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint(model_dir) != original
