"""A finding of `baton doctor`, and the table in which findings are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from ..terminal import printable

Level = Literal["ok", "note", "warning", "error"]

_NARROW = 60  # columns; below it the words stand under the name of their check
_LEVEL_LEN = max(map(len, ("ok", "note", "warning", "error"))) + 1
_NAME_LEN = 12


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check: the fact and the remedy, in a sentence each. The remedy is empty if nothing is wrong, or
    if the fact is an error message that names it."""

    level: Level
    what: str
    mend: str = ""
    check: str = ""


def table(findings: Iterable[Finding], width: int) -> Iterator[str]:
    """Yield the lines of a table that fits `width` columns. Only a word that is longer, such as a path, is not broken,
    so that it can be pasted. Texts of servers and files get no control over the terminal."""
    for finding in findings:
        title = f"{finding.level:<{_LEVEL_LEN}}{finding.check:<{_NAME_LEN}}"
        indent = " " * (4 if width < _NARROW else len(title))
        first = indent if width < _NARROW else title
        if width < _NARROW:
            yield title.rstrip()
        yield from _wrapped(finding.what, width, first, indent)
        if finding.mend:
            yield from _wrapped(finding.mend, width, f"{indent}-> ", f"{indent}   ")


def _wrapped(text: str, width: int, first: str, indent: str) -> list[str]:
    text = printable(" ".join(text.split()))
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
