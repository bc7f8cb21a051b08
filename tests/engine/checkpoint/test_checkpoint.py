"""The files of a checkpoint: which are read, what is refused, and digests against plain hashing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.checkpoint import FLOATS, Checkpoint, TensorSpec, tensor_digests
from baton.engine.checkpoint.model_files import safetensors_files
from baton.metadata.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TENSORS = {
    "model.norm.weight": torch.arange(6.0),
    "model.layers.0.up.weight": torch.arange(12.0).view(3, 4).bfloat16(),
    "model.layers.0.scale": torch.tensor(3, dtype=torch.int8),
}
SPECS = [
    TensorSpec("model.norm.weight", (6,)),
    TensorSpec("model.layers.0.up.weight", (3, 4)),
    TensorSpec("model.layers.0.scale", (), ("I8",)),
]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A directory with all tensors in one file."""
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory with an index and one file per tensor."""
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(sorted(TENSORS))}
    for name, file in weight_map.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def names_of(directory: Path) -> list[str]:
    return [path.name for path in safetensors_files(directory)]


def test_one_file_is_taken_before_others_beside_it(single: Path) -> None:
    save_file(TENSORS, single / "consolidated.safetensors")
    assert names_of(single) == [SINGLE]
    (single / SINGLE).rename(single / "b.safetensors")
    assert names_of(single) == ["b.safetensors", "consolidated.safetensors"]


def test_an_index_names_the_files(sharded: Path) -> None:
    save_file(TENSORS, sharded / "consolidated.safetensors")
    assert names_of(sharded) == [f"model-{i}.safetensors" for i in range(len(TENSORS))]


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_tensors_are_read_as_they_were_written(kind: str, request: pytest.FixtureRequest) -> None:
    files = Checkpoint(request.getfixturevalue(kind))
    assert files.names == set(TENSORS) and files.num_left_out == 0
    for name, tensor in TENSORS.items():
        assert files.read(name).dtype == tensor.dtype and torch.equal(files.read(name), tensor)
    assert files.check(SPECS) == sum(tensor.nbytes for tensor in TENSORS.values())
    assert files.check(SPECS[1:2]) == TENSORS["model.layers.0.up.weight"].nbytes


def test_tensors_of_other_models_are_not_there(tmp_path: Path) -> None:
    inside = {f"language_model.{name}": tensor for name, tensor in TENSORS.items()}
    save_file(inside | {"vision_tower.proj.weight": torch.zeros(2)}, tmp_path / SINGLE)
    files = Checkpoint(tmp_path)
    assert files.names == set(TENSORS) and files.num_left_out == 1
    assert torch.equal(files.read("model.norm.weight"), TENSORS["model.norm.weight"])
    assert files.check(SPECS) == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([TensorSpec("model.x", (1,))], "lacks tensors that its config.json calls for: model.x$"),
        ([TensorSpec(f"model.{i}", (1,)) for i in range(5)], "model.0, model.1, model.2 and 2 more$"),
        ([TensorSpec("model.norm.weight", (2, 3))], r"model.norm.weight has shape \[6\], .* calls for \[2, 3\]"),
        ([TensorSpec("model.layers.0.scale", ())], r"model.layers.0.scale is I8; only F32, BF16, F16 are served"),
        ([TensorSpec("model.norm.weight", (6,), ("I8",))], r"model.norm.weight is F32; only I8 are served"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(single: Path, specs: list[TensorSpec], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        Checkpoint(single).check([*SPECS, *specs])
    assert str(single) in str(error.value)


def test_a_float_of_any_width_is_served(tmp_path: Path) -> None:
    """Every dtype that a spec takes by default can be read, and its bytes are counted."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    tensors = {name: torch.zeros(5, dtype=dtype) for name, dtype in zip(FLOATS, kinds, strict=True)}
    save_file(tensors, tmp_path / SINGLE)
    assert Checkpoint(tmp_path).check([TensorSpec(name, (5,)) for name in FLOATS]) == 5 * (4 + 2 + 2)


def test_a_model_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        Checkpoint(tmp_path / "nowhere")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*.safetensors files; copy the checkpoint again"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match=r"convert pytorch_model.bin: pickles are never loaded"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("bad", ["{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": []}}', "[" * 100_000])
def test_an_index_that_cannot_be_read(sharded: Path, bad: str) -> None:
    (sharded / INDEX).write_text(bad)
    with pytest.raises(ModelError, match=rf"{INDEX} is not a readable index"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/model-1.safetensors", "a/model-1.safetensors", 7])
def test_an_index_names_no_file_elsewhere(sharded: Path, name: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match="names files outside its directory"):
        Checkpoint(sharded)


def test_a_file_of_the_index_that_is_not_there(sharded: Path) -> None:
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"lacks model-1.safetensors, which {INDEX} names"):
        Checkpoint(sharded)


# --- digests ---


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """Return the digest that the format of `tensor_digests` asks for, from the tensor itself."""
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}[tensor.dtype]
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return xxhash.xxh3_128(json.dumps([name, kind, list(tensor.shape)]).encode() + content).digest()


def test_a_digest_is_of_name_dtype_shape_and_bytes(single: Path) -> None:
    expected = {name: digest_of(name, tensor) for name, tensor in TENSORS.items()}
    assert tensor_digests(single / SINGLE) == expected
    save_file(load_file(single / SINGLE), single / SINGLE, {"format": "pt"})  # metadata does not count
    assert tensor_digests(single / SINGLE) == expected


def test_every_byte_counts(single: Path) -> None:
    path = single / SINGLE
    good, before = path.read_bytes(), tensor_digests(path)
    for at in range(len(good) - sum(tensor.nbytes for tensor in TENSORS.values()), len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        after = tensor_digests(path)
        assert len([name for name in before if after[name] != before[name]]) == 1, at


def with_header(header: Any, content: bytes = bytes(8)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content


DAMAGED = {
    "empty": b"",
    "no header": b"\x05",
    "header beyond the end": (1 << 62).to_bytes(8, "little") + with_header({})[8:],
    "not JSON": with_header(b"{x"),
    "not UTF-8": with_header(b"\xff\xfe"),
    "nested": with_header(b"[" * 100_000),
    "a list": with_header([]),
    "a number": with_header(3),
    "no offsets": with_header({"a": {"dtype": "F32", "shape": [2]}}),
    "one offset": with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}),
    "no entry": with_header({"a": None}),
    "cut short": with_header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("action", [Checkpoint, lambda directory: tensor_digests(directory / SINGLE)])
def test_a_damaged_file_is_named(content: bytes, action: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{SINGLE} is damaged or cut short .*; copy the checkpoint again"):
        action(tmp_path)
