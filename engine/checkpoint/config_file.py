"""A config.json on disk, read with typed getters whose errors name file, key and value.

The objects of this file know which fields they were asked for. config_fields.py refuses most of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ...metadata.errors import ModelError

TEXT, HEAD_LAYER = _INNER = ("text_config", "transformer_layer_config")
_TEXT_TYPES = {  # model_type of a model with images: that of its text model, if the file does not say
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "vipllava": "llama",
}
_FLAT = ("qwen2_vl", "qwen2_5_vl")  # published with the fields of the text model beside those of the whole
_OF_THE_WHOLE = ("architectures", "dtype", "torch_dtype", "quantization_config")
_ENDS = ("bos_token_id", "eos_token_id")


class Fields:
    """The fields of one JSON object, read with typed getters. The getters raise ModelError, naming the value and what
    to do, for a value of another type."""

    def __init__(self, path: Path, place: str, fields: dict[str, Any]) -> None:
        """`place`: what errors write before a key."""
        self.path = path
        self._place, self._fields = place, fields
        self._asked: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def get(self, key: str) -> Any:
        """Return the value, or None if it is null or absent."""
        self._asked.add(key)
        return self._fields.get(key)

    def has(self, key: str) -> bool:
        self._asked.add(key)
        return key in self._fields

    def section(self, key: str) -> Fields:
        """Return the object at `key`, which has no fields if it is null or absent. Each call returns the same one."""
        if key not in self._sections:
            fields = self.get(key)
            if fields is not None and not isinstance(fields, dict):
                raise self.error(key, "must be an object")
            self._sections[key] = Fields(self.path, f"{self._place_of(key)}{key}.", cast(dict[str, Any], fields or {}))
        return self._sections[key]

    def sections(self) -> Iterator[Fields]:
        """Yield the objects that `section` returned, and those inside them."""
        for section in self._sections.values():
            yield section
            yield from section.sections()

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Give fields that are absent these values."""
        for key, value in defaults.items():
            self._fields.setdefault(key, value)

    def replace(self, fields: Mapping[str, Any]) -> None:
        """Give fields these values, whatever they have."""
        self._fields.update(fields)

    def unread(self) -> dict[str, Any]:
        """Return the fields that nobody asked for."""
        return {key: value for key, value in self._fields.items() if key not in self._asked}

    def error(self, key: str, what: str, *, value: Any = None) -> ModelError:
        value = self._fields.get(key) if value is None else value
        return ModelError(f"{self.path}: {self._place_of(key)}{key} = {value!r} {what}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"must be a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self.positive(key, default if self.get(key) is None else self.get(key))

    def positive(self, key: str, value: Any) -> float:
        """Return `value`, which was found at `key`, as a positive number."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, "must be a positive number", value=value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = False if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def _place_of(self, key: str) -> str:
        del key  # all fields of an object are in one place, but for a text model's
        return self._place


class ConfigFile(Fields):
    """One JSON object on disk. If it describes a text model inside a larger one, in `text_config`, or the layer of a
    draft head, in `transformer_layer_config` (Speculators), the getters read that.

    Raises ModelError as `read_object` does."""

    def __init__(self, path: Path) -> None:
        fields = read_object(path)
        self._inner_key = next((key for key in _INNER if isinstance(fields.get(key), dict)), "")
        self._inner = cast(dict[str, Any], fields[self._inner_key]) if self._inner_key else {}
        self.whole_type = str(fields.get("model_type") or "")
        self._is_flat = not self._inner_key and self.whole_type in _FLAT
        if self._is_flat:
            fields.pop("vision_config", None)
        super().__init__(path, "", _inner_fields(fields, self._inner) if self._inner_key else fields)

    @property
    def text_type(self) -> str | None:
        """The `model_type` of the text model if it is part of a larger one, else None."""
        of_whole = _TEXT_TYPES.get(self.whole_type)
        if self._inner_key == TEXT:
            return str(self._inner.get("model_type") or of_whole)
        return of_whole if self._is_flat else None

    @property
    def lacks_text(self) -> bool:
        """Whether this is a model with images that does not describe its text model."""
        return self.whole_type in _TEXT_TYPES and self.text_type is None

    @property
    def is_doubtful_tie(self) -> bool:
        """Whether the whole and the text model say different things of `tie_word_embeddings`."""
        inner, outer = self._inner.get("tie_word_embeddings"), self.get("tie_word_embeddings")
        return isinstance(inner, bool) and isinstance(outer, bool) and inner != outer

    @property
    def model_type(self) -> str:
        """The `model_type` of the text model, be it a part of a larger one or not."""
        return self.text_type or self.whole_type

    @property
    def architecture(self) -> str:
        """The first of `architectures`; "" if there is none."""
        architectures = self.get("architectures")
        first: Any = cast(list[Any], architectures)[0] if isinstance(architectures, list) and architectures else None
        return first if isinstance(first, str) else ""

    def _place_of(self, key: str) -> str:
        is_inside = key in self._inner or key not in self._fields
        return f"{self._inner_key}." if self._inner_key and is_inside else ""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ModelError, saying what to do, for one that is missing or damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model directory holds {path.name}") from None
    except PermissionError:
        raise ModelError(f"{path} cannot be read by this user: permission denied; let it read the file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON ({error}); copy the checkpoint again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a {type(raw).__name__}, not a JSON object; copy the checkpoint again")
    return cast(dict[str, Any], raw)


def _inner_fields(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model inside, with those that a wrapper states for the whole model."""
    fields = dict(inner)
    for key in _OF_THE_WHOLE:
        if fields.get(key) is None and key in outer:
            fields[key] = outer[key]
    for key in _ENDS:  # the wrapper's come first, as in transformers
        if outer.get(key) is not None:
            fields[key] = outer[key]
    if isinstance(outer.get("tie_word_embeddings"), bool):  # the wrapper owns the head
        fields["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return fields
