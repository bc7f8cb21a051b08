"""The directory of a head that drafts from the target's hidden states: its names, and whether it fits the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...metadata.errors import ConfigError, ModelError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config_file import HEAD_LAYER, Fields, read_object
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import read_model_config
from .families import FAMILIES
from .tensors import HeadTensors


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head's directory. Its tensors are named but not read."""

    directory: Path
    config: ModelConfig
    settings: Mapping[str, Any]  # config.json as it is
    names: frozenset[str]  # of all tensors
    tensors: Callable[..., HeadTensors] = HeadTensors  # opens the directory

    @property
    def fields(self) -> Fields:
        """The settings, to be read with typed getters."""
        return _fields(self.directory, self.settings)


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of the tensors in a directory. Raises ModelError if it holds no readable *.safetensors."""
    return Checkpoint(directory).names


def without_model(names: frozenset[str]) -> frozenset[str]:
    """Return the names without a leading `model.`, which published heads may have or not."""
    return frozenset(name.removeprefix("model.") for name in names)


def read_head(directory: Path, target: ModelConfig) -> HeadFile:
    """Read a head's configuration. Raises ModelError for a directory without one, ConfigError if the head does not fit
    the target, naming both values."""
    names = tensor_names(directory)
    settings = read_object(directory / "config.json")
    _check_speculators(directory, settings)
    config = read_model_config(directory, _architecture(settings))
    own = _fields(directory, settings).integer("target_hidden_size", config.hidden_size)
    if own != target.hidden_size:
        raise ConfigError(
            f"{directory} is a head for a target of hidden size {own}; the target has {target.hidden_size}: give the "
            "head that was trained for this model"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(f"{directory} has a vocabulary of {config.vocab_size}; the target has {target.vocab_size}")
    return HeadFile(directory, config, settings, names)


def _fields(directory: Path, settings: Mapping[str, Any]) -> Fields:
    return Fields(directory / "config.json", "", dict(settings))


def _check_speculators(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a head in the layout of Speculators that is of another kind than EAGLE-3, or that does not
    say where it takes its residual: versions of that library differ in the default."""
    if HEAD_LAYER not in settings:
        return
    path, kind = directory / "config.json", settings.get("speculators_model_type")
    if kind != "eagle3":
        raise ModelError(f"{path}: speculators_model_type = {kind!r} is not served; 'eagle3' is")
    if settings.get("norm_before_residual") is None:
        raise ModelError(
            f"{path}: norm_before_residual is missing, and its default is not certain; write it into the file"
        )


def _architecture(settings: Mapping[str, Any]) -> str:
    """Return the architecture that a head is read as: published ones use many names. A target's own prediction layers
    are layers of its family."""
    of_text = (settings.get("text_config") or {}).get("model_type")
    for family in FAMILIES.values():
        is_named = family.architecture in (settings.get("architectures") or ()) or of_text in family.text_types
        if is_named and family.read_mtp_layer is not None:
            return family.architecture
    return "LlamaForCausalLM"


def check_state_width(head: HeadFile, target: ModelConfig) -> None:
    """Raise ConfigError unless the head takes states as wide as the target's family hands over."""
    width = head.config.spec_hidden_size
    if width != target.handoff_hidden_size:
        raise ConfigError(
            f"{head.directory} takes states of {width} numbers (hc_mult {head.config.hc_mult}); the target hands over"
            f" {target.handoff_hidden_size} (hc_mult {target.hc_mult})"
        )
