"""Work, orders of handoffs and reports as bytes, between the processes of the ranks of a node. Nothing is pickled.

A frame is one byte, the place of its type in the list of types, and the value as MessagePack.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from ..metadata.errors import ProtocolError
from ..metadata.handoff.rank_orders import BeginPulling, BeginServing, PullOrder, PullReport, ServeOrder, ServeReport
from ..metadata.wire.request import SamplingParams
from .sampling_state import Needs, SamplingState
from .work import (
    CatchUp,
    Chunk,
    ChunkReport,
    Forget,
    LoadSlot,
    Recompute,
    Round,
    RoundTokens,
    RoundWork,
    Scores,
    WarmUp,
)

Work = RoundWork | Chunk | Forget | WarmUp
Report = RoundTokens | Scores | ChunkReport
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
    RoundTokens,
    Scores,
    ChunkReport,
    *get_args(HandoffStart),
    *get_args(HandoffOrder),
    *get_args(HandoffReport),
)


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
_DECODERS = tuple(msgspec.msgpack.Decoder(each, dec_hook=_decode_state) for each in _TYPES)


def encode(value: Work | Report | HandoffStart | HandoffOrder | HandoffReport) -> bytes:
    """Return the frame of a value."""
    return bytes([_TYPES.index(type(value))]) + _ENCODER.encode(value)


def decode(frame: bytes) -> Any:
    """Return the value of a frame, of one of the types that `encode` takes. Raises ProtocolError if the frame holds
    none."""
    if not frame or frame[0] >= len(_DECODERS):
        raise ProtocolError(f"a frame of {len(frame)} bytes holds no work of this version")
    try:
        return _DECODERS[frame[0]].decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a frame does not hold the work that it names: {error}") from None
