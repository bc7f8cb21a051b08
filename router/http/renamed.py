"""Fields under another name: a body that is served as one of another route is refused by its own names."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ...metadata.errors import RequestError


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Let refusals in the block name the client's field. `names`: paths of fields as the block knows them, and as the
    client does."""
    try:
        yield
    except RequestError as error:
        words = str(error)
        for name, shown in names.items():
            if words.startswith((f"{name}:", f"{name}.", f"{name}[")):
                raise RequestError(shown + words.removeprefix(name), param=shown.partition(".")[0]) from None
        raise
