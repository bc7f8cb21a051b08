"""Rows of a batch: what each column says of a request, and rows further on equal those of requests that came so far."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from batch_columns import column

from baton.engine.sampling.batch import FLOATS, INTS, SamplingBatch, columns
from baton.engine.sampling.state import Needs, SamplingState
from baton.kernels.sampling.processors import History, TokenColumns
from baton.metadata.wire.request import SamplingParams, choice_seed

VOCAB = 23
PLAIN: dict[str, Any] = {"temperature": 0.0}
FIELDS: list[dict[str, Any]] = [  # each asks for something of its own
    PLAIN,
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.3, "seed": 2**40, "top_k": 7, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.25, "top_p": 0.1 + 0.2},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": -0.25},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 9: -2.5}},
    {"temperature": 0.7, "min_tokens": 6, "stop_ids": (0, 5)},
    {"temperature": 0.0, "stop_ids": (1,), "num_logprobs": 3},
]


def state(fields: dict[str, Any], prompt: list[int], output: list[int], choice: int = 0) -> SamplingState:
    return SamplingState(SamplingParams(max_tokens=99, **fields), prompt, output, vocab_size=VOCAB, choice=choice)


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]


def penalizes(batch: SamplingBatch) -> torch.Tensor:
    """[num_rows] bool: what a row's output counts hold matters."""
    repetition, frequency, presence = batch.penalties
    return (repetition != 1) | (frequency != 0) | (presence != 0)


def assert_rows_equal(ours: SamplingBatch, theirs: SamplingBatch) -> None:
    for name in ("ints", "floats", "top_p", *TokenColumns._fields):
        mine, others = column(ours, name), column(theirs, name)
        assert (mine is None) == (others is None), name
        if mine is not None:
            counted = penalizes(theirs) if name == "output_counts" else slice(None)
            assert mine.dtype == others.dtype and mine.shape == others.shape, name
            assert torch.equal(mine[counted], others[counted]), name


def test_columns_say_what_a_request_asks_for() -> None:
    """In the order that kernels and slots read them in."""
    asked = state({**FIELDS[7], "top_k": 4, "min_p": 0.5, "seed": 8}, [1, 2, 3], [4, 5], choice=1)
    ints, floats, top_p = columns(asked)
    assert dict(zip(INTS, ints, strict=True)) == {
        "seed": choice_seed(8, 1),
        "position": 5,
        "num_generated": 2,
        "min_tokens": 6,
        "top_k": 4,
    }
    assert dict(zip(FLOATS, floats, strict=True)) == {
        "temperature": 0.7,
        "log_min_p": math.log(0.5),
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    assert top_p == 1.0
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -2.0, "top_p": 0.3}
    _, floats, top_p = columns(state(penalties, [1], []))
    assert floats[2:] == [1.5, 0.25, -2.0] and top_p == 0.3


@pytest.mark.parametrize(("temperature", "column"), [(1e-7, 0.0), (1e-6, 1e-6), (0.0, 0.0)])
def test_a_temperature_that_is_greedy_is_zero(temperature: float, column: float) -> None:
    assert columns(state({"temperature": temperature}, [1], []))[1][0] == column


def test_filters_that_are_off_cut_nothing() -> None:
    ints, floats, _ = columns(state({"temperature": 1.0}, [1], []))
    assert ints[INTS.index("top_k")] == 2**31 - 1 and floats[FLOATS.index("log_min_p")] == -math.inf
    assert columns(state({"temperature": 1.0, "min_p": 1e-30}, [1], []))[1][1] == math.log(1e-30)


def test_each_column_is_read_by_its_own_name() -> None:
    """One number for each row, and shapes that broadcast over the vocabulary where that is how they are used."""
    asked = [
        state({"temperature": 0.5, "top_k": 3, "seed": 7}, [1, 2], [3]),
        state(
            {
                "temperature": 1.0,
                "min_p": 0.5,
                "repetition_penalty": 1.5,
                "frequency_penalty": 0.25,
                "presence_penalty": -2.0,
                "min_tokens": 2,
                "stop_ids": (4,),
                "seed": 9,
            },
            [1, 2, 3],
            [4],
        ),
    ]
    batch = SamplingBatch.of(asked)
    assert batch.num_rows == 2
    assert batch.seeds.tolist() == [7, 9] and batch.positions.tolist() == [3, 4]
    draws = batch.draws
    assert draws is not None and draws.filters is not None and draws.filters.top_k is not None
    assert torch.equal(draws.seeds, batch.seeds) and torch.equal(draws.positions, batch.positions)
    assert draws.filters.top_k.tolist() == [3, 2**31 - 1] and draws.temperatures.tolist() == [0.5, 1.0]
    assert draws.filters.log_min_p.tolist() == [-math.inf, pytest.approx(math.log(0.5))]
    assert draws.filters.top_p is not None and draws.filters.top_p.tolist() == [1.0, 1.0]
    assert batch.penalties.tolist() == [[1.0, 1.5], [0.0, 0.25], [0.0, -2.0]]
    assert batch.bans_now.tolist() == [False, True] and batch.bans_now.dtype == torch.bool
    assert batch.top_p.tolist() == [[1.0], [1.0]]
    assert batch.ints.dtype == torch.int64 and batch.ints.is_contiguous() and batch.ints.shape == (len(INTS), 2)
    assert batch.floats.dtype == torch.float32 and batch.floats.is_contiguous() and batch.floats.shape == (5, 2)


