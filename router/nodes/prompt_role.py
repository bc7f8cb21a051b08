"""The role that computes the prompts of a group: a prefill node (remote) or the decode node itself (local).

`place_prompt` follows the router's setting `local_prefill` and the facts of a group. It returns None if either role
may, so that the nodes are compared (placement/prompt_placement.py). Nodes report the times of their prompts, and the
group learns how far estimates that are made of them are off.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from ...metadata.estimate import Estimate, Fading

LocalPrefill = Literal["never", "auto", "always"]  # the values of --local-prefill
Where = Literal["remote", "local"]
Reason = Literal[
    "never",
    "always",
    "no prefill node",
    "no able decode node",
    # of `place_sooner`
    "sooner",  # the other role would bring the first two tokens later
    "streams would wait",  # a decode node would bring it sooner, at the cost of its streams
    "no room in the gap bound",
    "decode nodes full",
    "no ready decode node",
    "prefill nodes full",
    "no ready pair",
    "not measured",
]

LOST_S = 1.0  # without a prefill node or a working handoff, after a group has had one, until decode nodes compute
_ERROR_BOUNDS, _ERROR_HALF_LIFE_S = (0.5, 4.0), 20.0


class PromptPlace(NamedTuple):
    """The role that computes a prompt, and the reason. The times are estimates of `two_tokens_s`, None if the reason
    does not need them. `error`: the factor in that of this role."""

    where: Where
    reason: Reason
    remote_s: float | None = None
    local_s: float | None = None
    error: float = 1.0

    @property
    def expected_s(self) -> float | None:
        """The estimate of this role without the factor."""
        expected_s = self.remote_s if self.where == "remote" else self.local_s
        return None if expected_s is None else expected_s / self.error

    @property
    def words(self) -> str:
        """The reason as `baton explain` shows it; "" if nothing else was possible."""
        match self.reason:
            case "never":
                return ""
            case "always":
                return "the router has --local-prefill always"
            case "no prefill node":
                return "no prefill node is here"
            case "no able decode node":
                return "not every decode node here computes prompts"
            case "sooner":
                other, own_s, other_s = "a decode node", self.remote_s, self.local_s
                if self.where == "local":
                    other, own_s, other_s = "a prefill node", self.local_s, self.remote_s
                return f"the first two tokens come sooner: on average in {in_ms(own_s)}, by {other} in {in_ms(other_s)}"
            case "streams would wait":
                local = f"a decode node would bring the first two tokens sooner (on average in {in_ms(self.local_s)}"
                return f"{local}, by a prefill node in {in_ms(self.remote_s)}), but its streams would wait too long"
            case "no room in the gap bound":
                return "beside its streams no decode node has room for a prompt within --max-gap-ms"
            case "decode nodes full":
                return "no decode node has room for the sequence now"
            case "no ready decode node":
                return "no decode node is ready to compute this prompt"
            case "prefill nodes full":
                return "no prefill node takes the prompt now"
            case "no ready pair":
                return "no pair of a prefill and a decode node is ready"
            case "not measured":
                return "the times of prompts are not measured yet"

    @property
    def clause(self) -> str:
        """The role and the reason, as the span of a prompt shows them; "" if nothing else was possible."""
        return self.words and f"{self.where}, since {self.words}"


class GroupFacts(NamedTuple):
    """Facts about a group of nodes on which the placement of its prompts depends."""

    mode: LocalPrefill = "never"
    lacks_prefill: bool = False  # no prefill node has been there for a while
    decodes_compute: bool = False  # decode nodes are here, and all of them can compute prompts
    lacks_handoff: bool = False  # for a while, every pair of nodes has failed to hand pages over


class PromptTimes(NamedTuple):
    """Measured seconds of prompts on a node under its present load."""

    token_s: float = 0.0  # per token; 0: unknown
    fixed_s: float = 0.0  # per prompt, besides its tokens
    num_paced: int = 0  # tokens that `token_s` holds for, if more than these wait; 0: for all
    rest_token_s: float = 0.0  # per token beyond them

    @property
    def are_known(self) -> bool:
        return self.token_s > 0

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds until this many tokens are computed, those of earlier prompts included."""
        num_rest = max(0, num_tokens - self.num_paced) if self.num_paced else 0
        return self.fixed_s + (num_tokens - num_rest) * self.token_s + num_rest * self.rest_token_s


class EstimateError:
    """The factor by which estimates of a role must be multiplied to be right on average.

    Chunks take longer than a node expects if streams come meanwhile, and a router learns the load of a node late. While
    no answer comes, a factor above 1 goes back to 1, so a role that gets no prompts is tried again after some time."""

    def __init__(self) -> None:
        self._log = Estimate(0.0, memory=4, weight=3, fading=Fading(0.0, 0.0, _ERROR_HALF_LIFE_S))

    def factor(self, now: float) -> float:
        """Return the factor at a time (monotonic seconds)."""
        return math.exp(self._log.at(now))

    def observe(self, expected_s: float, actual_s: float, now: float) -> None:
        """The first two tokens came after `actual_s` on average; `expected_s` was the estimate without any factor. Many
        answers may come for prompts that were placed before the first of them: each says the same."""
        if expected_s > 0:
            least, most = _ERROR_BOUNDS
            self._log.observe(math.log(min(most, max(least, actual_s / expected_s))), now)


def place_prompt(facts: GroupFacts) -> PromptPlace | None:
    """Return the role that computes a prompt, None if both roles may and `place_sooner` compares them."""
    must_compute = facts.lacks_prefill or facts.lacks_handoff
    if facts.mode == "never" and not must_compute:
        return PromptPlace("remote", "never")
    if not facts.decodes_compute:
        return PromptPlace("remote", "no able decode node")
    if facts.mode == "auto" and not must_compute:
        return None
    if facts.lacks_prefill:
        return PromptPlace("local", "no prefill node")
    return PromptPlace("local", "no ready pair" if facts.lacks_handoff else "always")


def handoff_estimate() -> Estimate:
    """Return an estimate of the seconds from a prompt's end to the second token of its output, without one round. It is
    the median of the last handoffs, since a single one depends on where in a round its last page comes."""
    return Estimate(num_kept=15, quantile=0.5)


def patience_s(node_wait_s: float, *, had_prefill: bool) -> float:
    """Return how long a group is without a prefill node before decode nodes compute its prompts, although the setting
    is never or auto. Requests wait for `node_wait_s` before they end with an error. A group that never had a prefill
    node may be starting, so it waits longer."""
    return min(LOST_S, node_wait_s / 2) if had_prefill else node_wait_s / 2


def in_ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.1f} ms"
