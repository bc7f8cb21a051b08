"""An allow-list file, and processes that are in it or were."""

from __future__ import annotations

from pathlib import Path

from baton.metadata.bus.allow_list import AllowList, add_line, line_of
from baton.metadata.bus.curve import KeyPair


class Listed:
    """An allow-list of processes with fresh keys. Each reads the file by itself, as on hosts of their own."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self.pairs = {name: KeyPair.generate() for name in names}
        for name, pair in self.pairs.items():
            add_line(path, line_of(name, pair.public))

    def of(self, name: str) -> KeyPair:
        """What the process of that name is configured with."""
        return self.pairs[name].listed(AllowList(self.path))

    def write(self, *names: str) -> None:
        """The list says these names alone from now on."""
        self.replace("".join(line_of(name, self.pairs[name].public) for name in names))

    def replace(self, text: str) -> None:
        """As an editor does: a new file in the old one's place."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)
