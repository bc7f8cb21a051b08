"""Charts as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from baton.deploy.bench.charts import Panel, bars, lines


@pytest.mark.parametrize("draw", [bars, lines])
@pytest.mark.parametrize("largest", [0.0, 0.3, 1234.5])
def test_any_values_make_a_picture(draw: object, largest: float) -> None:
    panel = Panel("time, ms", "requests/s", {"p50": [("1", 0.0), ("2", largest)], "p99 <b>": [("1", largest)]})
    picture = ElementTree.fromstring(draw([panel, panel], "from & to"))  # type: ignore[operator]
    texts = {each.text for each in picture.iter() if each.tag.endswith("text")}
    assert {"p50", "p99 <b>", "from & to", "time, ms", "requests/s"} <= texts
