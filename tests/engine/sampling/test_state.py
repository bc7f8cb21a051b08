"""The sampling state of a choice: what it records, what it asks for, and that it needs no torch."""

from __future__ import annotations

import itertools

import pytest
from imports import check_imports

from baton.engine.sampling.state import (
    EVERYTHING,
    GREEDY,
    KINDS,
    MASKED,
    SAMPLED,
    SCORED,
    Needs,
    SamplingState,
    covering,
    each_kind,
    ended,
)
from baton.metadata.wire.request import MAX_TOP_LOGPROBS, SamplingParams

VOCAB = 12


def state(prompt: list[int], output: list[int], choice: int = 0, **params: object) -> SamplingState:
    return SamplingState(SamplingParams(max_tokens=64, **params), prompt, output, vocab_size=VOCAB, choice=choice)  # type: ignore[arg-type]


def facts(of: SamplingState) -> dict[str, object]:
    return {name: getattr(of, name) for name in SamplingState.__slots__}


PENALTIES = [{}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": -1.0}]


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_state_advanced_equals_one_rebuilt(penalty: dict[str, float]) -> None:
    params: dict[str, object] = {**penalty, "min_tokens": 9, "stop_ids": (1,), "seed": 7}
    advanced = state([4, 5, 5], [], choice=2, **params)
    output = [9, 9, 5, 0, 9]
    for i, token_id in enumerate(output):
        assert advanced.position == 3 + i
        advanced.append(token_id)
    rebuilt = state([4, 5, 5], output, choice=2, **params)
    assert (rebuilt.position, rebuilt.num_generated) == (8, 5)
    assert facts(advanced) == facts(rebuilt)
    assert rebuilt.output_ids == (output if penalty else [])
    assert rebuilt.prompt_ids == ((4, 5, 5) if "repetition_penalty" in penalty else ())


def test_a_state_keeps_its_history_when_the_callers_lists_change() -> None:
    prompt, output = [4, 5], [6]
    kept = state(prompt, output, repetition_penalty=1.2)
    kept.append(7)
    prompt.append(8)
    assert (kept.prompt_ids, kept.output_ids, output) == ((4, 5), [6, 7], [6])


def test_a_state_holds_no_history_that_no_penalty_counts() -> None:
    plain = state([1, 2, 3], [4], temperature=0.7, top_k=5, stop_ids=(2,))
    assert not plain.prompt_ids and not plain.output_ids and not plain.bias and not plain.banned_ids
    assert not plain.needs.processes
    assert not state([1], [], presence_penalty=1.0).prompt_ids


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({"temperature": 0.0, "top_k": 3, "min_p": 0.1}, Needs()),
        ({"temperature": 1.0, "top_k": 3}, Needs(is_random=True, ranks=True)),
        ({"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}, Needs(is_random=True, ranks=True, cuts=True)),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, Needs(penalizes=True)),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}, "num_logprobs": 0}, Needs(biases=True, num_logprobs=0)),
        ({"temperature": 0.0, "logit_bias": {VOCAB: 1.0}}, Needs()),
        ({"temperature": 0.0, "min_tokens": 3, "stop_ids": (1, VOCAB)}, Needs(bans=True)),
        ({"temperature": 0.0, "min_tokens": 3, "stop_ids": (VOCAB,)}, Needs()),
        ({"temperature": 0.0, "min_tokens": 2, "stop_ids": (1,)}, Needs()),
    ],
    ids=str,
)
def test_a_state_needs_what_its_parameters_ask_for_now(params: dict[str, object], needs: Needs) -> None:
    assert state([1], [4, 4], **params).needs == needs


def test_the_needs_of_a_batch_are_those_of_any_row() -> None:
    rows = [Needs(is_random=True, num_logprobs=2), Needs(bans=True, num_logprobs=0), Needs()]
    assert Needs.any_of(rows) == Needs(is_random=True, bans=True, num_logprobs=2)
    assert Needs.any_of([]) == Needs()


def test_the_module_imports_no_torch() -> None:
    check_imports(["baton.engine.sampling.state"], ["torch"])


# --- kinds ---

NUMS = (None, 0, 1, MAX_TOP_LOGPROBS)
ALL = [Needs(*flags, num) for flags in itertools.product((False, True), repeat=7) for num in NUMS]


def does(kind: Needs, needs: Needs) -> bool:
    """Whether a graph of `kind` does every step that `needs` asks for."""
    if not all(has or not wants for has, wants in zip(kind[:-1], needs[:-1], strict=True)):
        return False
    return needs.num_logprobs is None or (kind.num_logprobs is not None and kind.num_logprobs >= needs.num_logprobs)


def test_the_least_kind_that_does_all_that_is_asked_serves_it() -> None:
    for needs in ALL:
        assert covering(needs) == next(kind for kind in (*KINDS, MASKED) if does(kind, needs)), needs


def test_each_kind_does_all_that_the_one_before_it_does() -> None:
    assert all(does(later, kind) and later != kind for kind, later in itertools.pairwise((*KINDS, MASKED)))


@pytest.mark.parametrize(
    ("needs", "kind"),
    [
        (Needs(), GREEDY),
        (Needs(is_random=True), SAMPLED),
        (Needs(is_random=True, ranks=True), SAMPLED),
        (Needs(is_random=True, cuts=True), SAMPLED),
        (Needs(is_random=True, ranks=True, cuts=True), SAMPLED),
        (Needs(penalizes=True), EVERYTHING),
        (Needs(biases=True), EVERYTHING),
        (Needs(bans=True), EVERYTHING),
        (Needs(num_logprobs=0), SCORED),
        (Needs(masks=True), MASKED),
        (Needs(is_random=True, cuts=True, num_logprobs=MAX_TOP_LOGPROBS), SCORED),
        (Needs(penalizes=True, num_logprobs=1), EVERYTHING),
    ],
)
def test_what_one_request_asks_for_decides_the_kind(needs: Needs, kind: Needs) -> None:
    assert covering(needs) == kind


@pytest.mark.parametrize("others", [(), (Needs(),), (Needs(is_random=True), Needs(is_random=True, cuts=True))])
def test_a_batch_is_served_by_a_kind_that_serves_each_of_its_rows(others: tuple[Needs, ...]) -> None:
    for needs in ALL[::7]:
        kind = covering(Needs.any_of([needs, *others]))
        assert all(does(kind, each) for each in (needs, *others))


def test_a_warm_up_has_every_kind_and_every_step_of_sampling() -> None:
    states = each_kind(50)
    assert {covering(state.needs) for state in states} == set(KINDS)
    every = Needs.any_of(state.needs for state in states)
    assert every == Needs(*[True] * 6, masks=False, num_logprobs=1)
    assert any(state.prompt_ids and state.output_ids and state.bias and state.banned_ids for state in states)
    assert {state.position for state in states} == {2}


PROMPT = [1, 2, 3]


def after(output: list[int], context_len: int = 100, **params: object) -> tuple[str, int | None] | None:
    """Return reason and stop id if the last token of `output` ends the choice."""
    wanted = SamplingParams(**({"max_tokens": 4} | params))  # type: ignore[arg-type]
    end = ended(SamplingState(wanted, PROMPT, output, vocab_size=50), output[-1], context_len, 2)
    if end is None:
        return None
    assert (end.num_prompt, end.num_generated, end.num_cached) == (len(PROMPT), len(output), 2)
    return end.reason, end.stop_id


@pytest.mark.parametrize(
    ("output", "context_len", "params", "expected"),
    [
        ([9], 100, {}, None),
        ([9, 9, 9], 100, {}, None),
        ([9, 9, 9, 9], 100, {}, ("length", None)),
        ([9, 9], 5, {}, ("length", None)),
        ([9, 9], 6, {}, None),
        ([9, 7], 100, {"stop_ids": (5, 7)}, ("stop", 7)),
        ([7, 9], 100, {"stop_ids": (5, 7)}, None),
        ([9, 9, 9, 7], 100, {"stop_ids": (7,)}, ("stop", 7)),
        ([9, 7], 5, {"stop_ids": (7,)}, ("stop", 7)),
    ],
    ids=str,
)
def test_a_choice_ends_at_its_last_token(
    output: list[int], context_len: int, params: dict[str, object], expected: tuple[str, int | None] | None
) -> None:
    assert after(output, context_len, **params) == expected
