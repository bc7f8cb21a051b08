"""EAGLE-3: a head on three states inside the target, with a vocabulary of its own. shifted.py drafts with it."""

from __future__ import annotations

from ...metadata.errors import ConfigError, ModelError
from ..checkpoint.config_file import HEAD_LAYER, Fields
from ..checkpoint.model_config import ModelConfig
from ..models.head_file import HeadFile, read_head, without_model
from ..models.heads import load_eagle3
from .family import Family, Speculation, Wanted
from .shifted import shifted_speculation

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SERVED = {  # options that change what a head computes, and their only served value
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_output": False,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
}


def refuse_options(head: HeadFile) -> None:
    """Raise ModelError, naming the value, for a head that computes something else than Eagle3Head."""
    fields, num_layers = head.fields, head.config.num_layers
    if num_layers != 1:
        raise ModelError(f"{fields.path}: num_hidden_layers = {num_layers} is not served for an EAGLE-3 head; 1 is")
    for place in (fields, fields.section("eagle_config"), fields.section(HEAD_LAYER)):
        for key, served in _SERVED.items():
            if place.get(key) not in (None, served):
                raise place.error(key, f"is not served for an EAGLE-3 head; {served} is")


def aux_layers(head: HeadFile, target: ModelConfig) -> tuple[int, ...]:
    """Return the target layers whose input states the head takes. Raises ConfigError for layers that the target lacks,
    and for another number than three."""
    fields, num_layers = head.fields, target.num_layers
    ids = _layer_ids(fields)
    if ids is None:
        outputs = _layer_ids(fields.section("eagle_config"))
        ids = None if outputs is None else [index + 1 for index in outputs]
    layers = tuple(ids or (2, num_layers // 2, num_layers - 3))
    wrong = [index for index in layers if not 0 <= index <= num_layers]
    if wrong:
        default = "" if ids else f", since its config.json has no {_LAYER_IDS}"
        raise ConfigError(
            f"the head in {head.directory} takes states of layers {wrong}{default}; the target has layers 0 to "
            f"{num_layers}"
        )
    if len(layers) != 3:
        raise ConfigError(f"EAGLE-3 takes three states of layers 0 to {num_layers}; {head.directory} names {layers}")
    return layers


def _layer_ids(fields: Fields) -> list[int] | None:
    ids = fields.get(_LAYER_IDS)
    if ids is not None and not (isinstance(ids, list) and all(type(each) is int for each in ids)):
        raise fields.error(_LAYER_IDS, "must be a list of layers")
    return ids


def _recognises(names: frozenset[str]) -> bool:
    bare = without_model(names)
    return "layers.0.hidden_norm.weight" in bare or any(name.startswith("midlayer.") for name in bare)


def _read(wanted: Wanted) -> Speculation:
    head = read_head(wanted.draft_dir, wanted.target)
    refuse_options(head)
    layers = aux_layers(head, wanted.target)
    hidden = wanted.layout(head.config, extend="aux", recurrent="draft", num_aux=len(layers))
    return shifted_speculation(wanted, head, hidden, load_eagle3, layers)


FAMILY = Family(name="eagle3", read=_read, drafts_trees=True, recognises=_recognises)
