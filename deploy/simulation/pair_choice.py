"""Pair choice decides for each request which node computes its prompt and which one generates, if every node has both
roles. No such node is built: this serves to find out by simulation how good it could be.

    price of a pair = first two tokens + STREAM_PRICE x (all tokens of the answer + waiting of streams for the prompt)

The first part is that of router/prompt_placement.py. The second counts what the whole answer takes on the node that
generates, beside the prompts which that computes, and for how long the streams of the node that computes wait in all.
So streams stay together on one node, and prompts go to the other, until rounds there take longer than on a node that
also computes prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...router.prompt_placement import LocalFigures

STREAM_PRICE = 1 / 20  # of a second for which one stream waits, in seconds until a first token
_MOST_PROMPT_SHARE = 0.95


class BothFigures(NamedTuple):
    """Figures of a node of both roles on which the price of a pair depends."""

    local: LocalFigures  # of the prompt, if this node computes it
    next_round_s: float  # of a round with this sequence
    prompt_share: float  # of its recent time, for which rounds waited for chunks of prompts
    chunk_token_s: float  # of a chunk of full length, without the round beside it

    @property
    def token_s(self) -> float:
        """Return the mean time between tokens of the sequence, if it is generated here."""
        return self.next_round_s / (1 - min(_MOST_PROMPT_SHARE, self.prompt_share))


class Pair(NamedTuple):
    """Indexes of the nodes of a request."""

    computes: int
    generates: int


def choose_pair(figures: Sequence[BothFigures], num_tokens: int, handoff_s: float) -> Pair | None:
    """Return the pair of the least price for an answer of `num_tokens`; of equal ones, one node for both. None: no node
    has room for the sequence. A node computes for another one if it would have room for the sequence, too, and there is
    more than one token. A handoff takes `handoff_s`, without one round."""
    able = [index for index, node in enumerate(figures) if not node.local.is_full]
    pairs = [Pair(one, other) for other in able for one in able if one == other or num_tokens > 1]
    return min(
        pairs,
        key=lambda pair: (
            _price_s(figures[pair.computes], figures[pair.generates], num_tokens, handoff_s),
            pair.computes != pair.generates,
        ),
        default=None,
    )


def _price_s(computes: BothFigures, generates: BothFigures, num_tokens: int, handoff_s: float) -> float:
    prompt = computes.local
    if computes is generates:
        two_tokens_s = prompt.two_tokens_s
    else:
        num_to_compute = prompt.num_queued_tokens + prompt.num_uncached_tokens
        two_tokens_s = prompt.times.seconds(num_to_compute) + (handoff_s + generates.local.round_s) / 2
    stall_s = prompt.num_running * prompt.num_uncached_tokens * min(computes.chunk_token_s, prompt.times.token_s)
    return two_tokens_s + STREAM_PRICE * (num_tokens * generates.token_s + stall_s)
