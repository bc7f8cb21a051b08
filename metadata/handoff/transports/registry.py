"""The transports that exist, best first, one line each. base.py says what a transport is."""

from __future__ import annotations

from .aes import AesTransport
from .base import Transport
from .cuda import CudaTransport
from .local import LocalTransport
from .nixl import NixlTransport
from .plain import PlainTransport
from .ranks import RanksTransport
from .zmq import ZmqTransport

TRANSPORTS: dict[str, type[Transport]] = {
    CudaTransport.name: CudaTransport,
    LocalTransport.name: LocalTransport,
    PlainTransport.name: PlainTransport,
    AesTransport.name: AesTransport,
    ZmqTransport.name: ZmqTransport,
    NixlTransport.name: NixlTransport,
}


def transport_named(name: str) -> type[Transport]:
    """Return a transport by its name in a hello or a welcome. Raises KeyError if there is none.

    `ranks` has no place of its own in the order: it is used exactly if a node has several ranks."""
    return RanksTransport if name == RanksTransport.name else TRANSPORTS[name]
