"""Descriptions of nodes have bounds, so that a hostile Hello cannot make the reader allocate memory."""

from __future__ import annotations

import msgspec
import pytest

from baton.metadata.wire.node_info import MAX_POOLS, DevicePools, RowField


@pytest.mark.parametrize("width", [0, (1 << 22) + 1])
def test_the_width_of_a_row_field_is_bounded(width: int) -> None:
    frame = msgspec.msgpack.encode({"name": "first_token", "dtype": "int32", "width": width})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=RowField)


@pytest.mark.parametrize("changes", [{"sizes": []}, {"sizes": [1] * (MAX_POOLS + 1)}, {"token": b"short"}])
def test_pools_of_a_gpu_are_at_least_one_with_a_whole_token(changes: dict[str, object]) -> None:
    good = {"device": "GPU-0", "sizes": [1, 2], "token": bytes(16)}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=DevicePools).sizes == (1, 2)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(good | changes), type=DevicePools)
