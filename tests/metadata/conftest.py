"""Fixtures of messages, of every type and filled from their own declarations, and of inboxes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import uvloop
from samples import make_sample

from baton.metadata.handoff.descriptor_inbox import DescriptorInbox


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests in the kind of loop that the router uses."""
    return {"uvloop": uvloop.new_event_loop}


Sample = Callable[..., Any]


@pytest.fixture
def sample() -> Sample:
    """`sample(Type, seed=0, **fields)`: a valid message of that type, the given fields as given."""

    def make(kind: type, seed: int = 0, **fields: Any) -> Any:
        message = make_sample(kind, random.Random(f"{kind.__name__}:{seed}"))
        return msgspec.structs.replace(message, **fields)

    return make


@pytest.fixture
def nodes() -> Iterator[list[Any]]:
    """Whatever is appended here is closed afterwards, the last first."""
    held: list[Any] = []
    yield held
    for node in reversed(held):
        node.close()


@pytest.fixture
def inbox() -> Iterator[DescriptorInbox]:
    """An inbox of descriptors that is closed after the test."""
    inbox = DescriptorInbox()
    yield inbox
    inbox.close()
