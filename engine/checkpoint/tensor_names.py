"""Names of tensors in a checkpoint: of the text model, if other models are beside it such as an image encoder, and of
prediction layers (MTP), which may be the target's own.

Wrappers name the text model in three ways; `lm_head` stands for the head in all of them:

    language_model.model.layers.0 ..., language_model.lm_head ...     LLaVA, Mistral 3, Kimi-K2.5
    model.language_model.layers.0 ..., lm_head ...                    Qwen3-VL
    model.layers.0 ..., lm_head ...                                   Qwen2.5-VL
"""

from __future__ import annotations

from collections.abc import Iterable

from ...metadata.errors import ModelError

_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_TOWERS = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "mm_projector",
    "image_newline",
    "embed_vision",
    "audio_tower",
    "embed_audio",
)
_OWN_PREFIXES = ("model.", "lm_head.", "mtp.")  # names that a checkpoint of a text model alone has
_OF_QWEN = "mtp"  # the prefix of what the layers of Qwen3-Next and Qwen3.5 share
_INPUTS = (".eh_proj.weight", ".input_proj.weight", ".e_proj.weight")  # of prediction layers in each layout


def text_tensors(names: Iterable[str], where: object) -> dict[str, str]:
    """Return the tensors of the text model: the name that the model family knows, and the name in the file.

    Tensors of other towers are left out. In a checkpoint without other towers every tensor keeps its name. Raises
    ModelError, which names `where`, for a tensor that belongs neither to the text model nor to a known tower."""
    names = sorted(names)
    if not any(name.startswith(tuple(_TEXT_PREFIXES)) or is_of_tower(name) for name in names):
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        prefix = next((each for each in _TEXT_PREFIXES if name.startswith(each)), None)
        if prefix is not None:
            found[_TEXT_PREFIXES[prefix] + name.removeprefix(prefix)] = name
        elif is_of_tower(name):
            continue
        elif name.startswith(_OWN_PREFIXES):
            found[name] = name
        else:
            raise ModelError(
                f"{where}: {name} belongs neither to the text model nor to a part that Baton leaves out"
                f" ({', '.join(_TOWERS)})"
            )
    return found


def is_of_tower(name: str) -> bool:
    """Return whether a tensor belongs to another model than the text model."""
    return name.removeprefix("model.").split(".", 1)[0] in _TOWERS


def layer_prefixes(names: frozenset[str]) -> tuple[str, ...]:
    """Return `model.layers.61`, ..., `model.mtp_layers.0`, ..., `mtp.0`, ... or `mtp.layers.0`, ..., by their numbers;
    none if there is no MTP layer."""
    if f"{_OF_QWEN}.fc.weight" in names:
        first = f"{_OF_QWEN}.layers."
        found = {first + name.removeprefix(first).partition(".")[0] for name in names if name.startswith(first)}
    else:
        found = {name.rsplit(".", 2)[0] for name in names if name.endswith(_INPUTS)}
    numbers = {prefix: prefix.rpartition(".")[2] for prefix in found}
    return tuple(sorted((each for each in found if numbers[each].isdecimal()), key=lambda each: int(numbers[each])))


def shared_prefix(prefix: str) -> str:
    """Return the prefix of the norms and the projection of the MTP layer at `prefix`: its own, or that of all layers of
    Qwen3-Next and Qwen3.5."""
    return _OF_QWEN if prefix.startswith(f"{_OF_QWEN}.layers.") else prefix
