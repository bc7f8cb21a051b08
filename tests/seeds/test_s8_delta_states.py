"""S8: a state stands at its edge. States of a gated delta rule that lack a token, hold a rejected draft or stand one
edge early, rows one token off, and one wrong number on the wire are caught."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import coach
from node_pair import node_pairs, params
from own_mtp import qwen_mtp_states, with_qwen_mtp
from solo import caught
from ties import Reference

from baton.engine.attention.pool_rows import PoolRows
from baton.engine.checkpoint.model_config import DELTA_ROWS, ModelConfig
from baton.engine.drafters import mtp
from baton.engine.layers import delta_net
from baton.engine.layers.delta_net import DeltaNet
from baton.kernels.state import delta_rule
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire.request import Unit

PAGE_SIZE = 4  # and of a block
PROMPT = random.Random(8).choices(range(1, 512), k=41)
NUM_TOKENS = 20
KINDS = ["rows", "updates", "states"]  # of the pools behind that of KV


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    source = checkpoint("qwen3_next")
    path = source.with_name(f"{source.name}-mtp")
    return path if path.exists() else with_qwen_mtp(source, path)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[int]:
    return Reference(model).generate(PROMPT, NUM_TOKENS)


def served(model: Path, truth: list[int], **shape: int) -> list[int]:
    """Return the text of a pair of nodes, half of whose drafts are accepted. The prompt is computed in chunks."""
    with node_pairs() as start:
        both: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 100, "chunk_tokens": 7}
        both |= {"speculative": "mtp", "draft_steps": 3, **shape}
        pair = start(model, prefill=both, decode=both)
        coach(pair.decode.executor.engine.drafter, {0: PROMPT + truth}, lambda _, position: position % 5 > 1)
        pair.submit("a", PROMPT, params(NUM_TOKENS))
        result = pair.run()["a", 0]
        assert result.failed is None, result.failed
        stats = pair.decode.rounds.stats
    if result.ids == truth:
        assert stats.num_drafted > stats.num_accepted > 0
    return result.ids


def test_states_at_their_edges_give_the_text_of_transformers(model: Path, truth: list[int]) -> None:
    assert served(model, truth) == truth


def test_a_state_that_lacks_the_last_token_is_caught(
    model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the state before the last token of a block is kept as that after it."""
    rule = delta_net.gated_delta_rule

    def early(rows: Any, state: Any, weights: Any, block: int) -> Any:
        made = rule(rows, state, weights, block)
        skipped = rows.clone()
        skipped[weights.num_before + block - 1 :: block, :, weights.taps.shape[2] :] = -100.0  # no update, no decay
        return made._replace(states=rule(skipped, state, weights, block).states)

    monkeypatch.setattr(delta_net, "gated_delta_rule", early)
    with caught():
        assert served(model, truth) == truth


