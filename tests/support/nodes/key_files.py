"""An allow-list file, and processes that are or were in it."""

from __future__ import annotations

from pathlib import Path

from baton.metadata.bus.allow_list import AllowList, add_line, line_of
from baton.metadata.bus.curve import KeyPair


class Listed:
    """An allow-list of processes with fresh keys. Each process reads its own copy of the file's contents."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self.pairs = {name: KeyPair.generate() for name in names}
        for name, pair in self.pairs.items():
            add_line(path, line_of(name, pair.public))

    def of(self, name: str) -> KeyPair:
        """Return the keys with which the process of that name is configured."""
        return self.pairs[name].listed(AllowList(self.path))

    def write(self, *names: str) -> None:
        """Write a list of exactly these names."""
        self.replace("".join(line_of(name, self.pairs[name].public) for name in names))

    def replace(self, text: str) -> None:
        """Replace the file by a new one, as an editor does."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)
