"""`baton prefill` refuses an address that no decode node could connect to."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from baton.metadata.errors import ConfigError
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.main import run


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Restore pytest's log handlers after `run` has set up the process's log."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"bind_host .* is a wildcard: give the address"):
        run(PrefillConfig(model="unused", bind_host=host))
