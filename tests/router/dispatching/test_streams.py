"""Streams of tokens: which messages count, which are refused, and which node is asked for missing tokens.

The tests at the end run a router whose fake nodes lose messages.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.metadata.errors import ProtocolError
from baton.metadata.wire import messages as m
from baton.metadata.wire.messages import Resend, Tokens
from baton.metadata.wire.request import Ended, TokenLogprobs, Unit, pack_ids, unpack_ids
from baton.router.dispatching import streams
from baton.router.dispatching.effects import Effects, Output, Send
from baton.router.dispatching.streams import GAP_S, MAX_RESENDS, SILENCE_S, TokensRefused, TokenStreams
from baton.router.figures.metrics import Metrics
from baton.router.nodes.node import Node
from baton.router.requests.attempt import Attempt
from baton.router.requests.delta import Delta, TextOptions
from baton.router.requests.request import Request, Sequence

from ..conftest import System
from ..fake_nodes import FakeNode
from ..sites import Heard, add_node, make_group, make_request

IDS = [40, 41, 42, 43, 44, 45]
END = Ended("length", None, 3, 6, 0)


class Site:
    """A request of two choices that runs on p0 and d0 since time 0, and the streams of its tokens."""

    def __init__(self, **request: Any) -> None:
        group = make_group()
        self.prefill, self.decode = add_node(group, "prefill", "p0"), add_node(group, "decode", "d0")
        self.other = add_node(group, "decode", "d1")
        self.request: Request = make_request(group, num_choices=2, **request)
        self.attempt: Attempt = self.request.begin_attempt({0, 1}, self.prefill, self.decode, 0.0)
        for each in self.request.sequences:
            each.attempt = self.attempt
        self.effects: Effects = []
        self.streams = TokenStreams("epoch", {"r": self.request}, Metrics(), self.effects)

    @property
    def one(self) -> Sequence:
        return self.request.sequences[0]

    def unit(self, choice: int = 0, attempt: int = 0, rid: str = "r") -> Unit:
        return Unit(rid, choice, attempt)

    def take(self, first: int, ids: list[int], now: float = 0.0, *, node: Node | None = None, **more: Any) -> list[Any]:
        """Let a node send tokens of choice 0."""
        message = tokens((self.unit(), first, ids), **more)
        return list(self.streams.take(node or self.decode, message, now))

    @property
    def outputs(self) -> list[tuple[int, list[int]]]:
        """The choice and ids of all output so far."""
        return [(each.sequence.index, each.delta.token_ids) for each in self.effects if isinstance(each, Output)]

    @property
    def asked(self) -> list[tuple[str, Unit, int]]:
        """Remove and return the questions that the streams sent: node, unit, first token."""
        sends = [each for each in self.effects if isinstance(each, Send)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, Send)]
        resends = [(each.node.node_id, each.message) for each in sends if isinstance(each.message, Resend)]
        assert all(message.router_epoch == "epoch" for _, message in resends) and len(resends) == len(sends)
        return [(name, message.unit, message.first) for name, message in resends]


def tokens(*rows: tuple[Unit, int, list[int]], **more: Any) -> Tokens:
    """Return the Tokens message of one step."""
    units, firsts, ids = zip(*rows, strict=True)
    counts = [len(each) for each in ids]
    return Tokens(units, pack_ids(firsts), pack_ids(counts), pack_ids(token for each in ids for token in each), **more)


def test_each_sequence_gets_its_own_columns() -> None:
    site = Site()
    rows = [(site.unit(1), 0, IDS[:2]), (site.unit(0, rid="gone"), 0, IDS[2:3]), (site.unit(0), 0, IDS[3:])]
    logprobs = tuple(TokenLogprobs(-1.0 * each) for each in range(3))
    message = tokens(*rows, logprobs={2: logprobs}, ended={0: END}, num_cached=16)
    ended = list(site.streams.take(site.decode, message, 5.0))
    assert site.outputs == [(1, IDS[:2]), (0, IDS[3:])]
    assert [each.delta.logprobs for each in site.effects if isinstance(each, Output)] == [[], list(logprobs)]
    assert ended == [(site.request.sequences[1], True)] and site.request.sequences[1].finish_reason == "length"
    assert (site.one.seen_at, site.request.first_token_at, site.request.num_cached) == (5.0, 5.0, 16)
    site.take(3, IDS[3:4], 6.0, num_cached=99)
    assert (site.one.seen_at, site.request.first_token_at, site.request.num_cached) == (6.0, 5.0, 16)


@pytest.mark.parametrize(
    ("firsts", "counts", "ids", "words"),
    [
        ([0, 0], [1, 2], IDS[:2], r"first indices \[0, 0\], counts \[1, 2\] and 2 ids"),  # too few ids
        ([0, 0], [1, 1], IDS[:3], r"counts \[1, 1\] and 3 ids"),  # too many
        ([0, -1], [1, 1], IDS[:2], r"first indices \[0, -1\]"),
        ([0, 0], [3, -1], IDS[:2], r"counts \[3, -1\] and 2 ids"),
        ([0, 0], [1, 1], [40, -1], "id -1; an id is 0 or more"),
    ],
)
def test_columns_that_do_not_fit_refuse_the_whole_message(
    firsts: list[int], counts: list[int], ids: list[int], words: str
) -> None:
    site = Site()
    units = (site.unit(0), site.unit(1))
    message = Tokens(units, pack_ids(firsts), pack_ids(counts), pack_ids(ids), ended={0: END}, num_cached=16)
    refused: list[Any] = []
    with pytest.raises(ProtocolError, match=f"Tokens.* {words}") as caught:
        refused.extend(site.streams.take(site.decode, message, 0.0))
    assert caught.value.node == "d0"
    reason = f"decode node d0: {caught.value}"
    assert refused == [TokensRefused(each, reason) for each in site.request.sequences], "both must go on elsewhere"
    assert not site.effects and not any(each.received or each.finish_reason for each in site.request.sequences)
    assert site.request.num_cached is None, "not even the rows that are right are taken"


@pytest.mark.parametrize("logprobs", [{0: 2}, {1: 0}, {2: 1}])
def test_log_probabilities_that_do_not_fit_refuse_the_message(logprobs: dict[int, int]) -> None:
    """One too many, none, and some of no unit."""
    site = Site()
    more = {row: (TokenLogprobs(-1.0),) * num for row, num in logprobs.items()}
    [(row, num)] = logprobs.items()
    with pytest.raises(ProtocolError, match=rf"log-probabilities by row {{{row}: {num}}} do not fit counts \[1, 1\]"):
        list(
            site.streams.take(
                site.decode, tokens((site.unit(0), 0, IDS[:1]), (site.unit(1), 0, IDS[:1]), logprobs=more), 0.0
            )
        )
    assert not site.effects


def test_a_choice_that_accepted_more_drafts_than_there_were_refuses_the_message() -> None:
    site = Site()
    ended = Ended("length", None, 3, 6, 0, num_rounds=1, num_drafted=2, num_accepted=3)
    with pytest.raises(ProtocolError, match="3 drafts accepted of 2"):
        list(site.streams.take(site.decode, tokens((site.unit(0), 0, IDS[:1]), ended={0: ended}), 0.0))
    assert not site.effects


@pytest.mark.parametrize("first", [0, 3, 4, 2**31 - 1])
def test_a_node_that_sends_more_than_max_tokens_is_refused_for_that_sequence_alone(first: int) -> None:
    site = Site(params={"max_tokens": 4})
    ids = IDS[: max(1, 5 - first)]
    message = tokens((site.unit(0), first, ids), (site.unit(1), 0, IDS[:4]), ended={0: END, 1: END})
    refused, ended = site.streams.take(site.decode, message, 0.0)
    words = f"decode node d0: it sent token number {first + len(ids)}, but the request asked for at most 4"
    assert refused == TokensRefused(site.one, words) and ended == (site.request.sequences[1], True)
    assert site.outputs == [(1, IDS[:4])] and site.one.finish_reason is None
    site.take(0, IDS[:1])
    assert site.outputs[1:] == [(0, IDS[:1])], "nothing of it was kept"


def test_only_the_nodes_of_the_present_attempt_are_heard() -> None:
    site = Site()
    site.one.attempt = newer = site.request.begin_attempt({0}, site.prefill, site.decode, 1.0)
    for node, unit in (
        (site.other, site.unit(0, newer.number)),  # another node
        (site.decode, site.unit(0, 0)),  # an older attempt
        (site.decode, site.unit(2, newer.number)),  # no such choice
        (site.decode, site.unit(0, newer.number, "s")),  # no such request
    ):
        assert site.streams.find(unit, node) is None
        assert list(site.streams.take(node, tokens((unit, 0, IDS[:1]), ended={0: END}), 2.0)) == []
    assert not site.effects and not site.one.received and site.one.finish_reason is None
    for node, first in ((site.prefill, 0), (site.decode, 1)):
        list(site.streams.take(node, tokens((site.unit(0, newer.number), first, [IDS[first]])), 2.0))
    assert site.outputs == [(0, IDS[:1]), (0, IDS[1:2])]


def test_tokens_after_the_end_or_of_a_paused_sequence_are_passed_over() -> None:
    site = Site()
    site.take(0, IDS[:2], ended={0: END})
    assert site.take(2, IDS[2:3]) == [] and site.one.received == IDS[:2]
    second = site.request.sequences[1]
    second.restart()
    assert site.streams.find(site.unit(1), site.decode) is None


def test_a_stop_string_ends_a_sequence_though_its_node_has_not_ended_it() -> None:
    site = Site(text=TextOptions(("b",)))
    ids = [site.request.group.tokenizer.inner.encode(char).ids[0] for char in "abc"]  # type: ignore[union-attr]
    assert site.take(0, ids) == [(site.one, False)]
    assert site.outputs == [(0, ids[:2])]


def test_a_canary_has_its_output_at_once() -> None:
    site = Site(is_canary=True)
    site.take(0, IDS[:2])
    listener = site.request.listener
    assert isinstance(listener, Heard) and not site.effects
    assert [(each.index, delta.token_ids) for each, delta in listener.deltas] == [(0, IDS[:2])]


# --- gaps -----------------------------------------------------------------------------------------------------------


def gaps(site: Site, until: float, since: float = 0.0) -> tuple[list[float], float | None]:
    """Look for gaps 16 times per second. Return when the node was asked, and when the sequence was given up."""
    asked_at: list[float] = []
    for tick in range(round(since * 16), round(until * 16) + 1):
        given_up = site.streams.check_gaps(tick / 16)
        asked_at += [tick / 16 for _ in site.asked]
        if given_up:
            assert given_up == [site.one]
            return asked_at, tick / 16
    return asked_at, None


def test_a_gap_is_given_up_after_max_resends() -> None:
    site = Site()
    site.take(0, IDS[:2])
    site.take(3, IDS[3:4])
    wait_s = GAP_S + 1 / 16
    asked_at, given_up_at = gaps(site, 10.0)
    assert asked_at == [wait_s * each for each in range(1, MAX_RESENDS + 1)]
    assert given_up_at == wait_s * (MAX_RESENDS + 1)


def test_the_node_beyond_the_gap_is_asked_for_the_first_missing_token() -> None:
    for sender in ("decode", "prefill"):
        site = Site()
        node: Node = getattr(site, sender)
        site.take(0, IDS[:1], node=site.prefill)
        site.take(2, IDS[2:3], node=node)
        site.take(4, IDS[4:5])  # another gap behind it does not change which node is asked
        site.streams.check_gaps(GAP_S + 0.01)
        assert site.asked == [(node.node_id, site.unit(), 1)]


def test_a_filled_gap_is_no_longer_asked_for_and_the_next_one_counts_anew() -> None:
    site = Site()
    site.take(1, IDS[1:2])
    assert len(gaps(site, 0.75)[0]) == 2
    site.take(0, IDS[:1], 0.75)
    assert site.outputs == [(0, IDS[:2])]
    assert gaps(site, 5.0, 0.75) == ([], None)
    site.take(3, IDS[3:4], 5.0)
    assert len(gaps(site, 6.0, 5.0)[0]) == MAX_RESENDS


def test_an_end_that_comes_twice_beyond_a_gap_counts_once() -> None:
    site = Site()
    end = Ended("length", None, 3, 6, 0, num_rounds=3, num_drafted=9, num_accepted=4)
    for _ in range(2):
        assert site.take(2, IDS[2:], ended={0: end}) == []
    site.take(0, IDS[:1])
    assert site.request.num_drafted == 0, "nothing of it is taken before the gap is filled"
    assert site.take(1, IDS[1:2]) == [(site.one, False)] and site.one.finish_reason == "length"
    assert (site.request.num_rounds, site.request.num_drafted, site.request.num_accepted) == (3, 9, 4)


def test_an_end_beyond_a_gap_that_is_never_filled_counts_nothing() -> None:
    """Another attempt ends the sequence, and its counts are the sequence's."""
    site = Site()
    site.take(1, IDS[1:], ended={0: Ended("length", None, 3, 6, 0, num_rounds=3, num_drafted=9, num_accepted=4)})
    site.one.restart()
    site.one.attempt = site.request.begin_attempt({0}, site.prefill, site.decode, 1.0)
    end = Ended("length", None, 3, 6, 0, num_rounds=1, num_drafted=2, num_accepted=1)
    list(site.streams.take(site.decode, tokens((site.unit(0, 1), 0, IDS), ended={0: end}), 2.0))
    assert (site.request.num_rounds, site.request.num_drafted, site.request.num_accepted) == (1, 2, 1)


