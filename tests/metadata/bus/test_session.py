"""The automaton by which a node joins the router: alone with a clock that the test turns, and over sockets."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import pytest
from patience import until
from ports import bind_again

from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.liveness import HeartbeatThread
from baton.metadata.bus.session import PROVEN_S, Joined, RouterChanged, RouterLost, RouterRefused, RouterSession
from baton.metadata.wire.membership import Hello, HelloAgain, Proven, Refusal, RouterHeartbeat, TokenizerFile, Welcome
from baton.metadata.wire.messages import Cancel, ToRouter
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN

FILE = TokenizerFile("digest", b"data")
LOAD = Load(free_pages=1, running=0, waiting=0)


def welcome(epoch: str = "a", need: bool = False) -> Welcome:
    return Welcome(router_epoch=epoch, protocol=PROTOCOL_MAX, need_tokenizer=need)


def work(epoch: str = "a") -> Cancel:
    return Cancel(router_epoch=epoch, rid="r", attempt=0, choices=None, reason="")


class Node:
    def __init__(self, hello: Hello) -> None:
        self.now = 100.0
        self.said: list[ToRouter] = []
        self.spoken: list[int] = []  # the protocol of each
        self.is_full = False
        self.round_trip_s = self.cut_s = 0.0
        self.session = RouterSession(
            hello, self._send, lambda: FILE, lambda: self.now, lambda: self.round_trip_s, lambda: self.cut_s
        )
        self.session.start()

    def _send(self, message: ToRouter, protocol: int) -> bool:
        if not self.is_full:
            self.said.append(message)
            self.spoken.append(protocol)
        return not self.is_full

    def take(self, *messages: Any) -> list[Any]:
        return self.session.take(messages)

    def hellos(self) -> int:
        count = sum(isinstance(message, Hello) for message in self.said)
        self.said.clear()
        return count


@pytest.fixture
def hello(sample: Any) -> Hello:
    lowest, highest = PROTOCOL_MIN, PROTOCOL_MAX
    return sample(Hello, node_id="node", epoch="1", protocol_min=lowest, protocol_max=highest, protocol=lowest)


@pytest.fixture
def node(hello: Hello) -> Node:
    return Node(hello)


@pytest.fixture
def joined(node: Node) -> Node:
    assert node.take(welcome()) == [Joined("a", PROTOCOL_MAX)]
    node.said.clear()
    node.now += 60
    node.take(RouterHeartbeat(router_epoch="a"))
    return node


def test_a_started_session_sends_one_hello(node: Node, hello: Hello) -> None:
    assert node.said == [hello]
    node.now += 60
    assert node.take() == []  # no router yet: the Hello waits in the link
    assert node.said == [hello]
    assert not node.session.is_joined


def test_welcome_joins_and_the_tokenizer_is_sent_when_asked(node: Node) -> None:
    assert node.take(welcome(need=True)) == [Joined("a", PROTOCOL_MAX)]
    assert node.said[1:] == [FILE]
    assert node.session.is_joined
    assert node.session.router_epoch == "a"


def test_work_passes_in_order(joined: Node) -> None:
    assert joined.take(work(), RouterHeartbeat(router_epoch="a"), work()) == [work(), work()]
    assert joined.said == []


def test_work_before_the_welcome_is_ignored(node: Node) -> None:
    assert node.take(work(), welcome(), work()) == [Joined("a", PROTOCOL_MAX), work()]
    assert node.session.ignored == 1


def test_hello_again_crossing_the_first_hello_is_not_answered_twice(node: Node) -> None:
    node.now += 0.1
    assert node.take(HelloAgain(router_epoch="a"), HelloAgain(router_epoch="a")) == []
    assert node.hellos() == 1
    node.now += 0.5
    assert node.take(HelloAgain(router_epoch="a")) == []
    assert node.hellos() == 1


def test_hello_again_while_joined_frees_everything(joined: Node) -> None:
    again = HelloAgain(router_epoch="a")
    assert joined.take(again, again, work()) == [RouterChanged("a")] and joined.session.is_joined is False
    assert joined.hellos() == 1
    assert joined.take(welcome(), work()) == [Joined("a", PROTOCOL_MAX), work()]


@pytest.mark.parametrize("first", [HelloAgain(router_epoch="b"), RouterHeartbeat(router_epoch="b"), work("b")])
def test_a_new_router_epoch_frees_everything_and_gets_a_hello(joined: Node, first: Any) -> None:
    assert joined.take(work(), first, first, work("b")) == [work(), RouterChanged("b")]
    assert joined.hellos() == 1
    assert joined.take(welcome("b"), work("b")) == [Joined("b", PROTOCOL_MAX), work("b")]
    assert joined.hellos() == 0


def test_a_router_that_changes_right_after_the_welcome_hears_hello_at_once(node: Node) -> None:
    assert node.take(welcome()) == [Joined("a", PROTOCOL_MAX)]
    assert node.hellos() == 1
    node.now += 0.1
    assert node.take(HelloAgain(router_epoch="b")) == [RouterChanged("b")]
    assert node.hellos() == 1


def test_a_new_router_that_welcomes_at_once(joined: Node) -> None:
    assert joined.take(welcome("b")) == [RouterChanged("b"), Joined("b", PROTOCOL_MAX)]
    assert joined.hellos() == 0


def test_a_second_welcome_starts_afresh(joined: Node) -> None:
    assert joined.take(work(), welcome(), work()) == [work(), RouterChanged("a"), Joined("a", PROTOCOL_MAX), work()]
    assert joined.hellos() == 0


def test_hello_is_sent_in_the_oldest_protocol_and_in_a_newer_one_when_asked(node: Node, hello: Hello) -> None:
    assert (node.said, node.spoken) == ([hello], [PROTOCOL_MIN])
    again = HelloAgain(router_epoch="a", protocol=PROTOCOL_MAX)
    assert node.take(again, again, RouterHeartbeat(router_epoch="a")) == []  # at once, and once
    newest = msgspec.structs.replace(hello, protocol=PROTOCOL_MAX)
    assert (node.said, node.spoken) == ([hello, newest], [PROTOCOL_MIN, PROTOCOL_MAX])
    assert node.take(welcome(need=True)) == [Joined("a", PROTOCOL_MAX)]
    assert (node.said[2:], node.spoken[2:]) == ([FILE], [PROTOCOL_MAX])


def test_a_newer_hello_that_was_lost_is_asked_for_again(node: Node) -> None:
    node.take(HelloAgain(router_epoch="a", protocol=PROTOCOL_MAX))
    node.now += 0.5
    node.take(HelloAgain(router_epoch="a"))  # the answer to a beat: the router has forgotten that it asked
    node.take(HelloAgain(router_epoch="a", protocol=PROTOCOL_MAX))
    assert node.spoken == [PROTOCOL_MIN, PROTOCOL_MAX, PROTOCOL_MIN, PROTOCOL_MAX]


def test_a_newer_hello_that_found_the_queue_full_is_sent_later(node: Node) -> None:
    node.is_full = True
    node.take(HelloAgain(router_epoch="a", protocol=PROTOCOL_MAX))
    node.is_full = False
    node.take()
    assert node.spoken == [PROTOCOL_MIN, PROTOCOL_MAX]


@pytest.mark.parametrize(("named", "agreed"), [(5, 5), (0, PROTOCOL_MIN), (PROTOCOL_MAX + 9, PROTOCOL_MAX)])
def test_the_router_is_addressed_in_the_protocol_of_its_welcome(node: Node, named: int, agreed: int) -> None:
    assert node.session.protocol == PROTOCOL_MIN
    joined = [Joined("a", agreed)]
    assert node.take(Welcome(router_epoch="a", protocol=named, need_tokenizer=True)) == joined
    assert (node.session.protocol, node.spoken[1:]) == (agreed, [agreed])


@pytest.mark.parametrize("end", [[], [HelloAgain(router_epoch="a")], [RouterHeartbeat(router_epoch="b")]])
def test_the_next_router_may_be_an_older_one(joined: Node, end: list[Any]) -> None:
    assert joined.session.protocol == PROTOCOL_MAX
    joined.now += 0.0 if end else 5.1
    joined.take(*end)
    assert joined.session.protocol == PROTOCOL_MIN
    joined.now += 0.5
    joined.take(HelloAgain(router_epoch="c"))
    assert set(joined.spoken[1:]) == {PROTOCOL_MIN}


def proven_to_the_next(node: Node) -> tuple[str, ...]:
    """Return what the node says to the next router about its partners."""
    node.now += 0.5
    node.take(HelloAgain(router_epoch="next", protocol=PROTOCOL_MAX))
    hello = node.said[-1]
    assert isinstance(hello, Hello) and hello.protocol == PROTOCOL_MAX
    return hello.proven


def test_the_next_router_hears_which_partners_the_last_one_found_right(joined: Node) -> None:
    for epochs in (("x", "y"), ("y",)):
        told = Proven(router_epoch="a", epochs=epochs)
        assert joined.take(told) == [told]
        joined.session.remember(epochs)
    assert proven_to_the_next(joined) == ("y",)


def test_what_a_router_says_of_partners_before_its_welcome_does_not_count(node: Node) -> None:
    before = proven_to_the_next(node)
    node.take(Proven(router_epoch="next", epochs=("x",)))
    assert node.session.ignored == 1 and proven_to_the_next(node) == before


@pytest.mark.parametrize(("silence_s", "is_kept"), [(PROVEN_S - 1, True), (PROVEN_S + 1, False)])
def test_partners_are_forgotten_when_no_router_is_there_for_a_minute(
    silence_s: float, is_kept: bool, joined: Node
) -> None:
    joined.session.remember(("x",))
    joined.now += silence_s
    joined.take()
    assert proven_to_the_next(joined) == (("x",) if is_kept else ())


def test_partners_are_forgotten_if_a_router_joined_that_takes_no_verdict_back(joined: Node) -> None:
    joined.session.remember(("x",))
    joined.take(Welcome(router_epoch="old", protocol=Proven.since - 1, need_tokenizer=False))
    assert proven_to_the_next(joined) == ()


def test_a_silent_router_is_reported_lost_once(joined: Node) -> None:
    joined.now += 5.0
    assert joined.take() == []
    joined.now += 0.1
    assert joined.take() == [RouterLost(pytest.approx(5.1))]
    joined.now += 60
    assert joined.take() == []
    assert not joined.session.is_joined
    assert joined.hellos() == 0
    assert joined.take(RouterHeartbeat(router_epoch="a"), work()) == []  # nothing is held, so nothing to free
    assert joined.hellos() == 1
    assert joined.take(welcome(), work()) == [Joined("a", PROTOCOL_MAX), work()]


def test_a_router_whose_connection_stays_closed_is_lost_before_it_is_silent(joined: Node) -> None:
    joined.now += 0.7
    joined.cut_s = 0.7
    assert joined.take() == []
    joined.cut_s = 0.8
    assert joined.take() == [RouterLost(pytest.approx(0.7))]
    assert joined.take() == []
    joined.cut_s = 0.0
    assert joined.take(RouterHeartbeat(router_epoch="a")) == [] and joined.hellos() == 1
    assert joined.take(welcome()) == [Joined("a", PROTOCOL_MAX)]


def test_a_router_behind_a_slow_network_may_be_silent_for_longer(joined: Node) -> None:
    joined.round_trip_s = 2.0
    joined.now += 7.9
    assert joined.take() == []
    joined.now += 0.2
    assert joined.take() == [RouterLost(pytest.approx(8.1))]


def test_a_node_that_was_held_up_itself_reads_before_it_judges(joined: Node) -> None:
    joined.now += 30
    assert joined.take(RouterHeartbeat(router_epoch="a")) == []
    assert joined.session.is_joined


def test_an_unanswered_hello_is_sent_again(node: Node) -> None:
    node.take(RouterHeartbeat(router_epoch="a"))
    node.hellos()
    for _ in range(10):
        node.now += 1.0
        node.take(RouterHeartbeat(router_epoch="a"))
    assert 2 <= node.hellos() <= 5


def test_a_hello_that_found_the_queue_full_is_sent_later(joined: Node) -> None:
    joined.is_full = True
    assert joined.take(HelloAgain(router_epoch="a")) == [RouterChanged("a")]
    assert joined.take() == []
    joined.is_full = False
    assert joined.take() == []
    assert joined.hellos() == 1
    assert joined.take() == []
    assert joined.hellos() == 0


def test_refusal_carries_the_reason(node: Node) -> None:
    reason = "page_size is 16 here and 32 there"
    assert node.take(Refusal(router_epoch="a", reason=reason)) == [RouterRefused(reason)]
    assert node.hellos() == 1  # only the first


def test_a_refusal_changes_nothing_else(joined: Node) -> None:
    assert joined.take(Refusal(router_epoch="a", reason="why"), work()) == [RouterRefused("why"), work()]
    assert joined.hellos() == 0


def test_a_router_that_was_never_heard_is_not_lost(node: Node) -> None:
    assert node.session.router_epoch is None and node.session.ignored == 0 and node.session.is_joined is False
    node.now += 5.1
    assert node.take() == [], "a router that was never there is not lost"
    node.take(RouterHeartbeat(router_epoch="a"))
    assert node.session.router_epoch == "a" and not node.session.is_joined


def test_no_hello_is_sent_before_the_start_unless_a_router_asks(hello: Hello) -> None:
    said: list[ToRouter] = []

    def send(message: ToRouter, protocol: int) -> bool:
        said.append(message)
        return True

    session = RouterSession(hello, send, lambda: FILE, lambda: 100.0)
    assert session.take([]) == [] and said == []
    assert session.take([HelloAgain(router_epoch="a")]) == []
    assert said == [msgspec.structs.replace(hello, protocol=hello.protocol_min)]


def test_a_tokenizer_is_not_sent_unless_it_is_asked_for(node: Node) -> None:
    node.take(welcome(need=False))
    assert node.said[1:] == []


def test_a_lost_router_is_out_of_view(joined: Node) -> None:
    joined.now += 5.1
    assert joined.take() == [RouterLost(pytest.approx(5.1))]
    assert joined.session.router_epoch is None and joined.session.is_joined is False
    assert joined.take(work()) == [] and joined.session.ignored == 1
    assert joined.take(work()) == [] and joined.session.ignored == 2


@pytest.mark.parametrize(("waited_s", "is_again"), [(4.8, False), (4.81, True)])
def test_a_router_in_view_has_five_seconds_to_answer(node: Node, waited_s: float, is_again: bool) -> None:
    node.take(RouterHeartbeat(router_epoch="a"))
    assert node.hellos() == 1
    node.now += waited_s
    node.take()
    assert node.hellos() == is_again


@pytest.mark.parametrize(("waited_s", "is_again"), [(0.49, False), (0.5, True)])
def test_a_hello_is_repeated_after_half_a_second(node: Node, waited_s: float, is_again: bool) -> None:
    node.hellos()
    node.now += waited_s
    assert node.take(HelloAgain(router_epoch="a")) == []
    assert node.hellos() == is_again


def test_a_router_that_welcomed_is_not_asked_again(node: Node) -> None:
    node.take(welcome())
    node.hellos()
    for _ in range(20):
        node.now += 1.0
        assert node.take(RouterHeartbeat(router_epoch="a")) == []
    assert node.hellos() == 0


def test_any_message_of_a_router_shows_that_it_is_present(joined: Node) -> None:
    for message in (work(), RouterHeartbeat(router_epoch="a"), work()):
        joined.now += 4.0
        joined.take(message)
    assert joined.session.is_joined
    joined.now += 4.0
    joined.take()
    joined.now += 1.0
    assert joined.take() == [], "exactly five seconds"
    joined.now += 0.01
    assert joined.take() == [RouterLost(pytest.approx(5.01))]


def test_a_hello_that_waits_for_room_is_not_sent_to_a_lost_router(joined: Node) -> None:
    joined.is_full = True
    joined.take(HelloAgain(router_epoch="a"))
    joined.is_full = False
    joined.now += 5.1
    assert joined.take() == [RouterLost(pytest.approx(5.1))]
    assert joined.hellos() == 0
    joined.take()
    assert joined.hellos() == 1


def test_the_default_clock_is_monotonic(hello: Hello) -> None:
    session = RouterSession(hello, lambda *_: True, lambda: FILE)
    assert session._clock is time.monotonic
    session.take([welcome()])
    assert session.take([]) == [] and session.is_joined


@pytest.mark.parametrize(
    ("messages", "lines"),
    [
        ([welcome()], [f"joined router a, protocol {PROTOCOL_MAX}"]),
        (
            [Welcome(router_epoch="a", protocol=5, need_tokenizer=False, notice="waits for a decode node")],
            ["joined router a, protocol 5", "the router says: waits for a decode node"],
        ),
        ([Refusal(router_epoch="a", reason="page_size")], []),
        (
            [welcome(), welcome("b")],
            [
                f"joined router a, protocol {PROTOCOL_MAX}",
                "the router is another one now: freeing all its requests",
                f"joined router b, protocol {PROTOCOL_MAX}",
            ],
        ),
        (
            [welcome(), welcome()],
            [
                f"joined router a, protocol {PROTOCOL_MAX}",
                "the router welcomed this node afresh: freeing all its requests",
                f"joined router a, protocol {PROTOCOL_MAX}",
            ],
        ),
        (
            [welcome(), HelloAgain(router_epoch="a")],
            [
                f"joined router a, protocol {PROTOCOL_MAX}",
                "the router has forgotten this node: freeing all its requests",
            ],
        ),
        ([HelloAgain(router_epoch="a"), work(), RouterHeartbeat(router_epoch="a")], []),
    ],
)
def test_changes_of_the_session_are_logged(
    node: Node, caplog: pytest.LogCaptureFixture, messages: list[Any], lines: list[str]
) -> None:
    with caplog.at_level("INFO", logger="baton.metadata.bus.session"):
        node.take(*messages)
    assert [record.getMessage() for record in caplog.records] == lines


def test_the_log_says_for_how_long_a_router_was_silent(joined: Node, caplog: pytest.LogCaptureFixture) -> None:
    joined.now += 7.25
    joined.take()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "no message from the router for 7.2 s")
    ]


class WelcomingRouter:
    """The least that a router does: it answers Hello with Welcome, and unknown nodes with HelloAgain."""

    def __init__(self, address: str, epoch: str) -> None:
        self.known: set[bytes] = set()
        self.files = 0
        self.hub = Hub(address, epoch, None, self._take, self.known.discard)
        self.hub.start()

    def _take(self, peer: bytes, message: ToRouter) -> None:
        epoch = self.hub.epoch
        self.files += isinstance(message, TokenizerFile)
        if isinstance(message, Hello):
            self.known.add(peer)
            self.hub.send(peer, welcome(epoch, need=True))
        elif peer not in self.known:
            self.hub.send(peer, HelloAgain(router_epoch=epoch))


async def _take_until(session: RouterSession, link: Link, event: Any) -> list[Any]:
    seen: list[Any] = []
    await until(lambda: seen.extend(session.take(link.receive())) or event in seen)
    return seen


async def test_a_router_restarts_and_forgets_over_sockets(hello: Hello) -> None:
    router = WelcomingRouter("tcp://127.0.0.1:0", "a")
    link = Link(router.hub.address, "node", "1", None)
    pulse = HeartbeatThread(router.hub.address, "node", "1", None, load=LOAD, interval_s=0.05)
    session = RouterSession(hello, link.send, lambda: FILE)
    session.start()
    pulse.start()
    try:
        await _take_until(session, link, Joined("a", PROTOCOL_MAX))
        router.hub.close()
        router = await bind_again(partial(WelcomingRouter, router.hub.address, "b"))
        seen = await _take_until(session, link, Joined("b", PROTOCOL_MAX))
        assert seen[0] == RouterChanged("b")
        router.known.clear()  # it forgets: the next beat of an unknown node is answered with HelloAgain
        assert await _take_until(session, link, Joined("b", PROTOCOL_MAX)) == [
            RouterChanged("b"),
            Joined("b", PROTOCOL_MAX),
        ]
        assert router.known == {b"node:1"}
        await until(lambda: router.files >= 2)
    finally:
        pulse.close()
        link.close()
        router.hub.close()
