"""Nodes die, leave and come back while streams run: each client receives the tokens of a run without faults. Prompts
are computed on prefill nodes, on decode nodes, or on either at random.

The nodes are real, in one process, stepped by the test (tests/support/nodes/served.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drawn_places import Place, drawn_place
from served import Served, Stream
from served_nodes import computing, num_generated
from thinned import thinned

from baton.router.waiting.entry import Entry

Start = Callable[..., Served]
LENGTH = 24
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3, "min_tokens": 9},
    "choices": {"seed": 5, "n": 3, "logprobs": 1, **PENALTIES},
    "echoed": {"seed": 7, "echo": True, "logprobs": 2},
    "narrow": {"seed": 6, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8, "logit_bias": {"97": 2.0}},
}
ALGORITHMS: dict[str, Place] = {  # and the place of prompts
    "none": "remote",
    "ngram": "mixed",
    "standalone": "local",
    "eagle": "mixed",
    "mtp3-deepseek": "mixed",
}


def bodies(stop: str | None = None) -> list[dict[str, Any]]:
    """Return requests that run together, long enough to meet a fault. `stop` is found after min_tokens."""
    common = {"prompt": "def main(args): return", "max_tokens": LENGTH, "ignore_eos": True}
    chosen = [common | each for each in BODIES.values()]
    return chosen if stop is None else [*chosen, common | BODIES["greedy"] | {"stop": [stop]}]


def clean_run(served: Served) -> tuple[str, list[Stream]]:
    """Return a stop string that crosses tokens of the greedy text, and every request's stream without any fault."""
    (greedy,) = run_all(served, bodies()[:1])
    text = greedy.texts[0]
    windows = [text[start : start + 3] for start in range(len(text) // 2, len(text) - 3)]
    stop = next(window for window in windows if window.isascii() and window.isprintable())
    return stop, run_all(served, bodies(stop))


def run_all(served: Served, asked: list[dict[str, Any]], fault: Callable[[list[Stream]], None] | None = None) -> Any:
    streams = [served.ask(**body) for body in asked]
    if fault is not None:
        fault(streams)
    served.finish(*streams)
    return streams


def assert_equal(streams: list[Stream], clean: list[Stream]) -> None:
    for stream, expected in zip(streams, clean, strict=True):
        assert _but_cached(stream) == _but_cached(expected)
        assert stream.logprobs.keys() == expected.logprobs.keys()
        for index, logprobs in expected.logprobs.items():
            assert stream.logprobs[index] == pytest.approx(logprobs, abs=2e-3)


def _but_cached(stream: Stream) -> dict[str, Any]:
    return stream.outcome | {"usage": stream.outcome["usage"][:2]}


@pytest.mark.parametrize("algorithm", thinned(ALGORITHMS, lambda i, name: name == "mtp3-deepseek"))
def test_streams_outlive_the_nodes_under_them(start: Start, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of requests go on with the same tokens, text and log-probabilities after every move."""
    place = ALGORITHMS[algorithm]
    if place == "mixed":
        monkeypatch.setattr(Entry, "place", drawn_place(lambda: 1))
    local_prefill = "never" if place == "remote" else "always"
    served = start(algorithm, router={"max_attempts": 2, "local_prefill": local_prefill}).up(2, 2)
    stop, clean = clean_run(served)
    assert clean[-1].finish[0] == ("stop", stop)

    def kill(role: str) -> None:
        name = served.holder(role)
        assert name is not None
        served.kill(name)
        served.start(role, f"{name}-again")

    def after(num_tokens: int, *roles: str) -> Callable[[list[Stream]], None]:
        def fault(streams: list[Stream]) -> None:
            for part in range(1, 4):
                served.run(lambda: sum(each.num_tokens for each in streams) >= part * num_tokens)  # noqa: B023
                for role in roles:
                    if served.holder(role) is not None:
                        kill(role)

        return fault

    def while_handed_over(role: str) -> Callable[[list[Stream]], None]:
        def fault(_: list[Stream]) -> None:
            served.run(lambda: served.holder("prefill") and served.holder("decode"))
            kill(role)

        return fault

    def while_computed(_: list[Stream]) -> None:
        """Kill a decode node that computes a prompt. None has the prompt in its cache."""
        for node in served.nodes.values():
            node.cache.flush()
        served.run(lambda: computing(served))
        name = computing(served)
        assert name is not None
        served.kill(name)
        served.start("decode", f"{name}-again")

    faults: list[Any] = [after(1, "decode"), after(20, "decode"), after(7, "decode", "prefill")]
    if place != "local":
        faults += [while_handed_over("prefill"), while_handed_over("decode")]
    if place != "remote":
        faults.append(while_computed)
    for fault in faults:
        assert_equal(run_all(served, bodies(stop), fault), clean)
    served.check_books()


def test_cached_tokens_in_usage_are_those_of_the_first_prefill(start: Start) -> None:
    """The client is told the cached tokens of the first prefill, though the second prefill finds others."""
    served = start("ngram").up(1, 2)
    body = {"prompt": "the quick brown fox jumps over " * 4, "max_tokens": 16, "ignore_eos": True}
    body |= {"temperature": 0, "cache_salt": "a"}
    (cold,) = run_all(served, [body])
    (warm,) = run_all(served, [body])
    assert warm.outcome["usage"][2] > cold.outcome["usage"][2] == 0
    moved = served.ask(**body | {"cache_salt": "b"})
    served.run(lambda: num_generated(served) >= 6)
    name = served.holder("decode")
    assert name is not None
    served.kill(name)
    served.finish(moved)
    assert moved.outcome == cold.outcome


def test_a_node_that_comes_back_is_another_one(start: Start) -> None:
    """The same name has another epoch. The router forgets the old node, and the streams go on with the new one."""
    served = start().up(1, 1)
    _, clean = clean_run(served)
    served.check_books()
    body = bodies()[0]
    stream = served.ask(**body)
    served.run(lambda: num_generated(served) >= 5)
    for name in ("decode-0", "prefill-0"):
        old = served.nodes[name].membership
        epoch = old._channels[0].session._hello.epoch
        served.kill(name)
        served.start(name.partition("-")[0], name)
        assert served.nodes[name].membership._channels[0].session._hello.epoch != epoch
    served.finish(stream)
    assert_equal([stream], clean[:1])
    served.check_books()


def test_the_requests_of_a_drained_node_move_to_others(start: Start) -> None:
    """A decode node gets SIGTERM and no time to finish: no stream fails or repeats a token."""
    served = start(router={"max_attempts": 2}).up(2, 2)
    stop, clean = clean_run(served)

    def leave(_: list[Stream]) -> None:
        served.run(lambda: num_generated(served) >= 8)
        name = served.holder("decode")
        assert name is not None
        membership = served.nodes[name].membership
        membership._drain_timeout_s = 0.0
        membership._on_signal(15, None)
        served.run(lambda: membership.is_over)
        membership.close()
        served.nodes[name].links.close()
        del served.nodes[name]

    assert_equal(run_all(served, bodies(stop), leave), clean)
    served.check_books()


def test_nodes_free_everything_when_the_router_is_gone_and_find_the_next_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.metadata.bus.session.ROUTER_SILENCE_S", 0.5)
    served = start().up(1, 1)
    body = bodies()[0] | {"max_tokens": 300}
    stream = served.ask(**body)
    served.run(lambda: num_generated(served) >= 5)
    served.held.update(served.nodes)
    served.stop_router()
    stream.join()
    served.held.clear()
    assert served.held_by_nodes()
    served.run(lambda: not served.held_by_nodes(), 10)
    served._settings["node_address"] = served._router.node_address
    served._start_router()
    served.run(lambda: served._num_ready() == 1, 10)
    (again,) = run_all(served, [body])
    assert again.ids[0][: len(stream.ids[0])] == stream.ids[0] and len(again.ids[0]) == 300
    served.check_books()
