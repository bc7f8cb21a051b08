"""Sessions: the id of a conversation, as clients and gateways send it. Its requests prefer the same nodes."""

from __future__ import annotations

from collections.abc import Mapping

MAX_ID = 256  # characters; a longer id is no id

# The first that is there counts.
HEADERS = (
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-smg-routing-key",
    "x-litellm-session-id",
    "x-grok-conv-id",
    "session-id",
    "session_id",
)


def session_id(headers: Mapping[str, str], prompt_cache_key: str | None) -> str | None:
    """Return the session of a request: a header's, else the body's `prompt_cache_key`. None if there is none."""
    for name in HEADERS:
        given = headers.get(name, "").strip()
        if given:
            return given if len(given) <= MAX_ID else None
    return prompt_cache_key if prompt_cache_key and len(prompt_cache_key) <= MAX_ID else None
