"""The registry of architectures and their classes, and the one way to load a model."""

from __future__ import annotations

from pathlib import Path

import torch

from ...metadata.errors import ModelError
from ..model_config import ModelConfig
from ..progress import Progress
from ..weights import load_weights
from .hyper_llama import HyperLlamaModel
from .llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
    "HyperLlamaForCausalLM": HyperLlamaModel,
}


def load_model(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> LlamaModel:
    """Load the checkpoint in `model_dir`, ready to run. `progress(bytes_done, bytes_total)` is called while it loads.
    Raises ModelError as `load_weights` does, and for an architecture without a class here."""
    model_class = MODELS.get(config.architecture)
    if model_class is None:
        raise ModelError(f"{config.architecture} is not served; Baton serves {', '.join(MODELS)}")
    if config.hc_mult == 1:
        model_class = LlamaModel  # one stream is an ordinary Llama
    return model_class(config, load_weights(Path(model_dir), config, dtype, torch.device(device), progress))
