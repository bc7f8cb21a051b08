"""Errors of the router, as metrics and traces count them."""

from __future__ import annotations

from baton.metadata.errors import Overloaded, Unavailable
from baton.router.errors import RequestCancelled, outcome_of


def test_each_error_counts_as_one_outcome() -> None:
    assert outcome_of(Overloaded("no")) == "refused"
    assert outcome_of(RequestCancelled("no")) == "cancelled"
    assert outcome_of(Unavailable("no")) == "failed"
