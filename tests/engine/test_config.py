"""Settings of model execution: help texts, and bounds that name the value."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from baton.decode_node.config import DecodeConfig
from baton.engine.config import CHUNK_TOKENS, DtypeChoice, EngineConfig
from baton.engine.engine import _DTYPES
from baton.metadata.errors import ConfigError
from baton.prefill_node.config import PrefillConfig

KINDS = (EngineConfig, PrefillConfig, DecodeConfig)


def test_every_field_has_a_help_text() -> None:
    assert all(field.metadata["help"] for kind in KINDS for field in fields(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["num_pages", "threads", "tp", "dp_attention", "max_running", "chunk_tokens"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_number_below_one_is_named(kind: type, name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be 1 or more"):
        kind(**{name: value})
    assert getattr(kind(**{name: 1}), name) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_bounds_of_every_node_hold_too(kind: type) -> None:
    with pytest.raises(ConfigError, match="node_id is empty"):
        kind(node_id="")


def test_a_chunk_is_as_long_as_the_help_says() -> None:
    text = next(field.metadata["help"] for field in fields(EngineConfig) if field.name == "chunk_tokens")
    prefill, decode = PrefillConfig(), DecodeConfig()
    assert f"{CHUNK_TOKENS}; on cuda {prefill.chunk('cuda')} for prefill nodes and {decode.chunk('cuda')}" in text
    assert prefill.chunk("cpu") == decode.chunk("cpu") == CHUNK_TOKENS
    assert prefill.chunk("cuda") > decode.chunk("cuda") > CHUNK_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_is_set_holds_for_every_device(kind: type[EngineConfig]) -> None:
    config = kind(chunk_tokens=7)
    assert config.chunk("cpu") == config.chunk("cuda") == 7


def test_dtypes_are_those_that_the_engine_computes_in() -> None:
    assert set(get_args(DtypeChoice)) == {"auto", *_DTYPES}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_of_one_kind(kind: type[EngineConfig]) -> None:
    assert (kind().num_ranks, kind(tp=3).num_ranks, kind(dp_attention=2).num_ranks) == (1, 3, 2)
    with pytest.raises(ConfigError, match=r"tp is 3 and dp_attention is 2: .*leave one of the two at 1"):
        kind(tp=3, dp_attention=2)
