"""Transport `plain`: the transport `aes` without encryption, for two nodes with keys and --plain-pages.

Everybody who sees the network can read the pages, and so the prompts. Nobody can change them: each message has an
authentication tag (GMAC)."""

from __future__ import annotations

from typing import ClassVar

from .aes import AesTransport


class PlainTransport(AesTransport):
    """Pulls pages that are authenticated and not encrypted."""

    name: ClassVar[str] = "plain"
    is_readable: ClassVar[bool] = True
