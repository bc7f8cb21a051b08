"""Transport `plain`, for any two hosts with keys whose operators have said --plain-pages: as `aes`, but whoever sees
the network can read the pages, and so the prompts. Each message still has a tag (GMAC), so nobody can change one."""

from __future__ import annotations

from typing import ClassVar

from .aes import AesTransport


class PlainTransport(AesTransport):
    """Pulls pages that are authenticated and not encrypted."""

    name: ClassVar[str] = "plain"
    is_readable: ClassVar[bool] = True
