"""The executor of a decode node, as the node sees it: work goes in, reports come out. Without torch.

    Rounds --LoadSlot, Recompute, CatchUp, Round--> Executor --RoundTokens, Scores--> Rounds

device_executor.py has the executor for this process's device, ranks/executor.py that for several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..pace.draft_length import DraftShape
from ..pace.mixed_sizes import MixedSizes
from ..progress import Progress
from ..state.tail_pages import Windows
from ..work import RoundTokens, RoundWork, Scores

if TYPE_CHECKING:
    from ...metadata.handoff.schema.buffers import Sampled
    from ..ranks.steps import GroupSteps


class HostProposer(Protocol):
    """A drafter that proposes on the host, from the tokens of sequences."""

    def lookup(self, slot: int, token_ids: Sequence[int], salt: str, num_steps: int) -> list[int]:
        """Return `num_steps` likely tokens after `token_ids`, which have grown since the slot's last lookup."""
        ...

    def replay(self, slot: int, token_ids: Sequence[int], salt: str, num_steps: int, num_tries: int) -> tuple[int, int]:
        """Compare drafts of `lookup` with the last of the tokens that have come since the slot's last lookup. Return
        the numbers of right drafts and of tries, at most about `num_tries`."""
        ...

    def forget(self, slot: int, token_ids: Sequence[int], salt: str) -> None:
        """Record that the slot's sequence is over. Others of the same salt may learn from its text."""
        ...


class Executor(Protocol):
    """Does work in the order of submission. One thread."""

    @property
    def num_slots(self) -> int:
        """Slots for sequences, 0 to num_slots - 1. Slot num_slots is padding's: no sequence is loaded there."""
        ...

    @property
    def shape(self) -> DraftShape:
        """The most that a round drafts; no steps without a drafter."""
        ...

    @property
    def keeps_missed_rows(self) -> bool:
        """Whether a round without drafts leaves out rows, on which the drafter catches up later."""
        ...

    @property
    def num_prompt_states(self) -> int:
        """Positions at the end of a prompt whose target states make the drafter's state. A local prompt computes them,
        also if their pages are in the prefix cache. 0: the drafter needs none."""
        ...

    @property
    def proposer(self) -> HostProposer | None:
        """The drafter, if it proposes on the host."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def windows(self) -> Windows:
        """How many positions the layers of target and drafter read back."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the host goes on, so that rounds may overlap."""
        ...

    @property
    def mixed_sizes(self) -> MixedSizes:
        """The rounds and chunks that share a forward. A chunk beside another round, and one that is scored, has a
        forward of its own."""
        ...

    @property
    def group_steps(self) -> GroupSteps | None:
        """The steps that this node takes together with the other ranks of its group; None: it takes none."""
        ...

    def warm_up(self, progress: Progress | None = None, *, expects_prompts: bool = False) -> None:
        """Compile kernels and capture graphs before service. `progress` counts the graphs of rounds.
        `expects_prompts`: also capture those of prompt chunks, alone and beside rounds."""
        ...

    def submit(self, work: RoundWork) -> None:
        """Ask the device for `work`. At most two rounds are not collected.

        Raises OutOfMemory if the device has no memory for it. Then the slots of a Round, a CatchUp or a LoadSlot hold
        no defined state: finish their sequences, or load them again. KV is as it was, but for the positions that the
        work was to write. The chunk beside a Round is computed all the same.

        Raises ChunkOutOfMemory if the device has no memory for the chunk beside a Round. Then the round is not under
        way, and all slots are as they were."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the oldest round that was not collected is computed. Does not wait."""
        ...

    def collect(self) -> RoundTokens:
        """Wait for the oldest round that was not collected, and return its report."""
        ...

    @property
    def num_chunks_ahead(self) -> int:
        """How many Recomputes are submitted and not yet computed. Does not wait."""
        ...

    def collect_scores(self) -> Scores:
        """Wait for the last Recompute, which had scored tokens, and return its report, once."""
        ...

    def read_row(self, row: bytes) -> Sampled:
        """Return the first token of a metadata row. Raises ProtocolError if a peer's row cannot be used."""
        ...

    def expect(self, grammar: str) -> None:
        """Prepare for a request with this grammar, without waiting."""
        ...
