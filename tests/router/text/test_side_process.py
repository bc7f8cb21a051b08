"""A process beside the router. test_grammar_process.py has its deaths and its end with the router."""

from __future__ import annotations

import msgspec
import pytest

from baton.router.text.side_process import SideProcess


def test_a_program_that_ends_at_once_is_an_error_and_not_a_wait() -> None:
    process = SideProcess("this", msgspec.msgpack.Decoder(str))  # prints a poem and ends
    assert process.start()
    assert not process.start() or process.pid is not None
    with pytest.raises((OSError, msgspec.DecodeError)):
        process.ask("hello")
        process.ask("hello again")
    process.close()
    process.join()
    assert process.pid is None
    with pytest.raises(BrokenPipeError):
        process.start()
