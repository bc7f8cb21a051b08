"""Figures of a load: what each request took, the percentiles over all, and the goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Record(NamedTuple):
    """An answered request, in seconds."""

    ttft_s: float
    tpot_s: float
    second_s: float
    gap_s: float


class Slo(NamedTuple):
    """Bounds that a good request keeps, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `TTFT_MS,TPOT_MS`. Raises ValueError that says what is expected."""
        try:
            ttft_ms, tpot_ms = map(float, text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is no pair of milliseconds TTFT,TPOT such as 200,12") from None
        if not all(0 < bound < math.inf for bound in (ttft_ms, tpot_ms)):
            raise ValueError(f"{text!r}: both bounds must be more than 0 milliseconds")
        return cls(ttft_ms, tpot_ms)

    def is_kept(self, record: Record) -> bool:
        """Whether a request was good."""
        return record.ttft_s * 1e3 <= self.ttft_ms and record.tpot_s * 1e3 <= self.tpot_ms


def goodput(slo: Slo, records: Sequence[Record], num_ended: int, seconds: float) -> tuple[float, float]:
    """Return the good requests per second, and their share of all that ended."""
    num_good = sum(map(slo.is_kept, records))
    return num_good / seconds, num_good / max(1, num_ended)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values that are sorted, interpolated linearly between neighbours."""
    at = (len(values) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def summary(records: Sequence[Record], seconds: float, slos: Sequence[Slo]) -> dict[str, Any]:
    """Return percentiles in milliseconds, and for each SLO the good requests per second and their share. Without a
    request there are no percentiles."""
    row: dict[str, Any] = {"requests": len(records)}
    for name, column in zip(("ttft", "tpot", "second", "gap"), zip(*records, strict=True), strict=bool(records)):
        values = sorted(column)
        row |= {f"{name}_ms_p{percent}": percentile(values, percent) * 1e3 for percent in (50, 90, 99)}
    for slo in slos:
        per_s, share = goodput(slo, records, len(records), seconds)
        row[f"goodput_{slo.ttft_ms:g}_{slo.tpot_ms:g}"] = per_s
        row[f"good_share_{slo.ttft_ms:g}_{slo.tpot_ms:g}"] = share
    return row
