"""Number of pages that a request needs in a node's pool. The nodes reserve them, and the router counts with the same
functions.

    prefill   the pages of all tokens that it computes. With n choices, pages whose draft KV depends on the sampled
              token exist n times
    decode    the same tokens and room for two rounds, but nothing beyond the model's context

The router does not know how many tokens a node drafts. It counts two rounds without drafts, the least that a node
reserves. An empty node has room for its drafts too, because its pool holds its whole context.
"""

from __future__ import annotations

PLAIN_ROUNDS_LEN = 2  # tokens of two rounds without drafts: one is generated in each


def pages_of(num_tokens: int, page_size: int) -> int:
    """Return how many pages hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def prefill_pages(num_tokens: int, num_choices: int, page_size: int, lookahead: int) -> int:
    """Return how many pages a prefill node needs for a prompt that it hands over `num_choices` times. `lookahead` is
    the number of sampled tokens on which a position's draft KV depends (the schema's `key_lookahead`)."""
    num_pages = pages_of(num_tokens, page_size)
    return num_pages + max(0, num_choices - 1) * (num_pages - shared_pages(num_tokens, page_size, lookahead))


def shared_pages(num_tokens: int, page_size: int, lookahead: int) -> int:
    """Return how many pages of a prompt are the same for all choices."""
    return max(0, num_tokens - lookahead) // page_size if lookahead else pages_of(num_tokens, page_size)


def decode_len(num_tokens: int, rounds_len: int, context_len: int) -> int:
    """Return the number of tokens for which a decode node reserves pages. `rounds_len` is the most that two rounds
    add."""
    return max(num_tokens, min(num_tokens + rounds_len, context_len))
