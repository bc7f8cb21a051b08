"""Split equals whole: a prefill and a decode node together generate transformers' tokens, and their books balance."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters import settings
from node_pair import ROUTER_EPOCH, NodePair, Result, node_pairs, params
from thinned import every, thinned
from ties import Reference

from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.work import LoadSlot
from baton.metadata.handoff.schema.schema import handoff_bytes
from baton.metadata.handoff.transports.base import Landed
from baton.metadata.handoff.transports.zmq import ZmqTransport
from baton.metadata.wire.data_link import Pages
from baton.metadata.wire.membership import Welcome
from baton.metadata.wire.messages import Cancel, Resend
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import Unit

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:
        yield start


def prompts(vocab_size: int, lens: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(num)] for num in lens]


def ids(results: dict[tuple[str, int], Result]) -> dict[tuple[str, int], list[int]]:
    return {key: result.ids for key, result in results.items()}


def kv_bytes(config: dict[str, Any], num_tokens: int, *, is_fp8: bool) -> int:
    """Return the bytes of a model's keys and values, or latents, of whole pages of 4 tokens, by its config.json."""
    if "kv_lora_rank" in config:
        return config["num_hidden_layers"] * num_tokens * 4 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    num_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_page = 4 * head_dim * 4
    if is_fp8:
        per_page = -(-4 * head_dim // 16) * 16 + 16  # one byte per number, and four scales
    return config["num_hidden_layers"] * 2 * num_heads * per_page * num_tokens // 4


HANDOFFS = [
    ("llama", None, "auto", 0),
    ("llama", None, "fp8", 0),
    ("llama", "ngram", "auto", 0),
    ("llama", "standalone", "auto", 0),
    ("llama", "eagle", "auto", 64),
    ("llama", "eagle3", "auto", 24),
    ("llama", "mtp-deepseek", "auto", 64),
    ("deepseek_v3", None, "auto", 0),
    ("deepseek_v3", "eagle", "auto", 64),
]


@pytest.mark.parametrize(
    ("target", "drafter", "kv_dtype", "state_size", "length"),
    thinned(
        [(*handoff, length) for handoff in HANDOFFS for length in (1, 9, 24)],
        lambda i, *_: i % 4 == 0 or i // 3 in (0, 8),
    ),
)
def test_a_handoff_moves_pages_and_one_row_to_the_byte(
    target: str, drafter: str | None, kv_dtype: str, state_size: int, length: int, checkpoint: Callable[..., Path],
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Counted where frames and metadata rows arrive. What is expected follows from the files config.json alone."""
    model = checkpoint(target)
    drafting = {} if drafter is None else settings(drafter, model, tmp_path)
    node = {"page_size": 4, "transport": "zmq", "kv_dtype": kv_dtype, **drafting}
    pair = make_pair(model, prefill=node, decode=node)
    frames, rows = list[int](), list[int]()
    receive, load = ZmqTransport.receive, DeviceExecutor._load

    def count_frame(self: ZmqTransport, message: Pages, data: memoryview) -> Iterator[Landed]:
        frames.append(data.nbytes)
        return receive(self, message, data)

    def count_row(self: DeviceExecutor, work: LoadSlot) -> None:
        assert work.row is not None
        rows.append(len(work.row))
        load(self, work)

    monkeypatch.setattr(ZmqTransport, "receive", count_frame)
    monkeypatch.setattr(DeviceExecutor, "_load", count_row)
    pair.submit("r", prompts(512, (length,))[0], params(3))
    pair.run()
    num_tokens, is_fp8 = -(-length // 4) * 4, kv_dtype == "fp8"
    models = [model, *([Path(drafting["draft_model"])] if "draft_model" in drafting else [])]
    configs = [json.loads((each / "config.json").read_text()) for each in models]
    assert sum(frames) == sum(kv_bytes(config, num_tokens, is_fp8=is_fp8) for config in configs)
    numbers = 3 + 21 + 20 + (1 + state_size if state_size else 0)  # counts, log-probabilities, ids, the draft's token
    assert rows == [4 * numbers]
    moved = handoff_bytes(pair.decode.executor.engine.schema, length)
    assert (moved.total, moved.hidden_state) == (sum(frames) + rows[0], 4 * state_size)


@pytest.mark.parametrize(
    ("family", "transport"),
    thinned(
        itertools.product(FAMILIES, ("local", "zmq")),
        lambda _, *cell: cell in (("qwen3", "local"), ("mistral", "zmq"), ("deepseek_v3", "zmq")),
    ),
)
def test_greedy_output_equals_transformers(
    family: str, transport: str, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    model = checkpoint(family)
    reference = Reference(model)
    pair = make_pair(
        model,
        prefill={"page_size": 4, "chunk_tokens": 6, "transport": transport},
        decode={"page_size": 4, "chunk_tokens": 6, "transport": transport},
        overlaps=transport == "zmq",
    )
    cases = prompts(pair.prefill.prompts.engine.card.vocab_size, (1, 3, 4, 5, 8, 9, 13, 24, 25))
    for i, prompt in enumerate(cases):
        pair.submit(f"r{i}", prompt, params(12))
    results = pair.run()
    for i, prompt in enumerate(cases):
        reference.assert_greedy(prompt, results[f"r{i}", 0].ids, reference.generate(prompt, 12))
    assert reference.num_ties <= 1, reference.num_ties

    for i, prompt in enumerate(cases):  # again: both caches have the prompts now
        pair.submit(f"again{i}", prompt, params(12))
    results = pair.run()
    for i in range(len(cases)):
        assert results[f"again{i}", 0].ids == results[f"r{i}", 0].ids
    assert results["again8", 0].ended is not None and results["again8", 0].ended.num_cached == 24
    assert any(admitted.num_cached_pages for admitted in pair.admitted)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_preemption_changes_no_token(family: str, checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    model = checkpoint(family)
    settings = {"page_size": 4, "chunk_tokens": 8}
    cases = prompts(50, (9, 14, 11, 7, 10, 13))
    sampled = [params(20, temperature=1.0, seed=i, repetition_penalty=1.1, frequency_penalty=0.2) for i in range(6)]

    def run(num_pages: int) -> tuple[NodePair, dict[tuple[str, int], list[int]]]:
        pair = make_pair(model, prefill=settings, decode={**settings, "num_pages": num_pages})
        for i, prompt in enumerate(cases):
            pair.submit(f"greedy{i}", prompt, params(20))
            pair.submit(f"seeded{i}", prompt, sampled[i])
        return pair, ids(pair.run())

    roomy, whole = run(400)
    tight, preempted = run(20)
    assert roomy.decode.stats().preemptions == 0
    assert tight.decode.stats().preemptions > 3
    assert preempted == whole


def test_seeded_output_is_the_same_alone_and_in_a_batch(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("qwen3"), prefill={"page_size": 4}, decode={"page_size": 4})
    cases = prompts(50, (5, 17, 9, 30))
    settings = [params(16, temperature=1.0, top_p=0.9, seed=7 * i) for i in range(4)]
    alone: dict[int, list[int]] = {}
    for i, prompt in enumerate(cases):
        pair.submit(f"alone{i}", prompt, settings[i])
        alone[i] = pair.run()[f"alone{i}", 0].ids
    for i, prompt in enumerate(cases):
        pair.submit(f"batch{i}", prompt, settings[i])
    results = pair.run()
    assert {i: results[f"batch{i}", 0].ids for i in alone} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 4


def test_choices_share_one_prefill(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4})
    prompt = prompts(50, (18,))[0]
    pair.submit("r", prompt, params(8, temperature=1.5, seed=3), n=4)
    results = pair.run()
    assert pair.prefill.stats().computed_tokens == 18
    assert len({tuple(results["r", choice].ids) for choice in range(4)}) == 4
    pair.submit("one", prompt, params(8, temperature=1.5, seed=3))
    assert pair.run()["one", 0].ids == results["r", 0].ids


def test_a_request_of_one_token_needs_no_decode_node(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4})
    pair.submit("r", prompts(50, (6,))[0], params(1))
    ended = pair.run()["r", 0].ended
    assert ended is not None and ended.reason == "length" and ended.num_generated == 1
    assert pair.decode.stats().steps == 0 and not pair.admitted


def test_a_first_token_that_ends_the_request_revokes_the_ticket(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4})
    prompt = prompts(50, (6,))[0]
    pair.submit("free", prompt, params(4))
    first = pair.run()["free", 0].ids[0]
    num_admitted = len(pair.admitted)
    pair.submit("r", prompt, params(4, stop_ids=(first,)))
    result = pair.run()["r", 0]
    assert result.ids == [first] and result.failed is None
    assert result.ended is not None and (result.ended.reason, result.ended.stop_id) == ("stop", first)
    assert len(pair.admitted) == num_admitted
    pair.submit("min", prompt, params(4, stop_ids=(first,), min_tokens=3))
    assert len(pair.run()["min", 0].ids) >= 3


@pytest.mark.parametrize(
    ("num_steps", "overlaps"), every([(num, False) for num in range(14)] + [(num, True) for num in range(3, 11)], 2)
)
def test_cancel_frees_everything_in_every_phase(
    num_steps: int, overlaps: bool, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    settings = {"page_size": 4, "chunk_tokens": 8, "transport": "zmq"}
    pair = make_pair(checkpoint("llama"), prefill=settings, decode={**settings, "num_pages": 24}, overlaps=overlaps)
    for i, prompt in enumerate(prompts(50, (30, 21, 17))):
        pair.submit(f"r{i}", prompt, params(24), n=2)
    for _ in range(num_steps):
        pair.step()
    pair._waiting.clear()
    for i in range(3):
        for node in ("prefill", "decode"):
            pair.send(node, Cancel(router_epoch=ROUTER_EPOCH, rid=f"r{i}", attempt=9, choices=None, reason="test"))
        pair.results.pop((f"r{i}", 0)), pair.results.pop((f"r{i}", 1))
    pair._take = pair._merge = lambda *_: None  # type: ignore[method-assign]  # late tokens of cancelled requests
    pair.run(timeout_s=10)


@pytest.mark.parametrize("overlaps", [False, True])
def test_pools_too_small_for_the_load_never_deadlock(
    overlaps: bool, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    settings = {"page_size": 4, "chunk_tokens": 8}
    few = {"prefill": {**settings, "num_pages": 14}, "decode": {**settings, "num_pages": 18}}
    pair = make_pair(checkpoint("llama"), overlaps=overlaps, **few)
    cases = prompts(50, (40, 33, 5, 44, 20, 38, 9, 41))
    for i, prompt in enumerate(cases):
        pair.submit(f"r{i}", prompt, params(16, temperature=1.0, seed=i), n=1 + i % 4)
    results = pair.run(timeout_s=60)
    assert all(result.failed is None and len(result.ids) == 16 for result in results.values())


def test_a_moved_request_goes_on_as_if_it_had_not_moved(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4})
    prompt = prompts(50, (11,))[0]
    settings = params(16, temperature=1.0, seed=5, repetition_penalty=1.2, presence_penalty=0.3)
    pair.submit("whole", prompt, settings)
    whole = pair.run()["whole", 0].ids
    for num_received in (1, 5, 14, 15):
        received = whole[:num_received]
        pair.submit(f"moved{num_received}", prompt, settings, received=received)
        result = pair.run()[f"moved{num_received}", 0]
        assert result.ids[num_received:] == whole[num_received:]
        assert result.ended is not None and result.ended.num_generated == 16


def test_logprobs_are_of_the_unprocessed_distribution(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    model = checkpoint("qwen2")
    reference = Reference(model)
    pair = make_pair(model, prefill={"page_size": 4, "chunk_tokens": 5}, decode={"page_size": 4}, overlaps=True)
    prompt = prompts(50, (13,))[0]
    pair.submit("r", prompt, params(5, temperature=0.7, seed=1, num_logprobs=3), prompt_logprobs=True)
    result = pair.run()["r", 0]
    assert len(result.logprobs) == 5
    for i, entry in enumerate(result.logprobs):
        expected = reference.logits([*prompt, *result.ids[:i]]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[result.ids[i]]), abs=1e-3)
        assert list(entry.top_ids) == expected.topk(3).indices.tolist()
    scored = pair.done["r"].prompt_logprobs
    assert len(scored) == len(prompt) - 1
    for i, entry in enumerate(scored):
        expected = reference.logits(prompt[: i + 1]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[prompt[i + 1]]), abs=1e-3)


def test_resend_gives_the_tokens_again(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4})
    pair.submit("r", prompts(50, (6,))[0], params(8))
    before = list(pair.run()["r", 0].ids)
    pair.results["r", 0] = Result(ids=before[:3])
    pair.send("decode", Resend(router_epoch=ROUTER_EPOCH, unit=Unit("r", 0, 0), first=3))
    assert pair.run()["r", 0].ids == before
    pair.send("decode", Resend(router_epoch=ROUTER_EPOCH, unit=Unit("other", 0, 0), first=0))
    pair.results["other", 0] = Result()
    failed = pair.run()["other", 0].failed
    assert failed is not None and failed.retryable


@pytest.mark.parametrize("has_row", [False, True])
@pytest.mark.parametrize("is_lost_again", [False, True])
def test_a_lost_offer_comes_again_when_the_router_asks(
    has_row: bool,
    is_lost_again: bool,
    checkpoint: Callable[..., Path],
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt has two chunks. The first offer is lost, or the last one, which has the row. If the offers are lost
    again whenever they are asked for, the attempt fails; how soon depends on the round trip that the kernel measures,
    because an answer that comes sooner may be of before the question."""
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4, "chunk_tokens": 8}, decode={"page_size": 4})
    take_offer, lost = pair.decode.handoff._take_offer, []
    resend, heard = pair.decode._resend, []

    def lose(link: Any, offer: Any) -> None:
        is_lost = is_lost_again if lost else (offer.row is not None) is has_row
        lost.append(offer) if is_lost else take_offer(link, offer)

    def hear(message: Resend) -> None:
        resend(message)
        heard.append(message.first)

    def ask(first: int) -> None:
        """Send a Resend, and step until the decode node has processed it."""
        num_heard = len(heard)
        pair.send("decode", Resend(router_epoch=ROUTER_EPOCH, unit=Unit("r", 0, 0), first=first))
        pair.step_until(lambda: len(heard) > num_heard)

    def lose_more() -> None:
        """Step until an answer of the prefill node is lost, or the attempt has failed."""
        num_lost = len(lost)
        pair.step_until(lambda: len(lost) > num_lost or result.failed is not None)

    def plan() -> list[Any]:  # nothing before the claim has come: otherwise one offer has all pages
        ticket = pair.prefill.handoff._book.get(Unit("r", 0, 0))
        return plan_chunks() if ticket is None or ticket.holder is not None else []

    plan_chunks = pair.prefill.scheduler.plan
    monkeypatch.setattr(pair.prefill.scheduler, "plan", plan)
    monkeypatch.setattr(pair.decode.handoff, "_take_offer", lose)
    monkeypatch.setattr(pair.decode, "_resend", hear)
    pair.submit("r", prompts(50, (14,))[0], params(8))
    result = pair.results["r", 0]
    pair.step_until(lambda: result.ids and lost)
    ask(0)  # does nothing: for all that the router knows, the prompt may still wait
    assert pair.decode.units() and result.failed is None
    ask(1)
    while is_lost_again and result.failed is None:
        lose_more()
        ask(1)
    failed = pair.run()["r", 0].failed
    if is_lost_again:
        assert failed is not None and failed.retryable and "offer" in failed.message
    else:
        assert failed is None and len(pair.results["r", 0].ids) == len(result.ids)