def test_closed_sequences_and_those_without_an_attempt_are_not_asked_for() -> None:
    for is_closed in (True, False):
        site = Site()
        site.take(1, IDS[1:2])
        if is_closed:
            site.streams.close(site.one)
        else:
            site.one.attempt = None
        assert site.streams.check_gaps(1.0) == [] and site.asked == []
        site.one.attempt = site.attempt
        assert site.streams.check_gaps(2.0) == [] and site.asked == [], "it is off the list"


# --- silence --------------------------------------------------------------------------------------------------------


def silence(site: Site, now: float) -> list[tuple[str, Unit, int]]:
    site.streams.check_silence(site.one, now)
    return site.asked


def test_a_silent_sequence_is_asked_for_again_after_each_silence_s() -> None:
    site = Site()
    site.take(0, IDS[:2], 10.0)
    asked_at = [tick / 8 for tick in range(80, 80 + 8 * 5) if silence(site, tick / 8)]
    assert asked_at == [10.0 + SILENCE_S + 0.125, 10.0 + 2 * (SILENCE_S + 0.125)]


def test_a_new_attempt_has_silence_s_before_it_is_asked_for() -> None:
    site = Site()
    site.take(0, IDS[:2], 10.0)
    site.one.attempt = site.request.begin_attempt({0}, site.prefill, site.decode, 12.0)
    assert silence(site, 12.0 + SILENCE_S) == []
    assert silence(site, 12.1 + SILENCE_S) == [("d0", site.unit(0, 1), 2)]


