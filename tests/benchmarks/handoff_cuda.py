"""Time the handoff between two processes on GPUs, beside a plain copy on the device (bench_handoff.py --device cuda).

The time runs from the moment when prefill begins to offer computed pages, digests included, to `Arrived`: every page is
in decode's pool, checked if digests are on, and the row has arrived. The ticket was claimed before. The fixed cost is
that of one page. At the end, every byte of the longest handoff of each kind is compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = map(str, (Path(__file__).parents[1] / "support").glob("*"))

from gpu_nodes import GpuPool, GpuPrefill, gpu_client, gpu_prefill, make_pool, poll_until

from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.schema.schema import make_schema, on_gpu, page_bytes
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.node_info import PoolLayout
from baton.metadata.wire.request import Unit

LAYOUT = PoolLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # the 8B shape
TTFT_TOKENS, TTFT_S = 8192, 0.230  # of a prompt on an H200, for what checksums of both sides are of it


def measure(
    devices: list[str], transports: tuple[str, ...], rounds: int, page_size: int, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """Measure `handoff`: one row per length (in rising order) and kind of handoff. The longest does not run through the
    host.
    """
    rows: list[dict[str, Any]] = []
    all_lengths, num_checked = (page_size, *lengths), 0
    for has_checksums in (True, False):
        schema = on_gpu(make_schema(LAYOUT, None, page_size, checksums=has_checksums))
        num_pages = max(lengths) // page_size + 1
        ours, model = make_pool(schema, num_pages, device=devices[-1]), make_pool(schema, num_pages, 1, devices[-1])
        with gpu_prefill(schema, num_pages, epoch=f"e{has_checksums}", device=devices[0]) as prefill:
            for transport in transports:
                client = gpu_client(schema, ours, transport)
                ours.kvs[0].zero_()
                tried = all_lengths if transport == "cuda" else all_lengths[:-1]
                for num_tokens in tried:
                    row = _handoffs(client, prefill, num_tokens // page_size, rounds)
                    rows.append({"transport": transport, "checksums": has_checksums, "tokens": num_tokens} | row)
                client.close()
                end = 1 + tried[-1] // page_size
                assert torch.equal(ours.kvs[0][:, 1:end], model.kvs[0][:, 1:end]), transport
                num_checked += ours.kvs[0][:, 1:end].nbytes
        if has_checksums:
            rows += [{"tokens": tokens} | _copies(ours, model, tokens // page_size, rounds) for tokens in all_lengths]
            rows += [{"tokens": tokens} | _digests(ours, tokens // page_size, rounds) for tokens in all_lengths]
        del ours, model
        torch.cuda.empty_cache()
    bytes_a_token = page_bytes(make_schema(LAYOUT, None, page_size)) / page_size
    rows = [row | {"gb_s": row["tokens"] * bytes_a_token / row["s"] / 1e9} for row in rows]
    digest_s = {row["tokens"]: row["s"] for row in rows if row["transport"] == "checksums alone"}
    share = {"checksum_share_of_ttft": 2 * digest_s[TTFT_TOKENS] / TTFT_S} if TTFT_TOKENS in digest_s else {}
    about = {"devices": devices, "transports": list(transports), "page_size": page_size, "checked_bytes": num_checked}
    return about | share | {"handoff": rows}


def _handoffs(client: HandoffClient, prefill: GpuPrefill, num_pages: int, rounds: int) -> dict[str, Any]:
    """Return medians in seconds. `offer_s`: prefill's part, before the offer is sent."""
    totals: list[float] = []
    offers: list[float] = []
    pages = list(range(1, num_pages + 1))
    for number in range(rounds + 2):
        unit = Unit(f"{num_pages}", number % 128, int(time.monotonic() * 1000))
        prefill.tell("open", unit, num_pages)
        client.claim(unit, prefill.peer, 0, pages)
        prefill.wait_for("Claimed", client)
        prefill.post("hand", unit, pages, int(time.monotonic() * 1e6))  # a fresh generation: digested anew
        arrived = poll_until(client, (Arrived, TransferFailed))
        ended = time.perf_counter()
        assert isinstance(arrived, Arrived), arrived
        begun, offer_s = prefill.wait_for("hand")
        prefill.wait_for("TicketEnded")
        if number >= 2:
            totals.append(ended - begun)
            offers.append(offer_s)
    return {"s": statistics.median(totals), "least_s": min(totals), "offer_s": statistics.median(offers)}


def _copies(ours: GpuPool, model: GpuPool, num_pages: int, rounds: int) -> dict[str, Any]:
    """Copy the same bytes, contiguous, with one copy of torch on decode's device."""
    num_bytes = ours.kvs[0][:, :num_pages].numel()
    source, target = model.kvs[0].view(-1)[:num_bytes], ours.kvs[0].view(-1)[:num_bytes]
    return {"transport": "device copy", "checksums": False, "s": _median(lambda: target.copy_(source), rounds, ours)}


def _digests(ours: GpuPool, num_pages: int, rounds: int) -> dict[str, Any]:
    pages = list(range(1, num_pages + 1))
    seconds = _median(lambda: ours.pool.digest(pages), rounds, ours)
    return {"transport": "checksums alone", "checksums": True, "s": seconds}


def _median(call: Any, rounds: int, pool: GpuPool) -> float:
    seconds: list[float] = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize(pool.kvs[0].device)
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize(pool.kvs[0].device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])
