"""Makes the works of all ranks agree, if every rank has sequences of its own. Without torch.

    queues of works, one per rank --next_works--> one work per rank, of one kind --agree--> Agreed

The ranks share the hidden units of the target's feed-forward layers, so all of them run the same forwards of the target
in the same order. A rank without sequences gets work of the same kind without rows: it runs the same functions on zero
rows, or on padding if the work has a bucket. It never computes a prompt while the others decode. Chunks of prompts are
padded to the same bucket on all ranks if that of the largest chunk holds each of them, and to none otherwise.

A round has the largest shape and bucket of all ranks, and the sampling of all ranks together, because a graph is
captured for each shape, bucket and kind of sampling. A sequence accepts no more drafts than its own rank asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..prompts.sizes import NO_PROMPT_SIZES, PromptSizes
from ..rounds.draft_shape import NO_DRAFTS, DraftShape
from ..sampling.state import Needs
from ..work import BatchRow, CatchUp, Chunk, Forget, LoadSlot, Recompute, Round, RoundWork, WarmUp, catch_up_sizes

OwnWork = RoundWork | Chunk | Forget | WarmUp
_ORDER = (Forget, LoadSlot, Chunk, Recompute, CatchUp, Round)  # a round comes when no rank has other work before it


class Agreed(NamedTuple):
    """One work per rank, as the ranks do it."""

    works: list[OwnWork | None]  # None: no other rank waits for this one
    lens: tuple[int, ...]  # rows of each rank in the target's forward, padding included; zeros if there is no forward


def largest_shape(shapes: Iterable[DraftShape]) -> DraftShape:
    """Return the shape with most steps: that of a round of ranks which want these shapes."""
    return max(shapes, key=lambda shape: shape.num_steps, default=NO_DRAFTS)


def next_works(queues: Sequence[deque[RoundWork]]) -> list[RoundWork | None]:
    """Take the next works of one kind from the queues of all ranks, at most one from each. All ranks get their rounds
    at once, after all other work that is before them."""
    kinds = {type(queue[0]) for queue in queues if queue}
    kind = next((each for each in _ORDER if each in kinds), None)
    return [queue.popleft() if queue and type(queue[0]) is kind else None for queue in queues]


def agree(
    works: Sequence[OwnWork | None], buckets: Sequence[int] = (), prompts: PromptSizes = NO_PROMPT_SIZES
) -> Agreed:
    """Return the works that the ranks do instead of `works`, which are of one kind. `buckets`: batch sizes that every
    rank has, rising. `prompts`: the chunks for which every rank has graphs.

    If one rank drafts, all sequences of the round must be known to the drafter, so call `Rounds.submit` of each rank
    with the `largest_shape`."""
    present = [work for work in works if work is not None]
    kinds = {type(work) for work in present}
    assert len(kinds) <= 1, f"ranks that do unlike works at once never meet in a collective operation: {kinds}"
    if not present or isinstance(present[0], LoadSlot | Forget):
        return Agreed(list(works), (0,) * len(works))
    if isinstance(present[0], Round):
        rounds = _agree_rounds([_or_idle_round(work) for work in works])
        num_seqs = (_padded(work, buckets) for work in rounds)
        return Agreed(
            list(rounds), tuple(num * (work.shape.num_drafts + 1) for num, work in zip(num_seqs, rounds, strict=True))
        )
    if isinstance(present[0], CatchUp):
        return Agreed(list(_agree_catch_ups([_or_idle_catch_up(work) for work in works])), (0,) * len(works))
    idle = Chunk([], []) if isinstance(present[0], Chunk) else Recompute([], [])
    agreed = [idle if work is None else work for work in works]
    sizes = [prompts.holding(_rows(work)) for work in agreed]
    largest = max((size for size in sizes if size is not None), default=0)
    lens = tuple(_num_tokens(work) if None in sizes else largest for work in agreed)
    return Agreed(list(agreed), lens)


def widened(work: Round, shape: DraftShape) -> Round:
    """Return the same round with drafts of `shape`, of which each sequence accepts no more than before."""
    if work.shape == shape:
        return work
    num_more = shape.num_steps - work.shape.num_steps
    return replace(
        work,
        shape=shape,
        limits=[min(limit, work.shape.num_steps) for limit in work.limits],
        proposed=[[*drafts, *[drafts[-1]] * num_more] for drafts in work.proposed],
    )


def _agree_rounds(rounds: Sequence[Round]) -> list[Round]:
    shape, live = largest_shape(work.shape for work in rounds), [work for work in rounds if work.slots]
    assert all(bool(work.shape.num_steps) == bool(shape.num_steps) for work in live), (
        f"some ranks draft {shape.num_steps} steps, and others leave rows out: {[work.shape for work in live]}"
    )
    assert not any(work.beside for work in rounds), "a chunk is work of its own"
    needs, most = Needs.any_of(work.needs for work in rounds), max(len(work.slots) for work in rounds)
    return [replace(widened(work, shape), needs=needs, least_seqs=most) for work in rounds]


def _agree_catch_ups(works: Sequence[CatchUp]) -> list[CatchUp]:
    """More rows than a sequence lacks are padding. So a work of one row, which no sequence of it lacks more than, may
    have as many as another."""
    num_rows = max(work.num_rows for work in works)
    assert all(work.num_rows == num_rows or max(work.num_missed, default=0) <= 1 for work in works), works
    needs, most = Needs.any_of(work.needs for work in works), max(len(work.slots) for work in works)
    return [replace(work, num_rows=num_rows, needs=needs, least_seqs=most) for work in works]


def _or_idle_round(work: OwnWork | None) -> Round:
    assert work is None or isinstance(work, Round)
    return work or Round([], [], [], [], [], NO_DRAFTS, Needs(), [])


def _or_idle_catch_up(work: OwnWork | None) -> CatchUp:
    assert work is None or isinstance(work, CatchUp)
    return work or CatchUp([], [], [], [], [], catch_up_sizes(NO_DRAFTS)[0], Needs())


def _padded(work: Round, buckets: Sequence[int]) -> int:
    """Return the number of sequences of a round with padding."""
    return next((size for size in buckets if size >= max(len(work.slots), work.least_seqs)), len(work.slots))


def _rows(work: OwnWork) -> list[BatchRow]:
    if isinstance(work, Chunk):
        return [each.row for each in work.rows]
    assert isinstance(work, Recompute)
    return list(work.rows)


def _num_tokens(work: OwnWork) -> int:
    return sum(len(row.input_ids) for row in _rows(work))