def test_the_node_that_owes_the_next_token_is_asked() -> None:
    site = Site()
    assert silence(site, 3.0) == [("p0", site.unit(), 0)], "the first token comes from prefill"
    site.attempt.prefill_done = True
    assert silence(site, 6.0) == [("d0", site.unit(), 0)], "prefill has finished, so decode has what it sent"
    site.attempt.prefill_done = False
    site.take(0, IDS[:1], 6.0, node=site.prefill)
    assert silence(site, 9.0) == [("d0", site.unit(), 1)]
    site.one.num_before = 1  # as if an earlier attempt had brought it
    assert silence(site, 12.0) == [("p0", site.unit(), 1)]


def test_a_node_that_works_alone_is_asked() -> None:
    for prefill, decode in ((True, False), (False, True)):
        site = Site()
        nodes = (site.prefill if prefill else None, site.decode if decode else None)
        site.one.attempt = site.request.begin_attempt({0}, *nodes, 0.0)
        site.take(0, IDS[:1])
        assert [name for name, *_ in silence(site, 3.0)] == ["p0" if prefill else "d0"]


@pytest.mark.parametrize("wants", [False, True])
def test_after_the_end_prefill_is_asked_if_the_prompts_logprobs_are_missing(wants: bool) -> None:
    site = Site(wants_prompt_logprobs=wants)
    site.take(0, IDS, ended={0: END})
    assert silence(site, 3.0) == [], "the other choice runs"
    site.request.sequences[1].finish_reason = "length"
    assert silence(site, 6.0) == ([("p0", site.unit(), 6)] if wants else [])
    site.attempt.prefill_done = True
    assert silence(site, 9.0) == []