def test_another_router_frees_all_that_the_first_asked_for(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    settings = {"page_size": 4, "chunk_tokens": 4}
    pair = make_pair(checkpoint("llama"), prefill=settings, decode=settings)
    for i, prompt in enumerate(prompts(50, (30, 21, 17))):
        pair.submit(f"r{i}", prompt, params(40))
    pair.step_until(lambda: not pair.decode.is_idle and not pair.prefill.is_idle)
    for node in ("prefill", "decode"):
        pair.send(node, Welcome(router_epoch="another", protocol=PROTOCOL_MAX, need_tokenizer=False))
    pair._waiting.clear()
    pair.results.clear()
    pair._take = lambda *_: None  # type: ignore[method-assign]
    pair.run(timeout_s=10)


def test_the_ledger_is_reported(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4, "num_pages": 50})
    pair.submit("r", prompts(50, (16,))[0], params(60))
    pair.step_until(lambda: pair.decode.scheduler.running)
    report = pair.inspect("decode")
    assert [unit.rid for unit in report.requests] == ["r"]
    assert report.pool.request + report.pool.cache >= 5 and report.pool.cache_referenced == 4
    pair.run()


@pytest.mark.parametrize("speculative", ["none", "standalone"])
def test_pulled_pages_are_shared_while_their_request_runs(
    speculative: str, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    """All full pages, also if the drafter was left out of the first round."""
    model = checkpoint("llama")
    settings: dict[str, Any] = {"page_size": 4, "speculative": speculative}
    if speculative == "standalone":
        settings |= {"draft_model": str(model)}
    pair = make_pair(model, prefill=settings, decode=settings)
    prompt = prompts(50, (16,))[0]
    pair.submit("first", prompt, params(60, draft_steps=0))
    pair.step_until(lambda: pair.decode.scheduler.running)
    pair.submit("second", prompt + prompt[:3], params(4))
    pair.step_until(lambda: len(pair.decode.scheduler) == 2)
    first, second = pair.decode.scheduler
    if second.unit.rid == "first":
        first, second = second, first
    assert first.ended is None and second.lease is not None and second.lease.pages == first.pages[:4]
    pair.run()


@pytest.mark.parametrize("node", ["prefill", "decode"])
@pytest.mark.parametrize("speculative", ["none", "ngram"])
def test_logits_that_are_nan_fail_only_their_request(
    node: str, speculative: str, checkpoint: Callable[..., Path], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"page_size": 4, "speculative": speculative}
    pair = make_pair(checkpoint("llama"), prefill=settings, decode=settings)
    bad, good = prompts(50, (6, 7))
    model = (pair.prefill.prompts if node == "prefill" else pair.decode.executor).engine.model
    logits = model.logits

    def broken(hidden: Any, *lens: Any) -> Any:
        """Return NaN logits for the bad request, which runs alone."""
        return logits(hidden, *lens) * float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", broken)
        pair.submit("bad", bad, params(8))
        failed = pair.run()["bad", 0].failed
    assert failed is not None and failed.code == "model_error" and not failed.retryable
    pair.submit("good", good, params(8))
    assert len(pair.run()["good", 0].ids) == 8


@pytest.mark.parametrize("transport", ["local", "zmq"])
def test_the_times_of_chunks_and_pulls_are_reported(checkpoint: Callable[..., Path], transport: str) -> None:
    settings = {"page_size": 4, "chunk_tokens": 6, "transport": transport}
    pair = NodePair(checkpoint("llama"), prefill=settings, decode=settings, overlaps=transport == "zmq")
    rng = random.Random(0)
    begun = time.monotonic()
    pair.submit("r", [rng.randrange(50) for _ in range(27)], params(10))
    ended = pair.run()["r", 0].ended
    took = time.monotonic() - begun
    done, admitted = pair.done["r"], pair.admitted[-1]
    pair.close()
    chunks = done.times.chunks
    assert [(chunk.num_chunks, chunk.num_tokens) for chunk in chunks] == [(1, 6)] * 4 + [(1, 3)]
    spent = sum(chunk.waited_s + chunk.compute_s for chunk in chunks)
    assert 0 < spent <= done.compute_s + 1e-6
    assert done.queue_s + done.compute_s + done.times.sample_s <= took
    assert (done.times.num_offers, done.times.early_pages) == (5, 6)
    assert admitted.times.transport == transport
    assert admitted.times.num_repeated == 0
    assert 0 <= admitted.times.last_s <= took
    assert 0 < admitted.times.admit_s <= took
    assert ended is not None
    assert (ended.num_steps, ended.preemptions) == (9, ())


def test_the_times_of_preemptions_are_reported(checkpoint: Callable[..., Path]) -> None:
    settings = {"page_size": 4, "chunk_tokens": 8}
    pair = NodePair(checkpoint("llama"), prefill=settings, decode={**settings, "num_pages": 14})
    rng = random.Random(1)
    begun = time.monotonic()
    for index in range(4):
        pair.submit(f"r{index}", [rng.randrange(50) for _ in range(9)], params(20))
    results = pair.run()
    took = time.monotonic() - begun
    num_preemptions = pair.decode.stats().preemptions
    pair.close()
    ends = [result.ended for result in results.values() if result.ended is not None]
    told = [each for ended in ends for each in ended.preemptions]
    assert 0 < num_preemptions == sum(each.num_preemptions for each in told)
    for ended in ends:
        assert ended.num_steps == 19, "every round gave one token, before and after preemptions"
        spent = sum(each.ran_s + each.waited_s + each.recompute_s for each in ended.preemptions)
        assert spent <= took
        assert all(each.waited_s > 0 for each in ended.preemptions)
        assert sum(each.num_steps for each in ended.preemptions) <= 19
