"""The engine of a node: which settings it refuses, how large its pool is, and what it computes, copies and samples."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of

from baton.engine import engine as engines
from baton.engine.checkpoint.fingerprint import fingerprint
from baton.engine.checkpoint.model_check import resolve_model
from baton.engine.config import EngineConfig
from baton.engine.engine import LEASE_STEPS, MIN_LEASE_S, Engine, default_node_id
from baton.engine.rounds.batch import Computed
from baton.engine.sampling import logprobs
from baton.engine.sampling.logprobs import compute_logprobs
from baton.engine.sampling.state import SamplingState
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.wire.request import SamplingParams

PAGE_SIZE, NUM_PAGES = 4, 24
MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(checkpoint: Callable[..., Path]) -> MakeEngine:
    """`make_engine(num_pages=9)`: a small llama of 512 tokens of context, with these settings."""

    def make(model: Path | None = None, **changes: Any) -> Engine:
        common: dict[str, Any] = {"device": "cpu", "threads": 1, "page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
        return Engine(EngineConfig(model=str(model or checkpoint("llama")), **(common | changes)))

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "torch sees no CUDA device; use --device cpu or auto"),
        ({"context_len": 0}, "context_len 0 is out of range: the model takes 1 to 512"),
        ({"context_len": 513}, "context_len 513 is out of range: the model takes 1 to 512"),
        ({"page_size": 0}, "page_size 0 is out of range: use 1 to 4096 tokens"),
        ({"page_size": 4097}, "page_size 4097 is out of range"),
        ({"num_pages": 2}, "num_pages 2 is too small: use 3 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_loads(
    changes: dict[str, Any], words: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(engines, "load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=words):
        make_engine(**changes)


@pytest.mark.parametrize(
    ("changes", "context_len"),
    [
        ({"num_pages": 400}, 512),
        ({"num_pages": 400, "context_len": 100}, 100),
        ({"num_pages": 20}, 19 * PAGE_SIZE),  # one page is padding
        ({"num_pages": 20, "context_len": 100}, 19 * PAGE_SIZE),
    ],
)
def test_no_request_is_longer_than_the_pool(changes: dict[str, Any], context_len: int, make_engine: MakeEngine) -> None:
    engine = make_engine(**changes)
    assert engine.context_len == engine.card.context_len == context_len
    assert engine.pool.num_pages == changes["num_pages"]


def test_the_first_pools_may_have_another_size_than_configured(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, page_size=PAGE_SIZE)
    assert Engine(config, num_pages=9).pool.num_pages == 9


def test_the_demo_model_is_the_default() -> None:
    assert (resolve_model(None) / "config.json").is_file() and (resolve_model(None) / "model.safetensors").is_file()
    assert resolve_model("~/model") == Path.home() / "model"


def test_a_node_is_named_after_role_host_and_process() -> None:
    """In a container, as tests/hosts/test_start.py has it, random digits stand for the process."""
    role, *host, number = default_node_id("decode").split("-")
    assert role == "decode" and os.uname().nodename.startswith("-".join(host))
    assert number == str(os.getpid()) or re.fullmatch("[0-9a-f]{8}", number)


def test_a_node_says_which_weights_it_has(engine: Engine, make_engine: MakeEngine, checkpoint: Any) -> None:
    assert engine.fingerprints == (fingerprint(checkpoint("llama")), None)
    assert make_engine(checkpoint("llama", seed=1)).fingerprints != engine.fingerprints
    assert engine.card.name == checkpoint("llama").name
    assert make_engine(model_name="mine").card.name == "mine"


# --- the pool ---


GIB = 1 << 30


@pytest.mark.parametrize(
    ("context_len", "host", "gpu", "num_tokens"),
    [
        (512, 64 * GIB, None, 65_536),
        (100_000, 64 * GIB, None, 400_000),  # four contexts
        (512, GIB // 32, None, 16_384),  # a quarter of the memory
        (512, 64 * GIB, GIB // 32, 16_384),
        (512, GIB // 32, 64 * GIB, 16_384),
        (512, 0, None, 2 * PAGE_SIZE),
    ],
)
def test_a_pool_takes_four_contexts_but_no_more_than_a_quarter_of_the_memory(
    context_len: int, host: int, gpu: int | None, num_tokens: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page_bytes(engine.schema) == 512 * PAGE_SIZE  # so a quarter of GIB / 32 holds 16,384 tokens
    monkeypatch.setattr(engines, "available_memory", lambda: host)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gpu, 64 * GIB))
    device = torch.device("cpu" if gpu is None else "cuda")
    found = engines._default_num_pages(context_len, engine.schema, device)
    is_limited = num_tokens == 16_384
    assert found == num_tokens // PAGE_SIZE + (not is_limited), "one page is padding"
    if is_limited:
        assert engines._default_num_pages(context_len, engine.schema, device, num_nodes=2) == found // 2


def test_a_pool_that_holds_no_context_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "available_memory", lambda: GIB // 32)
    engines._default_num_pages(16_384, engine.schema, torch.device("cpu"))
    assert not caplog.records
    engines._default_num_pages(16_385, engine.schema, torch.device("cpu"))
    assert "memory for 16384 tokens only: longer requests will be refused" in caplog.text


def test_on_the_host_the_pool_is_the_memory_that_others_read(engine: Engine) -> None:
    """A handoff reads pages in place."""
    engine.kv.fill_(1.0)
    engine.kv[1, 5] = 2.0
    pages = torch.from_numpy(engine.memory[0].pages).view(torch.float32)
    assert engine.device_pool is None and pages[1, 5].unique().tolist() == [2.0]
    assert pages[0].unique().tolist() == pages[1, [4, 6]].unique().tolist() == [1.0]


def test_a_page_is_copied_in_every_pool(
    make_engine: MakeEngine, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of("eagle", checkpoint)
    engine = make_engine(model, **settings("eagle", model, tmp_path))
    assert len(engine.kvs) == 2
    expected: list[torch.Tensor] = []
    for kv in engine.kvs:
        kv.copy_(torch.randn(kv.shape))
        expected.append(kv.clone())
        expected[-1][:, 9] = kv[:, 4]
    engine.copy_page(4, 9)
    assert all(torch.equal(kv, pool) for kv, pool in zip(engine.kvs, expected, strict=True))


def test_the_kv_of_slots_is_moved_along_the_block_table(engine: Engine) -> None:
    engine.kv.copy_(torch.randn(engine.kv.shape))
    expected, table = engine.kv.clone(), torch.tensor([[3, 7], [9, 2]])
    sources, targets = torch.tensor([[6, 1], [5, 7]]), torch.tensor([[2, 3], [0, 6]])
    for pages, own, there in zip(table.tolist(), sources.tolist(), targets.tolist(), strict=True):
        for source, target in zip(own, there, strict=True):
            moved = engine.kv[:, pages[source // PAGE_SIZE], :, :, source % PAGE_SIZE].clone()
            expected[:, pages[target // PAGE_SIZE], :, :, target % PAGE_SIZE] = moved
    engine.move_kv(table, sources, targets)
    assert torch.equal(engine.kv, expected)


# --- computing ---

PROMPT = [17, 4, 250, 33, 99, 8, 301]


def test_logits_are_those_of_the_last_new_tokens_of_each_row(engine: Engine) -> None:
    rows = [BatchRow(PROMPT, 0, [1, 2], 7), BatchRow(PROMPT[::-1], 0, [3, 4], 7)]
    every = engine.forward(rows).split(7)
    asked = [BatchRow(PROMPT, 0, [1, 2], 2), BatchRow(PROMPT[::-1], 0, [3, 4], 0)]
    assert torch.equal(engine.forward(asked), every[0][-2:])
    assert engine.forward([BatchRow(PROMPT, 0, [1, 2], 0)]).shape == (0, 512)


@pytest.mark.parametrize(("name", "width"), [("none", None), ("standalone", None), ("eagle", 64), ("eagle3", 3 * 64)])
def test_a_drafter_gets_the_states_of_all_new_tokens(
    name: str, width: int | None, make_engine: MakeEngine, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """They do not depend on which logits are wanted, and a token's state not on those after it."""
    drafting: dict[str, Any] = {"speculative": "none"}
    model = checkpoint("llama", num_hidden_layers=4) if name == "none" else target_of(name, checkpoint)
    if name != "none":
        drafting = settings(name, model, tmp_path)
    engine = make_engine(model, **drafting)
    computed = engine.compute([BatchRow(PROMPT, 0, [1, 2]), BatchRow(PROMPT[:3], 0, [3], 0)])
    if width is None:
        assert computed.extend is None
    else:
        assert computed.extend is not None and computed.extend.shape == (len(PROMPT) + 3, width)
        torch.testing.assert_close(computed.extend[7:], computed.extend[:3], atol=2e-4, rtol=0)


