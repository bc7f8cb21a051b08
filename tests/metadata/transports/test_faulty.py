"""Faults on purpose come only from a plan file, and do what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton.metadata.messages import Cancelled, encode
from baton.metadata.transports.faulty import HOLD_S, Faults, FaultySocket, Plan

FRAMES = [encode(Cancelled(rid=f"r{i}", attempt=i)) for i in range(20)]


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Faults]:
    """Puts a plan into force for the FaultySockets of this process."""

    def put(**fields: Any) -> Faults:
        (tmp_path / "plan.json").write_bytes(msgspec.json.encode(Plan(**fields)))
        return Faults(tmp_path / "plan.json")

    return put


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, plan: Callable[..., Faults]) -> Iterator[tuple[Any, Any]]:
    """A faulty DEALER and a good ROUTER, connected; the DEALER is known as b"d"."""
    monkeypatch.setattr(FaultySocket, "faults", plan(), raising=False)
    with zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER, socket_class=FaultySocket)
        dealer.routing_id, dealer.linger, router.linger, router.rcvtimeo = b"d", 0, 0, 2000
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        dealer.send(FRAMES[0], zmq.NOBLOCK)
        assert router.recv_multipart() == [b"d", FRAMES[0]]
        yield dealer, router
        dealer.close()
        router.close()


def sent(dealer: Any, router: Any, count: int) -> list[bytes]:
    """What arrives of `count` frames that the faulty end sends, up to a good last one."""
    for frame in FRAMES[:count]:
        dealer.send(frame, zmq.NOBLOCK)
    arrived: list[bytes] = []
    deadline = time.monotonic() + 4 * HOLD_S
    while time.monotonic() < deadline:
        with pytest.raises(zmq.Again):  # what was held back goes on with the next look
            dealer.recv_multipart(zmq.NOBLOCK)
        while router.poll(10):
            arrived.append(router.recv_multipart()[1])
    return arrived


def test_a_process_without_the_variable_never_loads_it() -> None:
    code = (
        "import sys\nfrom baton.deploy.cli import main\nmain(['router', '--print-config'])\n"
        "assert not [name for name in sys.modules if 'faulty' in name]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_without_shares_everything_passes(pair: tuple[Any, Any]) -> None:
    assert sent(*pair, 20) == FRAMES


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("drop", lambda got: got == []),
        ("duplicate", lambda got: got == [frame for frame in FRAMES[:6] for _ in range(2)]),
        ("reorder", lambda got: sorted(got) == sorted(FRAMES[:6])),
        ("delay", lambda got: sorted(got) == sorted(FRAMES[:6]) and got != FRAMES[:6]),
        ("truncate", lambda got: len(got) == 6 and all(len(a) < len(b) for a, b in zip(got, FRAMES, strict=False))),
        ("flip", lambda got: [len(f) for f in got] == [len(f) for f in FRAMES[:6]] and not set(got) & set(FRAMES)),
    ],
)
def test_each_kind_of_fault_on_the_way_out(
    pair: tuple[Any, Any],
    plan: Callable[..., Faults],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    holds: Any,
) -> None:
    monkeypatch.setattr(FaultySocket, "faults", plan(frames={kind: 1.0}, seed=5))
    got = sent(*pair, 6)
    assert holds(got), got
    noted = [json.loads(line) for line in (tmp_path / "plan.faults").read_text().splitlines()]
    assert [(each["kind"], each["where"], each["attempt"]) for each in noted] == [
        (kind, "out:cancelled", attempt) for attempt in range(6)
    ]


def test_a_full_queue_and_the_way_in(
    pair: tuple[Any, Any], plan: Callable[..., Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    dealer, router = pair
    monkeypatch.setattr(FaultySocket, "faults", plan(frames={"full": 1.0}))
    with pytest.raises(zmq.Again):
        dealer.send(FRAMES[0], zmq.NOBLOCK)
    monkeypatch.setattr(FaultySocket, "faults", plan(frames={"duplicate": 1.0}, most=1, tags=("cancelled",)))
    for frame in FRAMES[:3]:
        router.send_multipart([b"d", frame])
    got: list[bytes] = []
    while dealer.poll(200) or len(got) < 4:
        got.append(dealer.recv_multipart()[0])
    assert got == [FRAMES[0], *FRAMES[:3]]


def test_a_plan_is_read_again_and_the_clock_never_goes_back(plan: Callable[..., Faults]) -> None:
    faults = plan(clock_s=100.0)
    assert faults.monotonic() - time.monotonic() > 99
    plan()
    time.sleep(0.05)
    assert faults.plan == Plan()
    assert faults.monotonic() - time.monotonic() > 99