def test_a_rejected_draft_that_stays_in_a_state_is_caught(
    model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: a state that a round has written is not written by the round that takes other tokens."""
    keep, kept = DeltaNet._keep, set[Any]()

    def once(self: DeltaNet, pools: PoolRows, pages: torch.Tensor, start: int, *rest: Any) -> None:
        place = (pools.pools[DELTA_ROWS].data_ptr(), self.place, int(pages[start // PAGE_SIZE]))
        if start < len(PROMPT) or place not in kept:
            keep(self, pools, pages, start, *rest)
        kept.add(place)

    monkeypatch.setattr(DeltaNet, "_keep", once)
    with caught():
        assert served(model, truth) == truth


def test_a_state_of_the_edge_before_is_caught(model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeltaNet._state

    def early(self: DeltaNet, pools: PoolRows, pages: torch.Tensor, edge: int, block: int) -> torch.Tensor:
        return state(self, pools, pages, max(0, edge - block), block)

    monkeypatch.setattr(DeltaNet, "_state", early)
    with caught():
        assert served(model, truth) == truth


def test_rows_one_token_off_are_caught(model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the convolution of a chunk or of a round reads the rows before it one token too early."""
    read = PoolRows.read

    def early(self: PoolRows, name: str, place: int, pages: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        off = 1 if name == DELTA_ROWS and first > 0 else 0
        return read(self, name, place, pages, first - off, stop - off)

    monkeypatch.setattr(PoolRows, "read", early)
    with caught():
        assert served(model, truth) == truth


TREE = {"draft_topk": 3, "draft_tokens": 10}


def test_trees_of_drafts_give_the_text_of_transformers(model: Path, truth: list[int]) -> None:
    assert served(model, truth, **TREE) == truth


@pytest.mark.parametrize("defect", ["rows", "convolution", "state"])
def test_what_a_sibling_leaves_is_caught(
    defect: str, model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defects: nodes of a tree see all nodes before them, or are convolved in the order of slots, or no state is
    made of the rows of an accepted path."""
    compute, inputs = delta_rule._compute, delta_rule._inputs

    def all_before(own: Any, decay: torch.Tensor, is_seen: torch.Tensor, state: torch.Tensor) -> Any:
        return compute(own, decay, torch.ones_like(is_seen).tril(), state)

    def by_slots(rows: torch.Tensor, weights: Any, sources: Any) -> Any:
        num_rows = len(rows) - weights.num_before
        return inputs(rows, weights, [slice(tap, tap + num_rows) for tap in range(len(sources))])

    match defect:
        case "rows":
            monkeypatch.setattr(delta_rule, "_compute", all_before)
        case "convolution":
            monkeypatch.setattr(delta_rule, "_inputs", by_slots)
        case _:
            monkeypatch.setattr(ModelConfig, "with_trees", lambda self, _: self)
    with caught():
        assert served(model, truth, **TREE) == truth


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_number_on_the_wire_is_found(kind: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit changes behind its page's checksum, so the request ends with an error that names the page."""
    offer, flipped = HandoffServer.offer, []
    with node_pairs() as start:
        both = {"page_size": PAGE_SIZE, "num_pages": 100, "chunk_tokens": 64}
        pair = start(model, prefill=both, decode=both)
        memory = pair.prefill.prompts.engine.memory[1 + KINDS.index(kind)]

        def offered(self: HandoffServer, unit: Unit, indices: Any, pages: Any, *rest: Any) -> None:
            offer(self, unit, indices, pages, *rest)
            for page in pages:
                if not flipped and memory.holds(page):  # a tail page
                    flipped.append(page)
                    memory.pages[1, page - memory.first, 77] ^= 0x10

        monkeypatch.setattr(HandoffServer, "offer", offered)
        pair.submit("a", PROMPT, params(NUM_TOKENS))
        result = pair.run()["a", 0]
    assert flipped and result.failed is not None and "checksum" in str(result.failed), result


# --- several prediction layers, each of which proposes one token ---

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def layered(model: Path) -> Path:
    source = model.with_name(model.name.removesuffix("-mtp"))
    path = source.with_name(f"{source.name}-mtp-{NUM_LAYERS}")
    return path if path.exists() else with_qwen_mtp(source, path, NUM_LAYERS)


@pytest.fixture(scope="module")
def proposed(layered: Path, truth: list[int]) -> Callable[[int], list[int]]:
    """`proposed(length)`: what each layer proposes by its formula behind so many tokens with KV. A layer takes the
    states of the one before it, and the tokens one place further."""
    text, reference = PROMPT + truth, Reference(layered).model
    with torch.no_grad():
        states = reference.model(torch.tensor([text])).last_hidden_state[0]

    @functools.cache
    @torch.no_grad()
    def of(length: int) -> list[int]:
        hidden, known, ids = states[:length], text[1 : length + 1], list[int]()
        for place in range(NUM_LAYERS):
            hidden = qwen_mtp_states(layered, known, hidden, place)
            ids.append(int(reference.lm_head(hidden[-1]).argmax()))
            known = [*known[1:], ids[-1]]
        return ids

    return of


def layers_served(layered: Path, truth: list[int]) -> dict[int, list[int]]:
    """Return the drafts of each round, by the number of tokens with KV. Some are then replaced, and accepted."""
    drafted = dict[int, list[int]]()
    with node_pairs() as start:
        both = {"page_size": PAGE_SIZE, "num_pages": 100, "chunk_tokens": 7, "speculative": "mtp"}
        pair = start(layered, prefill=both, decode=both)
        drafter: Any = pair.decode.executor.engine.drafter
        propose = drafter.propose

        def recorded(rows: Any, shape: Any) -> Any:
            drafts = propose(rows, shape)
            for length, ids in zip(rows.lengths.tolist(), drafts.tokens.tolist(), strict=True):
                drafted[length] = ids
            return drafts

        drafter.propose = recorded
        coach(drafter, {0: PROMPT + truth}, lambda _, position: position % 5 > 1)
        pair.submit("a", PROMPT, params(NUM_TOKENS))
        assert pair.run()["a", 0].ids == truth
        assert 0 < pair.decode.rounds.stats.num_accepted < pair.decode.rounds.stats.num_drafted
    return drafted


def test_every_prediction_layer_proposes_by_its_formula(
    layered: Path, truth: list[int], proposed: Callable[[int], list[int]]
) -> None:
    drafted = layers_served(layered, truth)
    assert len(drafted) > 5 and max(map(len, drafted.values())) == NUM_LAYERS
    for length, ids in drafted.items():
        assert ids == proposed(length)[: len(ids)], length


def test_a_second_prediction_layer_that_never_runs_is_caught(
    layered: Path, truth: list[int], proposed: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the first layer runs for every step."""
    load = mtp.load_mtp

    def first_alone(*args: Any) -> Any:
        return load(*args)[:1] * NUM_LAYERS

    monkeypatch.setattr(mtp, "load_mtp", first_alone)
    with caught():
        test_every_prediction_layer_proposes_by_its_formula(layered, truth, proposed)