def test_rows_name_the_filters_that_some_of_them_have() -> None:
    """Greedy rows are not drawn; min-p alone needs no search."""
    assert SamplingBatch.of([state(FIELDS[0], [1], [])]).draws is None
    without, cut = (
        SamplingBatch.of([state(FIELDS[at], [1], []), state(extra, [1], [])]).draws
        for at, extra in ((1, FIELDS[0]), (0, {"temperature": 2.0, "min_p": 0.25}))
    )
    assert without is not None and without.filters is None
    assert cut is not None and cut.filters is not None and cut.filters.top_k is None and cut.filters.top_p is None


def test_top_p_is_as_exact_as_it_was_asked_for() -> None:
    batch = SamplingBatch.of([state(FIELDS[3], [1], [])])
    assert batch.top_p.dtype == torch.float64 and batch.top_p.item() == 0.1 + 0.2


@pytest.mark.parametrize(
    ("index", "present"),
    [
        (0, ()),
        (1, ()),
        (4, ("prompt_mask", "output_counts")),
        (5, ("prompt_mask", "output_counts")),
        (6, ("bias",)),
        (7, ("stops",)),
        (8, ()),
    ],
)
def test_what_nobody_asks_for_is_not_there(index: int, present: tuple[str, ...]) -> None:
    batch = SamplingBatch.of([state(PLAIN, [1], []), state(FIELDS[index], [1, 2, 2], [2, 4, 4])])
    rows_of_each = TokenColumns() if batch.history is None else batch.history.rows()
    assert tuple(name for name in TokenColumns._fields if getattr(rows_of_each, name) is not None) == present
    assert batch.needs == Needs.any_of([state(FIELDS[index], [1, 2, 2], [2, 4, 4]).needs])
    for name in present:
        rows = getattr(rows_of_each, name)
        assert rows.shape == (2, VOCAB) and not rows[0].any(), "the row that does not ask"
    mask, counts, bias, stops = rows_of_each
    if index == 4:
        assert mask is not None and mask[1].nonzero().flatten().tolist() == [1, 2]
    if index in (4, 5):
        assert counts is not None and {int(i): int(counts[1, i]) for i in counts[1].nonzero()} == {2: 1, 4: 2}
    if index == 6:
        assert bias is not None and (bias[1, 3], bias[1, 9]) == (4.0, -2.5)
    if index == 7:
        assert stops is not None and stops[1].nonzero().flatten().tolist() == [0, 5]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "the same for all"])
def test_rows_ahead_are_those_of_requests_that_came_so_far(seed: int, is_shared: bool) -> None:
    """Of each sequence several rows, further on by some of the tokens: split equals whole, column by column."""
    rng = random.Random(seed)
    asked = rng.sample(FIELDS, rng.randint(1, 5))
    asked = [*asked, FIELDS[rng.choice((4, 5, 6, 7))]]
    num_new, num_tokens = rng.randint(1, 4), rng.randint(0, 5)
    prompts, outputs = ([tokens(rng, rng.randint(1, 6)) for _ in asked] for _ in range(2))
    drafted = [tokens(rng, num_tokens) for _ in asked]
    drafted[0] = [3] * num_tokens  # one that comes twice counts twice
    ahead = [[rng.randint(0, num_tokens) for _ in range(num_new)] for _ in (asked[:1] if is_shared else asked)]
    is_before = torch.tensor([[[i < num for i in range(num_tokens)] for num in row] for row in ahead], dtype=torch.bool)
    is_before = is_before.view(len(ahead), num_new, num_tokens)
    states = [state(*each) for each in zip(asked, prompts, outputs, strict=True)]
    batch = SamplingBatch.of(states)
    counts, ints = column(batch, "output_counts"), batch.ints.clone()
    result = batch.ahead(torch.tensor(ahead), torch.tensor(drafted).view(len(asked), num_tokens), is_before)

    expected = [
        state(fields, prompt, output + new[:num])
        for row, (fields, prompt, output, new) in enumerate(zip(asked, prompts, outputs, drafted, strict=True))
        for num in ahead[0 if is_shared else row]
    ]
    whole = SamplingBatch.of([*expected, *states])  # those bring what none of the others may need any more
    assert result.needs == batch.needs and result.num_rows == len(expected)
    assert_rows_equal(result, rows_of(whole, len(expected)))
    assert torch.equal(batch.ints, ints), "the batch itself has changed"
    after = column(batch, "output_counts")
    assert (after is None) == (counts is None) and (counts is None or torch.equal(after, counts))  # type: ignore[arg-type]


