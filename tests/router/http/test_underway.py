"""Requests under way, by the ids that their answers carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.router.errors import NotFound
from baton.router.http.underway import UnderWay


def test_what_has_ended_is_not_under_way_any_more() -> None:
    """A choice of prompts of which one has ended: the others are cancelled; once all have, the id is unknown, though
    the answer is still being written."""
    aborted: list[Any] = []
    under_way = UnderWay(lambda request, reason: aborted.append(request))
    caller: Any = SimpleNamespace(is_admin=False)
    over, running = SimpleNamespace(is_over=True), SimpleNamespace(is_over=False)
    both: Any = [over, running]
    with under_way.listed({"a", "b"}, caller, both):
        under_way.cancel("b", caller)
        assert aborted == [running]
        running.is_over = True
        with pytest.raises(NotFound, match="'a'"):
            under_way.cancel("a", caller)
    assert aborted == [running]
    with pytest.raises(NotFound):
        under_way.cancel("a", caller)
