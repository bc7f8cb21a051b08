"""The drafter that a configuration means, as far as names of files tell. Imports no torch: `baton up` asks too.

A model's directory may hold `speculation.json`, which says what serves the model best:

    {"speculative": "eagle", "draft_steps": 5}

Both kinds of node read it in the directory from which they load the model, so they decide alike. Without the file, a
checkpoint that holds prediction layers of its own (MTP: `num_nextn_predict_layers` in config.json) drafts by them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ...metadata.errors import ConfigError, ModelError
from ...metadata.wire.request import MAX_DRAFT_STEPS
from ..config import EngineConfig
from .registry import ALGORITHMS, DRAFTERS

FILE = "speculation.json"

Config = TypeVar("Config", bound=EngineConfig)


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. Without `draft_steps` the algorithm's default counts."""

    speculative: str
    draft_steps: Annotated[int, Meta(ge=1, le=MAX_DRAFT_STEPS)] | None = None


def settle(config: Config, model_dir: Path) -> Config:
    """Return `config` with an algorithm in place of "auto": the one that the model's directory recommends, else none.
    `draft_steps` of the configuration win. Raises ModelError for a file that is damaged or names no algorithm,
    ConfigError for a drafter whose algorithm is not named."""
    if config.speculative != "auto":
        return config
    if config.draft_model is not None:
        raise ConfigError(f"draft_model {config.draft_model} needs --speculative: which algorithm it is for")
    best = _read(model_dir)
    steps = best.draft_steps if config.draft_steps is None else config.draft_steps
    return replace(config, speculative=best.speculative, draft_steps=steps)


def find_drafter(config: EngineConfig, model_dir: Path) -> Path | None:
    """Return the directory given, else one inside the target's that is named after the algorithm: a drafter shipped
    with its target. None if the algorithm takes no files. Raises ConfigError if the directory is missing, or if one is
    given and the algorithm takes none."""
    algorithm, given = config.speculative, config.draft_model
    shipped_as = DRAFTERS[algorithm].shipped_as if algorithm in DRAFTERS else None
    if shipped_as is None:
        if given is not None:
            raise ConfigError(f"speculative {algorithm} takes no draft_model, but {given} was given")
        return None
    if given is not None:
        return Path(given).expanduser()
    shipped = sorted(model_dir.glob(f"{shipped_as}*/config.json"))
    if not shipped and algorithm == "mtp" and has_mtp_layers(model_dir):
        return model_dir
    if not shipped:
        raise ConfigError(f"speculative {algorithm} needs --draft-model DIR: {model_dir} ships no drafter for it")
    return shipped[0].parent


def has_mtp_layers(model_dir: Path) -> bool:
    """Return whether config.json promises prediction layers, and the checkpoint holds them: copies often leave them
    out. Files of Qwen3-Next hold one and promise none. False for a directory that cannot be read, which loading refuses
    in words."""
    try:
        config = msgspec.json.decode((model_dir / "config.json").read_bytes(), type=dict[str, Any])
        index = model_dir / "model.safetensors.index.json"
        if index.exists():
            names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        else:
            with (model_dir / "model.safetensors").open("rb") as file:
                names = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, MemoryError, OverflowError):
        return False
    is_promised = bool(config.get("num_nextn_predict_layers"))
    found = any(name.endswith((".eh_proj.weight", ".e_proj.weight")) for name in names)
    return "mtp.fc.weight" in names or (is_promised and found)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read(model_dir: Path) -> Recommendation:
    path = model_dir / FILE
    if not path.is_file():
        return Recommendation("mtp" if has_mtp_layers(model_dir) else "none")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Recommendation)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: {error}") from error
    if found.speculative not in ALGORITHMS:
        raise ModelError(f"{path}: speculative is {found.speculative!r}; it must be one of {', '.join(ALGORITHMS)}")
    return found
