"""The files of a model directory, as far as their names and headers tell. Imports no torch: `baton up` and the nodes
check a directory before anything starts. Errors name the file and the fix."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, NamedTuple

from ...metadata.errors import ModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER, RANKS = "tokenizer.json", "tiktoken.model"  # RANKS: tokenizer_file.py makes the other of it
_LFS = b"version https://git-lfs"
_NEEDED = "config.json, *.safetensors and tokenizer.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library takes
_ADAPTER = "adapter_config.json"
_MAX_SHOWN = 200  # characters of what an operator gave


class FileTensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str  # as safetensors names it
    num_bytes: int


def path_of(given: str) -> Path:
    """Return the path that the operator gave, whether it exists or not. Raises ModelError if nobody can tell: its user
    is unknown, its name too long, or a directory above it closed."""
    try:
        path = Path(given).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{given[:_MAX_SHOWN]} is no path that this user can open: {why}") from None
    return path


def check_directory(model_dir: Path, *, needs_weights: bool = True, needs_tokenizer: bool = True) -> None:
    """Raise ModelError, saying what to do, if this is not a directory that a model can be loaded from. The content of
    config.json is not read."""
    _check_place(model_dir)
    names = _names(model_dir)
    check_names(model_dir, names, needs_weights=False, needs_tokenizer=False)
    if needs_weights:
        for path in safetensors_files(model_dir):
            stored_tensors(path)
    if needs_tokenizer:
        _check_tokenizer(model_dir, names)


def check_names(model_dir: Path, names: Set[str], *, needs_weights: bool, needs_tokenizer: bool) -> None:
    """Raise ModelError, saying what to do, if a model cannot be loaded from a directory with these names. `model_dir`:
    where it is, for the words; of a repository of the hub its name."""
    is_adapter = _ADAPTER in names and not any(map(_is_weight, names))
    if is_adapter or "config.json" not in names:
        raise ModelError(f"{model_dir} {_without_config(model_dir, names)}")
    if needs_weights and not any(map(_is_safe, names)):
        raise ModelError(f"{model_dir} has no *.safetensors files; {_other_weights(model_dir, names)}")
    if needs_tokenizer and not names & {TOKENIZER, RANKS}:
        raise ModelError(_without_tokenizer(model_dir, names))


def safetensors_files(model_dir: Path, names: Set[str] | None = None) -> list[Path]:
    """Return the files that the index names, or model.safetensors, or all that there are. `names`: what the directory
    will hold, if not all is there yet. Raises ModelError, also if there are only pickles."""
    if not model_dir.is_dir():
        raise ModelError(f"model directory {model_dir} does not exist; give one with config.json and *.safetensors")
    names = _names(model_dir) if names is None else names
    index = model_dir / _INDEX
    if not index.exists():
        files = sorted(filter(_is_safe, names))
        if not files:
            raise ModelError(f"{model_dir} has no *.safetensors files; {_other_weights(model_dir, names)}")
        return [model_dir / name for name in (files if _SINGLE not in files else [_SINGLE])]
    refuse_pointer(index)
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except PermissionError:
        raise ModelError(_no_permission(index)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not a readable index ({error!r}); copy the checkpoint again") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in named):
        raise ModelError(f"{index} names files outside its directory; copy the checkpoint again")
    missing = sorted(named - names)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{model_dir} lacks {', '.join(missing[:3])}{more}, which {index.name} names ({len(named)} files in all); "
            "copy the checkpoint again, or download these files into the directory"
        )
    return [model_dir / name for name in sorted(named)]


def stored_tensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a *.safetensors file by name, from its header. Raises ModelError if the file cannot be
    read, is a pointer of git-lfs, or is shorter than its header says.

    Format: 8 bytes little-endian header length, a JSON header of {name: {dtype, shape, data_offsets}}, the data."""
    refuse_pointer(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"it has {size} bytes, fewer than its header")
            if length > _MAX_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found: dict[str, FileTensor] = {}
        last = 0
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name], last = FileTensor(entry["dtype"], end - begin), max(last, end)
        if 8 + length + last > size:
            raise ValueError(f"it has {size:,} of {8 + length + last:,} bytes")
    except PermissionError:
        raise ModelError(_no_permission(path)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); copy the checkpoint again") from None
    return found


def all_stored_tensors(model_dir: Path) -> dict[str, FileTensor]:
    """Return the tensors of all files of a directory; none if it has no files that can be read."""
    try:
        return {name: each for path in safetensors_files(model_dir) for name, each in stored_tensors(path).items()}
    except ModelError:
        return {}


def refuse_pointer(path: Path) -> None:
    """Raise ModelError if the file is what git-lfs leaves in place of a large file, or a link to nothing."""
    if path.is_symlink() and not path.exists():
        raise ModelError(f"{path} is a link to {path.readlink()}, which does not exist; download the model again")
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
    except OSError:
        return
    if is_pointer:
        raise ModelError(
            f"{path} is a pointer of git-lfs, not the file itself; run `git lfs pull` in {path.parent}, or download "
            "the model with `hf download`"
        )