def rows_of(batch: SamplingBatch, num: int) -> SamplingBatch:
    """The first `num` rows."""
    history = batch.history and History.of(batch.history.columns, batch.history.places[:num])
    return SamplingBatch(batch.needs, batch.ints[:, :num], batch.floats[:, :num], batch.top_p[:num], history)


def test_all_tokens_count_if_nothing_else_is_said() -> None:
    batch = SamplingBatch.of([state(FIELDS[5], [1], [2]), state(FIELDS[4], [1], [])])
    result = batch.ahead(torch.tensor([[3]]), torch.tensor([[4, 4, 6], [2, 1, 0]]))
    assert_rows_equal(result, SamplingBatch.of([state(FIELDS[5], [1], [2, 4, 4, 6]), state(FIELDS[4], [1], [2, 1, 0])]))


def test_rows_ahead_may_be_moved_ahead_again() -> None:
    """As a drafter does that has seen the accepted tokens: both steps are counted."""
    batch = SamplingBatch.of([state(FIELDS[5], [1], [2]), state(FIELDS[4], [1], [])])
    accepted = batch.ahead(
        torch.tensor([[2], [1]]),
        torch.tensor([[4, 4, 9], [2, 9, 9]]),
        torch.tensor([[[True, True, False]], [[True, False, False]]]),
    )
    result = accepted.ahead(torch.tensor([[1]]), torch.tensor([[4], [5]]))
    assert_rows_equal(result, SamplingBatch.of([state(FIELDS[5], [1], [2, 4, 4, 4]), state(FIELDS[4], [1], [2, 5])]))


@pytest.mark.parametrize("num_generated", range(8))
def test_stops_are_allowed_as_soon_as_enough_tokens_come_between(num_generated: int) -> None:
    """`min_tokens` counts tokens that are only drafted yet."""
    batch = SamplingBatch.of([state(FIELDS[7], [1, 2], [3] * num_generated)])
    rows = batch.ahead(torch.tensor([list(range(8))]), torch.full((1, 7), 3))
    assert rows.bans_now.flatten().tolist() == [num_generated + ahead < 6 for ahead in range(8)]


def test_rows_that_are_plainly_greedy_are_left_alone() -> None:
    """Nothing of them is read. One row that draws, or is processed, is enough for all to move on."""
    plain = [state(PLAIN, [1, 2], [3]), state(FIELDS[8], [1], [])]
    batch = SamplingBatch.of(plain)
    ahead = torch.tensor([[0, 1]])
    assert batch.ahead(ahead, torch.tensor([[4], [4]])) is batch
    for fields in (FIELDS[1], FIELDS[4], FIELDS[6], FIELDS[7]):
        rows = SamplingBatch.of([*plain, state(fields, [1], [])]).ahead(ahead, torch.tensor([[4]] * 3))
        assert rows.positions.tolist() == list(itertools.chain(*((n, n + 1) for n in (3, 1, 1))))


@pytest.mark.parametrize("fields", [[*range(len(FIELDS))], [0, 4, 8], [0, 8]])
def test_taken_rows_are_those_of_their_requests(fields: list[int]) -> None:
    rng = random.Random(1)
    states = [state(FIELDS[field], tokens(rng, 5), tokens(rng, 3)) for field in fields]
    whole = SamplingBatch.of(states)
    for rows in ([1], [0, 1], [1, 0, 1], []):
        taken = whole.take(torch.tensor(rows, dtype=torch.int64))
        assert taken.needs == whole.needs and taken.num_rows == len(rows)
        for name in ("ints", "floats", "top_p", *TokenColumns._fields):
            ours, theirs = column(taken, name), column(whole, name)
            assert (ours is None) == (theirs is None), name
            if ours is not None and name in ("ints", "floats"):
                assert torch.equal(ours, theirs[:, rows]), name
            elif ours is not None:
                assert torch.equal(ours, theirs[rows]), name
