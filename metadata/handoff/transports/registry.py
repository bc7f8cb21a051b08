"""The transports that exist, best first, one line each. base.py says what a transport is."""

from __future__ import annotations

from .base import Transport
from .cuda import CudaTransport
from .local import LocalTransport
from .zmq import ZmqTransport

TRANSPORTS: dict[str, type[Transport]] = {
    CudaTransport.name: CudaTransport,
    LocalTransport.name: LocalTransport,
    ZmqTransport.name: ZmqTransport,
}
