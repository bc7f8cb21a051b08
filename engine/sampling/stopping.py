"""The end of a choice on a node: by token ids, max_tokens or context. Only the router stops on strings: it has text."""

from __future__ import annotations

from ...metadata.wire.request import Ended
from .state import SamplingState


def ended(state: SamplingState, token_id: int, context_len: int, num_cached: int) -> Ended | None:
    """Return the end of the choice if `token_id`, just appended to `state`, is its last token; else None. `num_cached`
    goes into the totals."""
    params = state.params
    is_stop = token_id in params.stop_ids
    if not is_stop and state.num_generated < params.max_tokens and state.position < context_len:
        return None
    return Ended(
        reason="stop" if is_stop else "length",
        stop_id=token_id if is_stop else None,
        num_prompt=state.prompt_len,
        num_generated=state.num_generated,
        num_cached=num_cached,
    )
