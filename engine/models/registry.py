"""The one way to load a model."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

import torch

from ...metadata.errors import ModelError
from ..checkpoint.checkpoint import Checkpoint, TensorSpec
from ..checkpoint.made_checkpoint import FILES, EveryName, MadeCheckpoint, maker
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.tensor_names import layer_prefixes, shared_prefix
from ..checkpoint.weights import UNUSED, CheckpointWeights, ListedWeights
from ..progress import Progress
from ..ranks.ranks import ONE_RANK, Ranks
from .decoder import DecoderModel
from .families import FAMILIES
from .family import ModelFamily

logger = logging.getLogger(__name__)


def load_model(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    ranks: Ranks = ONE_RANK,
    *,
    load_format: str = FILES,
) -> DecoderModel:
    """Load the checkpoint in `model_dir`, or this rank's share of it, ready to run. `progress(bytes_done, bytes_total)`
    is called while it loads. `load_format`: as of made_checkpoint.py.

    Raises ConfigError if so many ranks cannot share the model. Raises ModelError for an architecture without a family
    here, for files or tensors that are missing, damaged, or of a wrong shape or dtype, and for tensors that neither the
    family nor a drafter uses."""
    ranks.check(config)
    family = _family(config)
    if load_format == FILES:
        checkpoint = Checkpoint(Path(model_dir))
        specs = tensor_specs(config, checkpoint.names)
        _check_tied(checkpoint, config)
    else:
        specs = tensor_specs(config, EveryName())
        checkpoint = MadeCheckpoint(Path(model_dir), specs, maker(load_format, config, torch.device(device)))
    bytes_total = checkpoint.check(specs)
    _refuse_unknown(checkpoint, config, specs)
    if checkpoint.num_left_out:
        logger.info(
            "%s holds more than a text model: %d tensors of other parts are left out",
            checkpoint.model_dir,
            checkpoint.num_left_out,
        )
    weights = CheckpointWeights(
        checkpoint,
        dtype,
        torch.device(device),
        progress,
        bytes_total,
        ranks=ranks,
        quantization=config.quantization,
    )
    return family.read(config, weights)


def tensor_specs(config: ModelConfig, names: Container[str] = ()) -> list[TensorSpec]:
    """Return every tensor of a checkpoint of this configuration. `names`: tensors that the checkpoint has, which tell
    the formats of its weights; plain weights unless told otherwise."""
    listed = ListedWeights(names, config.quantization)
    _family(config).read(config, listed)
    return listed.specs


def _family(config: ModelConfig) -> ModelFamily:
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ModelError(f"{config.architecture} is not served; Baton serves {', '.join(FAMILIES)}")
    return family


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelError if a head that is stored beside a tied embedding differs from it."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if config.tie_word_embeddings and checkpoint.names.issuperset(names):
        head, embedding = map(checkpoint.read, names)
        if not torch.equal(head, embedding):
            raise ModelError(
                f"{checkpoint.model_dir}: lm_head.weight differs from the embedding, but tie_word_embeddings is true; "
                "set it to false in config.json"
            )


def _refuse_unknown(checkpoint: Checkpoint, config: ModelConfig, specs: list[TensorSpec]) -> None:
    """Raise ModelError for a tensor that nobody uses: the output would be wrong. Prediction layers are a drafter's if
    the family can have them, and tied embeddings may be stored twice."""
    layers = tuple(f"model.layers.{layer}." for layer in range(config.num_layers))
    prefixes = [each for each in layer_prefixes(checkpoint.names) if each.startswith(_family(config).own_mtp)]
    own_mtp = tuple(f"{shared_prefix(each)}." for each in prefixes)
    others = tuple(each for each in own_mtp if not each.startswith(layers))
    others += ("lm_head.weight",) if config.tie_word_embeddings else ()
    shared = range(config.num_layers - config.num_shared_layers, config.num_layers)  # layers without keys of their own
    others += tuple(f"model.layers.{i}.self_attn.{name}" for i in shared for name in ("k_proj", "v_proj", "k_norm"))
    unknown = checkpoint.names - {spec.name for spec in specs}
    unknown = {name for name in unknown if not name.startswith(others) and not name.endswith(UNUSED)}
    if unknown:
        raise ModelError(
            f"{checkpoint.model_dir} has tensors that {config.architecture} does not use "
            f"({', '.join(sorted(unknown)[:3])}); is config.json that of another model?"
        )