def test_a_paused_sequence_is_not_asked_for() -> None:
    site = Site()
    site.one.attempt = None
    assert silence(site, 100.0) == []


def test_output_holds_only_new_tokens() -> None:
    site = Site()
    site.take(0, IDS[:2])
    site.take(1, IDS[1:4])
    (_, second) = [each for each in site.effects if isinstance(each, Output)]
    assert isinstance(second.delta, Delta) and second.delta.token_ids == IDS[2:4]
    effects = len(site.effects)
    site.take(0, IDS[:4])
    assert len(site.effects) == effects, "nothing new, no output"


def refused_resends(node: FakeNode) -> list[m.Resend]:
    """Have a node answer every Resend that it does not know the unit. Return a list that grows by each Resend."""
    asked: list[m.Resend] = []
    take = node.take

    def refusing(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(message)
            node.link.send(m.Failed(message.unit, "unavailable", "not known", retryable=True))
        else:
            take(message)

    node.take = refusing  # type: ignore[method-assign]
    return asked


def test_a_choice_that_its_node_lost_silently_moves(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENCE_S", 0.3)
    lost: list[Unit] = []

    def forget(node: FakeNode, message: m.Prefill) -> bool:
        if lost or message.rid.startswith("canary"):
            return False
        lost.append(Unit(message.rid, 0, message.attempt))
        node.link.send(m.PrefillDone(message.rid, message.attempt, 0.0, 0.0, 0, node.load()))
        return True

    system.behaviour.answer_prefill = forget
    answered = refused_resends(system.cluster.by_name("d0"))
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert [message.unit for message in answered] == lost


def test_a_lost_first_token_is_asked_for_at_prefill_if_decode_does_not_have_it(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token and the offers were lost. The decode node waits for offers while the prefill node lives."""
    monkeypatch.setattr(streams, "SILENCE_S", 0.3)
    asked: list[tuple[str, int]] = []
    prefill, decode = system.cluster.by_name("p0"), system.cluster.by_name("d0")

    def lose(node: FakeNode, message: m.Prefill) -> bool:
        return not asked and not message.rid.startswith("canary")

    def answer_prefill_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(("prefill", message.first))
            first = m.Tokens((message.unit,), pack_ids([0]), pack_ids([1]), pack_ids(system.say(system.text)[:1]))
            prefill.link.send(first)
        else:
            FakeNode.take(prefill, message)

    def answer_decode_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(("decode", message.first))
            monkeypatch.setattr(streams, "SILENCE_S", 60.0)  # the next attempt may take longer than 0.3 s
            decode.link.send(m.Failed(message.unit, "transfer_error", "an offer was lost", retryable=True))
        else:
            FakeNode.take(decode, message)

    system.behaviour.answer_prefill = lose
    prefill.take, decode.take = answer_prefill_resend, answer_decode_resend  # type: ignore[method-assign]
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert asked == [("prefill", 0), ("decode", 1)]


def test_a_lost_last_offer_is_asked_for_soon_after_the_first_token(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENCE_S", 0.2)
    decode, asked = system.cluster.by_name("d0"), list[int]()
    handed_over: list[Any] = []

    def lose(node: FakeNode, message: m.Prefill) -> bool:
        if message.rid.startswith("canary"):
            return False
        unit, first = Unit(message.rid, 0, message.attempt), pack_ids(system.say(system.text)[:1])
        node.link.send(m.Tokens((unit,), pack_ids([0]), pack_ids([1]), first))
        node.link.send(m.PrefillDone(message.rid, message.attempt, 0.0, 0.0, 0, node.load()))
        handed_over.append((message, 0, system.say(system.text)))
        return True

    def answer_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(message.first)
            decode.handoffs.put(handed_over[0])  # prefill has offered once more
        else:
            FakeNode.take(decode, message)

    system.behaviour.answer_prefill = lose
    decode.take = answer_resend  # type: ignore[method-assign]
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert asked[0] == 1


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_prompt_log_probabilities_lost_with_prefill_done_are_computed_again(
    system: System, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """All tokens have arrived, but PrefillDone, which carries the log-probabilities, has not."""
    monkeypatch.setattr(streams, "SILENCE_S", 0.2)
    asked, decode = refused_resends(system.cluster.by_name("p0")), system.cluster.by_name("d0")

    def lose(node: FakeNode, message: m.Prefill) -> bool:
        if message.attempt > 0 or message.rid.startswith("canary"):
            return False
        output = node.output(message.request, unpack_ids(message.request.prompt_ids), 0)
        node.link.send(node.tokens(Unit(message.rid, 0, 0), message.request, output, 0, 1))
        if message.decode is not None:
            decode.handoffs.put((message, 0, output))
        return True

    system.behaviour.answer_prefill = lose
    status, answer, _ = system.complete(echo=True, logprobs=1, max_tokens=max_tokens)
    assert status == 200 and asked[0].first >= 1, answer
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) > 3
    system.router.wait_idle()
