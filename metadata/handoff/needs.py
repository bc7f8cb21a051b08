"""Pages that a request takes of a node's pool. Nodes reserve them, and the router counts on it.

prefill   the pages of all tokens that it computes. With n choices, the pages whose draft KV depends on the sampled
          token are there n times
decode    the same tokens and room for two rounds, but nothing beyond its context

The router does not know how much a node drafts. It counts two rounds without drafts, the least that a node reserves.
A node that is empty has room for its drafts too, because its pool holds its whole context.
"""

from __future__ import annotations

PLAIN_ROUNDS_LEN = 2  # tokens of two rounds without drafts: one is generated in each


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def prefill_pages(num_tokens: int, num_choices: int, page_size: int, lookahead: int) -> int:
    """Pages that a prefill node takes for a prompt that it hands over `num_choices` times. `lookahead`: sampled tokens
    on which a position's draft KV depends (the schema's `key_lookahead`)."""
    num_pages = pages_of(num_tokens, page_size)
    return num_pages + max(0, num_choices - 1) * (num_pages - shared_pages(num_tokens, page_size, lookahead))


def shared_pages(num_tokens: int, page_size: int, lookahead: int) -> int:
    """Pages of a prompt that are the same for all choices."""
    return max(0, num_tokens - lookahead) // page_size if lookahead else pages_of(num_tokens, page_size)


def decode_len(num_tokens: int, rounds_len: int, context_len: int) -> int:
    """Tokens for which a decode node takes pages when it reserves. `rounds_len`: what two rounds add at most."""
    return max(num_tokens, min(num_tokens + rounds_len, context_len))
