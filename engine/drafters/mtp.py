"""MTP: the target's own prediction layers. One layer is a head that is reused for every step (shifted.py); several are
used one per step (mtp_layers.py)."""

from __future__ import annotations

from dataclasses import replace

from ...metadata.errors import ConfigError
from ..checkpoint.tensor_names import layer_prefixes
from ..models.deepseek_v4 import load_stream_mtp
from ..models.head_file import HeadFile, check_state_width, read_head
from ..models.mtp import load_mtp, takes_chained_states
from ..pace.draft_length import DraftShape
from .base import Drafter
from .family import Family, Loading, Speculation, Wanted
from .mtp_layers import MtpLayersDrafter
from .shifted import ShiftedDrafter


def _read(wanted: Wanted) -> Speculation:
    head = read_head(wanted.draft_dir, wanted.target)
    check_state_width(head, wanted.target)
    num_layers = len(layer_prefixes(head.names))  # config.json repeats the target's number of layers
    config = head.config.of_prediction_layers(num_layers).beside(wanted.target, num_layers)
    head = replace(head, config=config)
    is_chained = num_layers == 1 or takes_chained_states(head)
    return Speculation(
        algorithm=wanted.algorithm,
        shape=_shape(wanted, num_layers),
        hidden=wanted.layout(
            config, extend="handoff", recurrent="draft" if is_chained else None, num_target_rows=num_layers - 1
        ),
        make=lambda loading: _load(head, loading),
        draft_dir=head.directory,
        draft=config,
        settings=head.settings,
        has_pool=True,
        key_lookahead=num_layers,
        num_proposing=num_layers,
    )


def _shape(wanted: Wanted, num_layers: int) -> DraftShape:
    """Return what is drafted: with several layers a chain of at most one step per layer."""
    shape, directory = wanted.shape, wanted.draft_dir
    if num_layers == 1:
        return shape
    if not shape.is_chain:
        raise ConfigError(
            f"{directory} has {num_layers} MTP layers, which draft chains only; draft_topk is {shape.topk}: use 1"
        )
    if wanted.is_default_steps:
        return DraftShape(num_layers)
    if num_layers < shape.num_steps:
        raise ConfigError(
            f"draft_steps is {shape.num_steps}, but {directory} has {num_layers} MTP layers, each for one step:"
            f" use 1 to {num_layers}"
        )
    return shape


def _load(head: HeadFile, loading: Loading) -> Drafter:
    load = load_mtp if head.config.compressed is None else load_stream_mtp
    layers = load(head, layer_prefixes(head.names), loading.ends, loading.ranks)
    if len(layers) == 1:
        return ShiftedDrafter(layers[0], loading.pools, loading.hidden, loading.shape)
    return MtpLayersDrafter(layers, loading.pools, loading.hidden, loading.shape)


FAMILY = Family(name="mtp", read=_read, drafts_trees=True, recognises=lambda names: len(layer_prefixes(names)) > 0)
