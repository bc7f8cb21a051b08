"""A prefill and a decode node in one thread that time themselves, and a judge of ties.

bench_speculation.py uses them. The nodes are those of tests/support/nodes/node_pair.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from node_pair import NodePair, params
from ties import TIE_BOUND

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import tie_gap
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.metadata.handoff.schema.schema import HandoffBytes, handoff_bytes
from baton.metadata.wire.request import SamplingParams

NUM_PAGES = 1536  # 64 streams of 256 tokens and the slots of their drafts
TIMEOUT_S = 300.0


class Case(NamedTuple):
    """A drafter with the flags that select it."""

    name: str
    model: Path
    settings: dict[str, Any]  # of both nodes


class Rounds(NamedTuple):
    """The rounds of one stream in which all K drafts could be accepted: not the last ones before max_tokens."""

    count: int = 0
    num_accepted: int = 0


class Run(NamedTuple):
    """The outputs and times of a decode node for some requests."""

    outputs: list[list[int]]
    rounds: list[Rounds]
    seconds: float  # in steps of the decode node that ran a round
    steps: Sequence[int] = ()  # K of each round

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the first ones, which prefill samples."""
        return sum(len(output) - 1 for output in self.outputs)


class Handoff(NamedTuple):
    """The time from a prompt's first token, known to the host, to the call of decode's first round."""

    prefill_s: float  # draft extend, checksums, metadata row
    decode_s: float  # pull, check, adopt, admit, and the messages between

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class TimedPair(NodePair):
    """A prefill and a decode node whose decode steps are timed.

    The decode node has no prefix cache: every prompt is handed over whole. The prefill node has one, so repeated
    prompts cost little time; `hand_over` needs new prompts.
    """

    def __init__(self, model: Path, *, is_adaptive: bool = False, **settings: Any) -> None:
        """`settings`: settings of both nodes, among them device, dtype and threads."""
        self._num_requests = 0
        self._rounds: dict[str, Rounds] = {}  # by rid
        self._steps: list[int] = []
        self._has_run = False
        self._decode_s = self._sampled_at = self._prefilled_at = self._round_at = 0.0
        both = {"num_pages": NUM_PAGES, **settings}
        super().__init__(model, prefill=both, decode=both | {"prefix_cache": False}, is_adaptive=is_adaptive)
        self._watch()
        self.step()  # both nodes hear that they are welcome

    def generate(self, prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams], num_streams: int) -> Run:
        """Generate for all prompts, `num_streams` at a time."""
        total = Run([], [], 0.0)
        for start in range(0, len(prompts), num_streams):
            part = slice(start, start + num_streams)
            run = self._generate(prompts[part], each[part])
            outputs, rounds = total.outputs + run.outputs, total.rounds + run.rounds
            total = Run(outputs, rounds, total.seconds + run.seconds, (*total.steps, *run.steps))
        return total

    def hand_over(self, prompt: Sequence[int]) -> Handoff:
        """Hand over one request alone. Its prompt must differ from all earlier ones."""
        self._round_at = 0.0
        self._generate([prompt], [params(8)])
        return Handoff(self._prefilled_at - self._sampled_at, self._round_at - self._prefilled_at)

    @property
    def num_steps(self) -> int:
        """K, the most drafts of a round."""
        return self.decode.rounds.shape.num_steps

    def handoff_bytes(self, prompt_len: int) -> HandoffBytes:
        return handoff_bytes(self.decode.executor.engine.schema, prompt_len)

    def step(self) -> None:
        """Step as the base class does, and take the time of the decode node."""
        sampled_at = self._sampled_at
        self.prefill.step()
        if self._sampled_at != sampled_at:
            self._prefilled_at = time.perf_counter()
        self._receive()
        self._has_run, started = False, time.perf_counter()
        self.decode.step()
        if self._has_run:
            self._decode_s += time.perf_counter() - started
        self._receive()
        self._dispatch()

    def _generate(self, prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams]) -> Run:
        self._receive()  # the nodes' beats, while another pair ran: answered before silence is noticed
        time.sleep(0.01)
        rids: list[str] = []
        for prompt, one in zip(prompts, each, strict=True):
            rids.append(f"r{self._num_requests}")
            self._num_requests += 1
            self.submit(rids[-1], prompt, one)
        self._decode_s = 0.0
        self._rounds, self._steps = dict.fromkeys(rids, Rounds()), []
        self.run(TIMEOUT_S)
        results = [self.results[rid, 0] for rid in rids]
        self.results.clear()
        assert all(result.ended is not None for result in results), [result.failed for result in results]
        rounds = [self._rounds[rid] for rid in rids]
        return Run([result.ids for result in results], rounds, self._decode_s, self._steps)

    def _watch(self) -> None:
        sample, rounds = self.prefill.prompts.engine.sample, self.decode.rounds
        submit, collect = rounds.submit, rounds.collect

        def sample_and_stamp(*args: Any) -> Any:
            result = sample(*args)
            self._sampled_at = time.perf_counter()
            return result

        def stamp_and_submit(sequences: Any, shape: Any, *rest: Any) -> Any:
            self._has_run = True
            self._round_at = self._round_at or time.perf_counter()
            self._steps.append(shape.num_steps)
            return submit(sequences, shape, *rest)

        def collect_and_count(submitted: Any) -> Any:
            results = collect(submitted)
            for sequence, result in zip(submitted.sequences, results.rows, strict=True):
                if result is not None and 0 < result.num_drafted == self.num_steps:
                    count, num_accepted = self._rounds[sequence.unit.rid]
                    self._rounds[sequence.unit.rid] = Rounds(count + 1, num_accepted + result.num_accepted)
            return results

        self.prefill.prompts.engine.sample = sample_and_stamp
        rounds.submit, rounds.collect = stamp_and_submit, collect_and_count


