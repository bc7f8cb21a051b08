"""Which drafter a configuration means, as far as names of files tell. Imports no torch: `baton up` asks too.

A model's directory may hold `speculation.json`, which says what serves the model best:

    {"speculative": "eagle", "draft_steps": 5}

Both kinds of node read it in the directory that they load the model from, so they decide alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ...metadata.errors import ConfigError, ModelError
from ...metadata.wire.request import MAX_DRAFT_STEPS
from ..config import Algorithm, EngineConfig

FILE = "speculation.json"

Config = TypeVar("Config", bound=EngineConfig)


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. Without `draft_steps`: as many as are the algorithm's default."""

    speculative: Algorithm
    draft_steps: Annotated[int, Meta(ge=1, le=MAX_DRAFT_STEPS)] | None = None


def settle(config: Config, model_dir: Path) -> Config:
    """`config` with an algorithm in place of "auto": what the model's directory recommends, else none. `draft_steps` of
    the configuration win. Raises ModelError for a file that is none, ConfigError for a drafter of unnamed algorithm."""
    if config.speculative != "auto":
        return config
    if config.draft_model is not None:
        raise ConfigError(f"draft_model {config.draft_model} needs --speculative: which algorithm it is for")
    best = _read(model_dir / FILE)
    steps = best.draft_steps if config.draft_steps is None else config.draft_steps
    return replace(config, speculative=best.speculative, draft_steps=steps)


def find_drafter(config: EngineConfig, model_dir: Path) -> Path | None:
    """The directory given, else one of the algorithm's name inside the target's: a drafter shipped with its target.
    None for algorithms that need none. Raises ConfigError when it is missing, or one is given too many."""
    algorithm, given = config.speculative, config.draft_model
    if algorithm in ("none", "ngram"):
        if given is not None:
            raise ConfigError(f"speculative {algorithm} takes no draft_model, but {given} was given")
        return None
    if given is not None:
        return Path(given).expanduser()
    shipped = sorted(model_dir.glob(f"{algorithm.replace('-', '_')}*/config.json"))
    if not shipped:
        raise ConfigError(f"speculative {algorithm} needs --draft-model DIR: {model_dir} ships no drafter for it")
    return shipped[0].parent


def describe(algorithm: str, num_steps: int | None, topk: int, drafter: Path | None, model_dir: Path) -> str:
    """Return the choice in words for logs: "eagle, 5 steps, drafter eagle/"."""
    words = [algorithm]
    if algorithm != "none" and num_steps is not None:
        words.append("1 step" if num_steps == 1 else f"{num_steps} steps")
    if topk > 1:
        words.append(f"{topk} branches")
    if drafter is not None:
        words.append(f"drafter {drafter.name if drafter.parent == model_dir else drafter}/")
    return ", ".join(words)


def _read(path: Path) -> Recommendation:
    if not path.is_file():
        return Recommendation("none")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recommendation)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: {error}") from error