def test_a_row_whose_logits_are_no_numbers_has_no_token(engine: Engine) -> None:
    """Its neighbours have theirs, and log-probabilities go to the rows that asked for them."""
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    logits[1, 40] = float("nan")
    params = [SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=num) for num in (None, 2, 1)]
    states = [SamplingState(each, [0], vocab_size=512) for each in params]
    tokens, found = engine.sample(logits, states)
    assert tokens == [int(logits[0].argmax()), None, int(logits[2].argmax())]
    assert found[0] is None and found[2] is not None and len(found[2].top_ids) == 1
    assert found[2].logprob == pytest.approx(float(logits[2].log_softmax(0).max()), abs=1e-5)


def test_log_probabilities_of_many_rows_are_those_of_the_rows_and_reach_the_host_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a GPU: a copy to the host holds anything until the device has come to it."""
    computed = engine.compute([BatchRow(PROMPT, 0, [1, 2], num_scored=len(PROMPT))])
    assert computed.final is not None
    ids = torch.tensor(PROMPT)
    expected = compute_logprobs(engine.model.logits(computed.final), ids, 2)
    copies = list[tuple[torch.Tensor, torch.Tensor]]()

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        copies.append((torch.full_like(tensor, 99), tensor))
        return copies[-1][0]

    monkeypatch.setattr(logprobs, "to_host", to_host)
    monkeypatch.setattr(engines, "SCORED_AT_ONCE", 3)
    found = engine.score(computed.final, ids, 2)
    for host, tensor in copies:
        host.copy_(tensor)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


# --- before it serves ---


@pytest.mark.parametrize(
    ("changes", "chunk_tokens", "num_tokens"),
    [({}, 32, 32), ({"context_len": 20}, 32, 20), ({"num_pages": 5}, 32, 16), ({}, 3, 3)],
)
def test_warming_up_runs_a_step_and_two_chunks_and_leaves_nothing(
    changes: dict[str, Any],
    chunk_tokens: int,
    num_tokens: int,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease is eight times as long as the second chunk took, which compiles nothing any more. Scoring, which few
    requests ask for, counts in no step, and needs one row on a CPU."""
    engine = make_engine(**changes)
    now, seconds = [0.0], iter((5.0, 70.0, 0.3))
    sizes: list[int] = []
    num_scored: list[int] = []
    compute = engine.compute

    def scoring(final: torch.Tensor, *_: object) -> None:
        num_scored.append(len(final))
        now[0] += 1000.0

    def computing(rows: list[BatchRow]) -> Computed:
        [row] = rows
        sizes.append(len(row.input_ids))
        now[0] += next(seconds)
        return compute(rows)

    monkeypatch.setattr(engine, "compute", computing)
    monkeypatch.setattr(engine, "score", scoring)
    monkeypatch.setattr(engines.time, "monotonic", lambda: now[0])
    engine.warm_up(chunk_tokens)
    assert sizes == [1, num_tokens, num_tokens] and num_scored == [1, 1, 1]
    assert engine.lease_s == pytest.approx(LEASE_STEPS * 0.3)
    assert engine.pool.num_free == engine.pool.num_usable


