"""GET /debug/handoff: what a handoff holds, for each group of nodes, from the schema that they agreed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ...metadata.errors import RequestError
from ...metadata.handoff.schema import (
    ROW_KINDS,
    RowKind,
    blocks_per_page,
    field_bytes,
    handoff_bytes,
    layer_words,
    page_bytes,
    pool_page_bytes,
    pool_words,
    row_bytes,
)
from ...metadata.wire.node_info import HandoffSchema, PoolLayout, RowField
from ..node import Group

if TYPE_CHECKING:
    from .app import Api

PROMPT_LENS = (128, 1024, 8192)  # tokens


async def handoff(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /debug/handoff: JSON, or with ?format=text words alone. Raises RequestError for another format."""
    shape = http_request.query.get("format", "json")
    groups = [group for group in api.dispatcher.registry.groups.values() if group.nodes]
    if shape == "text":
        texts = ["\n".join(_words(group)) for group in groups] or ["no node has joined"]
        return web.Response(text="\n\n".join(texts) + "\n")
    if shape != "json":
        raise RequestError(f"format: {shape!r} is none of json, text", param="format")
    return web.json_response({"groups": [_json(group) for group in groups]})


def _json(group: Group) -> dict[str, Any]:
    layout = group.layout
    return {
        "model": group.key.model,
        "nodes": _nodes(group),
        "schema": msgspec.to_builtins(layout),
        "schema_digest": group.key.schema_digest,
        "page_bytes": page_bytes(layout),
        "row_bytes": row_bytes(layout),
        "row": [_field(field) for field in layout.row],
        "requests": [_request(layout, prompt_len) for prompt_len in PROMPT_LENS],
        "words": _words(group),
    }


def _nodes(group: Group) -> dict[str, list[str]]:
    return {
        role: sorted(node.node_id for node in group.nodes.values() if node.role == role)
        for role in ("prefill", "decode")
    }


def _field(field: RowField) -> dict[str, Any]:
    kind = _kind(field)
    return {
        "name": field.name,
        "dtype": field.dtype,
        "width": field.width,
        "bytes": field_bytes(field),
        "writer": kind.writer,
        "reader": kind.reader,
        "meaning": kind.meaning,
    }


def _kind(field: RowField) -> RowKind:
    """The field's declaration. Nodes of one protocol have the router's own; a field from elsewhere stops no page."""
    return ROW_KINDS.get(field.name) or RowKind(field.name, "This router does not know the field.")


def _request(layout: HandoffSchema, prompt_len: int) -> dict[str, int]:
    moved = handoff_bytes(layout, prompt_len)
    return {"prompt_tokens": prompt_len, **moved._asdict(), "total": moved.total}


def _words(group: Group) -> list[str]:
    """The schema in lines of words."""
    layout = group.layout
    nodes = "; ".join(f"{role} {', '.join(names) or 'none yet'}" for role, names in _nodes(group).items())
    return [
        f"model {group.key.model}, algorithm {layout.algorithm}, {layout.page_size} tokens a page; {nodes}",
        f"target KV: {_pool(layout.target, layout.page_size)}",
        f"draft KV: {_pool(layout.draft, layout.page_size)}{_frozen(layout)}",
        f"a page{' of both' if layout.draft else ''}: {page_bytes(layout):,} bytes, checked {_checksum(layout)}",
        f"prefix caches know a page by {_key(layout.key_lookahead)}",
        f"metadata row: {row_bytes(layout):,} bytes, one for each choice of a request, after the last page",
        *(f"  {_field_words(field)}" for field in layout.row),
        "a request, one choice, of which decode has nothing cached:",
        *(f"  {_request_words(layout, prompt_len)}" for prompt_len in PROMPT_LENS),
    ]


def _pool(pool: PoolLayout | None, page_size: int) -> str:
    return "none" if pool is None else f"{pool_words(pool)}, {pool_page_bytes(pool, page_size):,} bytes a page"


def _frozen(layout: HandoffSchema) -> str:
    if not layout.frozen_layers:
        return ""
    return f"; the drafter attends to KV of target layers {layer_words(layout.frozen_layers)}"


def _checksum(layout: HandoffSchema) -> str:
    num_blocks = blocks_per_page(layout)
    return f"by {num_blocks} checksums ({layout.checksum})" if num_blocks else "by no checksum"


def _key(lookahead: int) -> str:
    """DESIGN section 4, prefix keys: the KV of shifted drafters depends on tokens that come after the page."""
    match lookahead:
        case 0:
            return "its own tokens"
        case 1:
            return "its own tokens and the next one, on which draft KV depends"
        case _:
            return f"its own tokens and the next {lookahead}, on which draft KV depends"


def _field_words(field: RowField) -> str:
    kind = _kind(field)
    size = f"{field.width} x {field.dtype}, {field_bytes(field):,} bytes"
    return f"{field.name}: {size}, {kind.writer} writes, {kind.reader} reads. {kind.meaning}"


def _request_words(layout: HandoffSchema, prompt_len: int) -> str:
    moved = handoff_bytes(layout, prompt_len)
    return (
        f"{prompt_len:,} tokens: {moved.total:,} bytes = target KV {moved.target_kv:,} + draft KV {moved.draft_kv:,}"
        f" + hidden state {moved.hidden_state:,} + rest of the row {moved.rest_of_row:,}"
    )
