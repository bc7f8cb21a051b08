"""Prompt placement decides who computes the prompt of a request: a prefill node (remote) or the decode node (local).

The decision is a pure function of the router's setting `local_prefill` and of a few facts about the group of nodes. It
gives a reason, which `baton explain` shows and `/metrics` counts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LocalPrefill = Literal["never", "always"]  # the values of --local-prefill
Where = Literal["remote", "local"]
Reason = Literal["never", "always", "no prefill node", "no able decode node"]

LOST_S = 1.0  # without a prefill node, after a group has had one, until decode nodes compute its prompts


class PromptPlace(NamedTuple):
    """The role that computes a prompt, and the reason."""

    where: Where
    reason: Reason

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


class GroupFacts(NamedTuple):
    """Facts about a group of nodes on which the placement of its prompts depends."""

    mode: LocalPrefill = "never"
    lacks_prefill: bool = False  # no prefill node has been there for a while
    decodes_compute: bool = False  # decode nodes are here, and all of them can compute prompts


def place_prompt(facts: GroupFacts) -> PromptPlace:
    """Return the role that computes a prompt."""
    if facts.mode == "never" and not facts.lacks_prefill:
        return PromptPlace("remote", "never")
    if not facts.decodes_compute:
        return PromptPlace("remote", "no able decode node")
    return PromptPlace("local", "no prefill node" if facts.lacks_prefill else "always")


def patience_s(node_wait_s: float, *, had_prefill: bool) -> float:
    """Return how long a group is without a prefill node before decode nodes compute its prompts, although the setting
    is never. Requests wait for `node_wait_s` before they end with an error. A group that never had a prefill node may
    be starting, so it waits longer."""
    return min(LOST_S, node_wait_s / 2) if had_prefill else node_wait_s / 2
