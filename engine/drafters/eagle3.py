"""EAGLE-3: a head on three states inside the target, with a vocabulary of its own. shifted.py drafts with it."""

from __future__ import annotations

from ...metadata.errors import ConfigError
from ..model_config import ModelConfig
from ..models.head_file import HeadFile, read_head, without_model
from ..models.heads import load_eagle3
from .family import Family, Speculation, Wanted
from .shifted import shifted_speculation


def aux_layers(head: HeadFile, target: ModelConfig) -> tuple[int, ...]:
    """Return the target layers whose input states the head takes. Raises ConfigError for layers that the target lacks,
    and for another number than three."""
    ids, num_layers = head.settings.get("eagle_aux_hidden_state_layer_ids"), target.num_layers
    if ids is None:
        outputs = (head.settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        ids = None if outputs is None else [index + 1 for index in outputs]
    layers = tuple(ids or (2, num_layers // 2, num_layers - 3))
    wrong = [index for index in layers if not 0 <= index <= num_layers]
    if wrong:
        raise ConfigError(
            f"the head in {head.directory} takes states of layers {wrong}; the target has layers 0 to {num_layers}"
        )
    if len(layers) != 3:
        raise ConfigError(f"EAGLE-3 takes three states of layers 0 to {num_layers}; {head.directory} names {layers}")
    return layers


def _recognises(names: frozenset[str]) -> bool:
    bare = without_model(names)
    return "layers.0.hidden_norm.weight" in bare or any(name.startswith("midlayer.") for name in bare)


def _read(wanted: Wanted) -> Speculation:
    head = read_head(wanted.draft_dir, wanted.target)
    layers = aux_layers(head, wanted.target)
    hidden = wanted.layout(head.config, extend="aux", recurrent="draft", num_aux=len(layers))
    return shifted_speculation(wanted, head, hidden, load_eagle3, layers)


FAMILY = Family(name="eagle3", read=_read, drafts_trees=True, recognises=_recognises)
