"""Reading of the drafter that a configuration asks for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ...metadata.errors import ConfigError, ModelError
from ...metadata.handoff.schema.hidden_layout import HiddenDtype
from ..checkpoint.model_config import ModelConfig
from ..config import EngineConfig
from ..models.head_file import tensor_names
from ..pace.draft_length import DraftShape
from .algorithm import find_drafter, settle
from .family import Family, Speculation, Wanted
from .registry import DRAFTERS

DEFAULT_STEPS = 5
MAX_STEPS = 15
LONGEST_PATH = MAX_STEPS + 1  # tokens that a round may bring
MAX_TOPK = 16
MAX_TREE_TOKENS = 63


def read_speculation(config: EngineConfig, target_dir: Path, target: ModelConfig, dtype: HiddenDtype) -> Speculation:
    """Read the drafter's configuration, which the handoff's schema needs. Its weights are loaded later.

    Raises ConfigError for settings that cannot work together, ModelError for a draft directory that is none."""
    config = settle(config, target_dir)
    algorithm = config.speculative
    family = load_family(algorithm) if algorithm in DRAFTERS else None
    shape = _shape(config, drafts_trees=family is not None and family.drafts_trees)
    if not shape.is_chain and (reason := target.refuses_trees):
        raise ConfigError(f"draft_topk is {shape.topk}, but {target.architecture} {reason}; use --draft-topk 1")
    draft_dir = find_drafter(config, target_dir)
    if draft_dir is None and config.draft_dtype != "auto":
        raise ConfigError(f"speculative {algorithm} takes no draft_dtype, but {config.draft_dtype} was given")
    is_default = config.draft_steps is None
    draft_dtype = dtype if config.draft_dtype == "auto" else config.draft_dtype
    wanted = Wanted(algorithm, shape, is_default, target_dir, target, dtype, draft_dir or target_dir, draft_dtype)
    if family is None:
        return Speculation(algorithm=algorithm, shape=shape, hidden=wanted.layout())
    if family.recognises is not None:
        _check_recognised(family, wanted.draft_dir)
    return family.read(wanted)


def load_family(algorithm: str) -> Family:
    """Return the description of the drafter of this name."""
    family: Family = import_module(f".{DRAFTERS[algorithm].module}", __package__).FAMILY
    assert family.name == algorithm, (family.name, algorithm)
    return family


def _shape(config: EngineConfig, *, drafts_trees: bool) -> DraftShape:
    """Return what is drafted at most. Raises ConfigError for numbers that make no chain or tree, or a tree that the
    drafter cannot draft."""
    steps = DEFAULT_STEPS if config.draft_steps is None else config.draft_steps
    topk, algorithm = config.draft_topk, config.speculative
    tree = "" if topk == 1 else f" (draft_topk {topk} asks for a tree, which has at least one step)"
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"draft_steps {steps} is out of range: use 1 to {MAX_STEPS}, or --speculative none{tree}")
    if not 1 <= topk <= MAX_TOPK:
        raise ConfigError(f"draft_topk {topk} is out of range: use 1 to {MAX_TOPK}")
    if topk == 1:
        if config.draft_tokens not in (None, steps):
            raise ConfigError(
                f"draft_tokens {config.draft_tokens}: a chain (draft_topk 1) of {steps} steps has {steps}"
            )
        return DraftShape(steps)
    if not drafts_trees:
        raise ConfigError(f"speculative {algorithm} drafts chains only, but draft_topk is {topk}: use 1")
    most = min(DraftShape(steps, topk).max_drafts, MAX_TREE_TOKENS)
    tokens = min(2 * topk * steps, most) if config.draft_tokens is None else config.draft_tokens
    if not steps <= tokens <= most:
        raise ConfigError(
            f"draft_tokens {tokens} is out of range: a tree of draft_steps {steps} and draft_topk {topk} can have"
            f" {steps} to {most}"
        )
    return DraftShape(steps, topk, tokens)


def _check_recognised(family: Family, draft_dir: Path) -> None:
    """Raise ConfigError if the directory holds another drafter's head, ModelError if it holds none."""
    assert family.recognises is not None
    names = tensor_names(draft_dir)
    if family.recognises(names):
        return
    heads = [each for each in map(load_family, DRAFTERS) if each.recognises is not None]
    for other in heads:
        if other.recognises is not None and other.recognises(names):
            raise ConfigError(f"{draft_dir} holds a head for {other.name}, but speculative is {family.name}")
    raise ModelError(
        f"{draft_dir} holds no head for {', '.join(each.name for each in heads)} (see docs/drafter_checkpoints.md)"
    )
