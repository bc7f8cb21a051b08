"""Directories that are no checkpoint: a sentence that says what is there, and what to do."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.checkpoint.model_files import all_stored_tensors, check_directory, stored_tensors
from baton.metadata.errors import ModelError

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 42\n"
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
ADAPTER = json.dumps({"base_model_name_or_path": "org/base"})
CASES: dict[str, tuple[dict[str, str | None], str]] = {  # files that are added (None: taken away), and words
    "empty": ({"config.json": None, "tokenizer.json": None, "model.safetensors": None}, "is empty; give a directory"),
    "no config.json": ({"config.json": None}, "is not a Hugging Face checkpoint: it has no config.json"),
    "adapter": (
        {
            "config.json": None,
            "model.safetensors": None,
            "adapter_config.json": ADAPTER,
            "adapter_model.safetensors": "",
        },
        "is a LoRA adapter of org/base, and Baton serves no adapters; merge it into its base model",
    ),
    "adapter with a config.json": (
        {"model.safetensors": None, "adapter_config.json": "{", "adapter_model.safetensors": ""},
        "is a LoRA adapter, and Baton serves no adapters",
    ),
    "GGUF": (
        {"config.json": None, "m.gguf": ""},
        "has GGUF files, which Baton does not read; give the model's Hugging Face checkpoint",
    ),
    "GGUF beside config.json": ({"model.safetensors": None, "m.gguf": ""}, "no .*; Baton does not read GGUF: give"),
    "own format": ({"config.json": None, "params.json": "{}"}, r"publisher's own format \(params.json\)"),
    "a directory above": ({"config.json": None, "inner/config.json": "{}"}, "inner has one; give that directory$"),
    "pickles": (
        {"model.safetensors": None, "pytorch_model.bin": ""},
        "convert pytorch_model.bin: pickles are never loaded.*save_pretrained",
    ),
    "torch": ({"model.safetensors": None, "consolidated.00.pth": ""}, "convert consolidated.00.pth"),
    "no weights": ({"model.safetensors": None}, r"has no \*.safetensors files; copy the checkpoint again"),
    "downloading": ({"model.safetensors": None, "model.safetensors.incomplete": ""}, "the download has not ended"),
    "missing shards": (
        {"model.safetensors.index.json": INDEX},
        r"lacks model-1.safetensors, model-2.safetensors, which model.safetensors.index.json names \(2 files in all\)",
    ),
    "index of git-lfs": ({"model.safetensors.index.json": LFS}, "index.json is a pointer of git-lfs.*`git lfs pull`"),
    "weights of git-lfs": (
        {"model.safetensors": LFS},
        "model.safetensors is a pointer of git-lfs, not the file",
    ),
    "tokenizer of git-lfs": ({"tokenizer.json": LFS}, "tokenizer.json is a pointer of git-lfs"),
    "cut short": ({"model.safetensors": "\x10\0\0\0\0\0\0\0"}, r"damaged or cut short \(it has 8 bytes, fewer"),
    "slow tokenizer": (
        {"tokenizer.json": None, "tokenizer.model": ""},
        r"has no tokenizer.json, only tokenizer.model; make it with `AutoTokenizer.from_pretrained\('.*'\).save_pretr",
    ),
    "no tokenizer": ({"tokenizer.json": None}, "has no tokenizer.json; copy it from the model that this one was made"),
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that passes."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    save_file({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}, directory / "model.safetensors")
    check_directory(directory)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_what_is_there_and_what_to_do(case: str, model_dir: Path) -> None:
    files, words = CASES[case]
    for name, content in files.items():
        path = model_dir / name
        path.parent.mkdir(exist_ok=True)
        path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelError, match=words) as error:
        check_directory(model_dir)
    assert str(error.value).startswith(str(model_dir)) and "\n" not in str(error.value)


def test_a_missing_directory_is_named_with_the_one_that_was_probably_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
    for name, words in {
        "nowhere": "nowhere: no such directory; give one with config.json, ",
        "/models/nowhere/at/all": "no such directory; give one",
        "models/qwen3-06b": "no such directory; did you mean the directory models/Qwen3-0.6B?",
        "model": "no such directory; did you mean the directory models?",
    }.items():
        with pytest.raises(ModelError, match=re.escape(words)):
            check_directory(Path(name))


def test_a_file_is_not_a_directory(model_dir: Path) -> None:
    (model_dir / "m.gguf").write_text("")
    with pytest.raises(ModelError, match=r"m.gguf is a file; Baton does not read GGUF: give the model's Hugging"):
        check_directory(model_dir / "m.gguf")
    with pytest.raises(ModelError, match=rf"is a file; give its directory: {model_dir}$"):
        check_directory(model_dir / "model.safetensors")


def test_a_cache_of_the_hub_has_the_model_in_a_snapshot(model_dir: Path, tmp_path: Path) -> None:
    """The one that the main branch names, which is served by its own path."""
    cache = tmp_path / "models--org--name"
    for name in ("aaa", "bbb"):
        (cache / "snapshots" / name).mkdir(parents=True)
        for file in model_dir.iterdir():
            (cache / "snapshots" / name / file.name).symlink_to(file)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    check_directory(cache / "snapshots" / "aaa")
    for directory in (cache, cache / "snapshots"):
        with pytest.raises(ModelError, match=r"snapshots/aaa has one; give that directory \(or one of 1 others"):
            check_directory(directory)
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"is a link to .*, which does not exist; download the model again"):
        check_directory(cache / "snapshots" / "aaa")


def test_a_file_that_is_cut_short_says_by_how_much(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    size = path.stat().st_size
    assert {name: each.dtype for name, each in stored_tensors(path).items()} == {"a": "F32", "b": "BF16"}
    os.truncate(path, size - 1)
    with pytest.raises(ModelError, match=rf"cut short \(it has {size - 1} of {size} bytes\); copy the"):
        check_directory(model_dir)
    assert all_stored_tensors(model_dir) == {}
    check_directory(model_dir, needs_weights=False)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "."])
def test_a_file_without_permission_is_named(name: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's answer is played."""
    path = model_dir / name

    def refuse(self: Path, *args: object, **more: object) -> object:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return whole(self, *args, **more)  # type: ignore[arg-type]

    whole, access = Path.open, os.access
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "access", lambda each, mode: each != path and access(each, mode))
    with pytest.raises(ModelError, match=rf"{path} cannot be read by this user .*`chmod -R a\+rX {model_dir}`"):
        check_directory(model_dir)
