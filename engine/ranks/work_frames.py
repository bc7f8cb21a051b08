"""Work, orders and reports of handoffs as bytes, between the processes of the ranks of a node. Nothing is pickled.

A frame is one byte, the place of its type in the list of types, and the value as MessagePack. Work that computes rows
of texts goes without the texts, and with the tokens around each row (known_tokens.py): a prompt of many chunks would
travel once per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from ...metadata.errors import ProtocolError
from ...metadata.handoff.ranks.orders import BeginPulling, BeginServing, PullOrder, PullReport, ServeOrder, ServeReport
from ...metadata.wire.request import SamplingParams
from ..prompts.known_tokens import Around
from ..sampling.state import Needs, SamplingState
from ..work import (
    BatchRow,
    CatchUp,
    Chunk,
    Forget,
    LoadPages,
    LoadSlot,
    Recompute,
    Round,
    RoundWork,
    ShareSlots,
    StorePages,
    WarmUp,
)

Work = RoundWork | Chunk | Forget | WarmUp | StorePages | LoadPages | ShareSlots
HandoffStart = BeginPulling | BeginServing
HandoffOrder = PullOrder | ServeOrder
HandoffReport = PullReport | ServeReport
_TYPES: tuple[type, ...] = (
    LoadSlot,
    Recompute,
    CatchUp,
    Round,
    Chunk,
    Forget,
    WarmUp,
    StorePages,
    LoadPages,
    ShareSlots,
    *get_args(HandoffStart),
    *get_args(HandoffOrder),
    *get_args(HandoffReport),
)


_Texted = Chunk | Recompute | Round  # Round: of the Recompute beside it


class _State(msgspec.Struct, array_like=True):
    """The fields of a `SamplingState`."""

    params: SamplingParams
    seed: int
    vocab_size: int
    prompt_len: int
    num_generated: int
    prompt_ids: tuple[int, ...]
    output_ids: list[int]
    bias: dict[int, float]
    banned_ids: tuple[int, ...]
    lasting_needs: Needs


def _encode_state(value: Any) -> _State:
    if not isinstance(value, SamplingState):
        raise TypeError(f"work holds a {type(value).__name__}, which has no form in bytes")
    return _State(*(getattr(value, name) for name in _State.__struct_fields__))


def _decode_state(kind: type, value: Any) -> SamplingState:
    assert kind is SamplingState, kind
    fields = msgspec.convert(value, _State)
    state = SamplingState.__new__(SamplingState)
    for name in _State.__struct_fields__:
        setattr(state, name, getattr(fields, name))
    return state


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_state)
_DECODERS: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(
    msgspec.msgpack.Decoder(tuple[each, list[Around]] if issubclass(each, _Texted) else each, dec_hook=_decode_state)
    for each in _TYPES
)


def encode(value: Work | HandoffStart | HandoffOrder | HandoffReport) -> bytes:
    """Return the frame of a value."""
    body = value
    if isinstance(value, _Texted):
        rows, texts = _rows_of(value)
        around = [Around.of(row, text) for row, text in zip(rows, texts, strict=True)]
        body = _with_texts(value, [()] * len(rows)), around
    return bytes([_TYPES.index(type(value))]) + _ENCODER.encode(body)


def decode(frame: bytes) -> Any:
    """Return the value of a frame, of one of the types that `encode` takes. Raises ProtocolError if the frame holds
    none."""
    if not frame or frame[0] >= len(_DECODERS):
        raise ProtocolError(f"a frame of {len(frame)} bytes holds no work of this version")
    try:
        body = _DECODERS[frame[0]].decode(memoryview(frame)[1:])
        if not issubclass(_TYPES[frame[0]], _Texted):
            return body
        value, around = body
        rows, _ = _rows_of(value)
        return _with_texts(value, [each.text(row) for each, row in zip(around, rows, strict=True)])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a frame does not hold the work that it names: {error}") from None


def _rows_of(work: _Texted) -> tuple[Sequence[BatchRow], Sequence[Sequence[int]]]:
    """Return the rows of a work, and the text that each is of."""
    match work:
        case Chunk():
            return [each.row for each in work.rows], [each.token_ids for each in work.rows]
        case Recompute():
            return work.rows, work.token_ids
        case Round():
            return ((), ()) if work.beside is None else _rows_of(work.beside)


def _with_texts(work: _Texted, texts: Sequence[Sequence[int]]) -> _Texted:
    """Return the work with these texts of its rows."""
    match work:
        case Chunk():
            rows = [replace(each, token_ids=text) for each, text in zip(work.rows, texts, strict=True)]
            return replace(work, rows=rows)
        case Recompute():
            return replace(work, token_ids=texts)
        case Round() if work.beside is not None:
            return replace(work, beside=_with_texts(work.beside, texts))
        case Round():
            return work