class Differences(NamedTuple):
    """Differences between streams that should be equal."""

    num_streams: int
    num_differing: int
    num_beyond_ties: int  # where the target's two best scores are further apart than the bound of promise P1

    @classmethod
    def sum(cls, parts: Iterable[Differences]) -> Differences:
        return cls(*map(sum, zip(*parts, strict=True)))


class Judge:
    """Decides whether outputs differ because the target itself was at a tie, with an engine that has no drafter."""

    def __init__(self, model: Path, **settings: Any) -> None:
        """`settings`: device, dtype and threads."""
        self._engine = Engine(
            EngineConfig(model=str(model), num_pages=256, prefix_cache=False, speculative="none", **settings)
        )

    def compare(
        self, prompts: Sequence[list[int]], each: Sequence[SamplingParams], run: Run, reference: Run
    ) -> Differences:
        """Compare `run` with `reference`, stream by stream, up to the first difference."""
        gaps = [
            self._gap(prompt, one, theirs, ours)
            for prompt, one, ours, theirs in zip(prompts, each, run.outputs, reference.outputs, strict=True)
        ]
        differing = [gap for gap in gaps if gap is not None]
        bound = TIE_BOUND[self._engine.dtype_name]
        return Differences(len(gaps), len(differing), sum(gap >= bound for gap in differing))

    def _gap(self, prompt: list[int], one: SamplingParams, theirs: list[int], ours: list[int]) -> float | None:
        """Return the gap between the two best scores where the outputs part, or None if they are equal."""
        if ours == theirs:
            return None
        assert len(ours) == len(theirs), (len(ours), len(theirs))
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        engine, ids = self._engine, [*prompt, *theirs[:at]]
        pages = engine.pool.allocate(-(-len(ids) // engine.pool.page_size), Owner.REQUEST)
        logits = engine.forward([BatchRow(ids, 0, pages)])
        engine.pool.release(pages)
        vocab_size, device = engine.model_config.vocab_size, engine.device
        state = SamplingState(one, prompt, theirs[:at], vocab_size=vocab_size)
        return float(tie_gap(logits, SamplingBatch.of([state], device)))
