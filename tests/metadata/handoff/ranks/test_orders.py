"""The table of orders and reports in the module's text is complete."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from baton.metadata.handoff.ranks import orders as rank_orders
from baton.metadata.handoff.ranks.orders import PullOrder, PullReport, ServeOrder, ServeReport


@pytest.mark.parametrize(
    ("orders", "reports"), [(PullOrder, PullReport), (ServeOrder, ServeReport)], ids=["decode", "prefill"]
)
def test_the_table_names_every_order_and_report(orders: Any, reports: Any) -> None:
    lines = str(rank_orders.__doc__).splitlines()
    rows = [line.replace("decode node", "").replace("prefill node", "").split() for line in lines]
    assert {row[0] for row in rows if row} >= {kind.__name__ for kind in get_args(orders)}
    told = set(re.findall(r"\w+", " ".join(line[90:] for line in lines)))
    assert told >= {kind.__name__ for kind in get_args(reports)}