def test_warming_up_announces_as_many_rows_as_each_forward_has(
    make_engine: MakeEngine, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a group divide the rows of a forward. The one behind the longest histories has several sequences."""
    monkeypatch.setattr(engines, "captures", lambda _: True)
    monkeypatch.setattr(engines, "is_faster", lambda *_: True)
    monkeypatch.setattr(engines, "piece_size", lambda *_: 700)  # keys, more than the context of 512 holds
    engine = make_engine(checkpoint("deepseek_v2"))
    announced, computed = list[int](), list[list[BatchRow]]()
    compute = engine.compute

    def computing(rows: list[BatchRow]) -> Computed:
        computed.append(rows)
        return compute(rows)

    monkeypatch.setattr(engine, "compute", computing)
    monkeypatch.setattr(type(engine._ranks), "announce", lambda _, num_rows: announced.append(num_rows))
    engine.warm_up(32)
    assert announced == [sum(len(row.input_ids) for row in rows) for rows in computed]
    assert len(computed[-1]) == 2 and computed[-1][0].position == 512 - 16


def test_a_lease_is_never_short(engine: Engine) -> None:
    assert engine.lease_s == MIN_LEASE_S
    engine.warm_up(4)
    assert engine.lease_s >= MIN_LEASE_S


def test_on_a_cpu_no_prompts_are_captured(engine: Engine) -> None:
    before = engine.forward([BatchRow(PROMPT, 0, [1, 2])])
    engine.capture_prompts()
    assert engine._prompt_graphs is None
    assert torch.equal(engine.forward([BatchRow(PROMPT, 0, [1, 2])]), before)