def _check_place(model_dir: Path) -> None:
    """Raise ModelError if the path is no directory that can be listed."""
    if model_dir.is_file():
        raise ModelError(f"{model_dir} is a file; {_for_file(model_dir)}")
    if not model_dir.is_dir():
        otherwise = f"; give one with {_NEEDED}, or ORG/NAME of the Hugging Face hub"
        raise ModelError(f"{model_dir}: no such directory{did_you_mean(model_dir) or otherwise}")
    if not os.access(model_dir, os.R_OK | os.X_OK):
        raise ModelError(_no_permission(model_dir))


def _for_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return f"Baton does not read GGUF: {_original()}"
    if (path.parent / "config.json").is_file():
        return f"give its directory: {path.parent}"
    return f"give a directory with {_NEEDED}"


def did_you_mean(path: Path) -> str:
    """Return `; did you mean the directory X?` for the directory with the most similar name, beside `path` or here; ""
    if none is similar."""
    for parent in dict.fromkeys((path.expanduser().parent, Path())):
        names = {each.name.lower(): each for each in parent.iterdir() if each.is_dir()} if parent.is_dir() else {}
        for close in difflib.get_close_matches(path.name.lower(), names, n=1, cutoff=0.75):
            return f"; did you mean the directory {names[close]}?"
    return ""


def _names(model_dir: Path) -> set[str]:
    return {path.name for path in model_dir.iterdir()}


def _is_safe(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith("adapter_")


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", *_PICKLES)) and not name.startswith("adapter_")


def _without_config(model_dir: Path, names: Set[str]) -> str:
    """Describe a directory without config.json, and the fix."""
    if not names:
        return f"is empty; give a directory with {_NEEDED}"
    if _ADAPTER in names:
        return f"is a LoRA adapter{_base_of(model_dir)}, and Baton serves no adapters; {_merge()}"
    if any(name.endswith(".gguf") for name in names):
        return f"has GGUF files, which Baton does not read; {_original()}"
    if "params.json" in names:
        return f"is in the publisher's own format (params.json), which Baton does not read; {_original()}"
    inner = sorted(path.parent for path in _below(model_dir) if not path.parent.name.startswith("."))
    if inner:
        also = f" (or one of {len(inner) - 1} others below)" if len(inner) > 1 else ""
        return f"has no config.json, but {_newest(model_dir, inner)} has one; give that directory{also}"
    return f"is not a Hugging Face checkpoint: it has no config.json; give a directory with {_NEEDED}"


def _below(model_dir: Path) -> Iterable[Path]:
    """Yield the config.json files of directories below, as a hub cache and a training run have them."""
    for pattern in ("*/config.json", "snapshots/*/config.json", "models--*/snapshots/*/config.json"):
        yield from model_dir.glob(pattern)


def _newest(model_dir: Path, inner: list[Path]) -> Path:
    """Return the snapshot that the main branch of a hub cache names, else the directory that was changed last."""
    refs = (model_dir / "refs" / "main", model_dir.parent / "refs" / "main")
    main = next((path.read_text().strip() for path in refs if path.is_file()), None)
    named = [path for path in inner if path.name == main]
    return named[0] if named else max(inner, key=lambda path: path.stat().st_mtime)


def _base_of(model_dir: Path) -> str:
    try:
        base = json.loads((model_dir / _ADAPTER).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return f" of {base}" if isinstance(base, str) and base else ""


def _merge() -> str:
    return "merge it into its base model (PEFT's merge_and_unload, then save_pretrained) and give the merged directory"


def _original() -> str:
    return f"give the model's Hugging Face checkpoint ({_NEEDED})"


def _other_weights(model_dir: Path, names: Set[str]) -> str:
    """Return what to do if a directory has weights, but no *.safetensors."""
    pickled = sorted(name for name in names if name.endswith(_PICKLES) and _is_weight(name))
    if pickled:
        return (
            f"convert {pickled[0]}: pickles are never loaded. In an environment that trusts the file: "
            f"`AutoModelForCausalLM.from_pretrained('{model_dir}').save_pretrained(NEW_DIR)` of transformers"
        )
    if any(name.endswith(".gguf") for name in names):
        return f"Baton does not read GGUF: {_original()}"
    if any(name.endswith((".incomplete", ".part", ".aria2", ".tmp")) for name in names):
        return "the download has not ended: wait for it, or start it again"
    return "copy the checkpoint again, or use --load-format dummy to measure a model without its weights"


def _check_tokenizer(model_dir: Path, names: Set[str]) -> None:
    if not names & {TOKENIZER, RANKS}:
        raise ModelError(_without_tokenizer(model_dir, names))
    path = model_dir / (TOKENIZER if TOKENIZER in names else RANKS)
    refuse_pointer(path)
    if not os.access(path, os.R_OK):
        raise ModelError(_no_permission(path))


def _without_tokenizer(model_dir: Path, names: Set[str]) -> str:
    slow = sorted(names & {"tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "vocab.txt"})
    what = f"{model_dir} has no {TOKENIZER}"
    if not slow:
        return f"{what}; copy it from the model that this one was made of"
    return (
        f"{what}, only {' and '.join(slow)}; make it with `AutoTokenizer.from_pretrained('{model_dir}')"
        f".save_pretrained('{model_dir}')` of transformers"
    )


def _no_permission(path: Path) -> str:
    return (
        f"{path} cannot be read by this user (uid {os.geteuid()}): permission denied; give it the right with "
        f"`chmod -R a+rX {path if path.is_dir() else path.parent}`"
    )
