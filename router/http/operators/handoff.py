"""GET /debug/handoff: the contents of a handoff for each group of nodes, from the schema that its nodes agreed on."""

from __future__ import annotations

from typing import Literal, get_args

from aiohttp import web

from ....metadata.errors import RequestError
from ....metadata.handoff.schema.kv_layout import KvLayout
from ....metadata.handoff.schema.schema import (
    ROW_KINDS,
    RowKind,
    blocks_per_page,
    field_bytes,
    further_pools,
    handoff_bytes,
    layer_words,
    page_bytes,
    pool_words,
    row_bytes,
)
from ....metadata.wire.node_info import FurtherPool, HandoffSchema, PoolLayout, RowField
from ...nodes.node import NodeGroup
from ..server.api import Api, json_response
from .admin_types import HandoffAnswer, HandoffField, HandoffGroup, NodesOfRoles, PromptBytes

PROMPT_LENS = (128, 1024, 8192)  # tokens
Format = Literal["json", "text"]


async def handoff(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /debug/handoff: JSON, or text with ?format=text. Raises RequestError for another format."""
    wanted = http_request.query.get("format", "json")
    if wanted not in get_args(Format):
        raise RequestError(f"format: {wanted!r} is none of {', '.join(get_args(Format))}", param="format")
    groups = [_group(group) for group in api.dispatcher.registry.groups.values() if group.nodes]
    if wanted == "json":
        return json_response(HandoffAnswer(groups))
    texts = ["\n".join(group.words) for group in groups] or ["no node has joined"]
    return web.Response(text="\n\n".join(texts) + "\n")


def _group(group: NodeGroup) -> HandoffGroup:
    schema = group.layout
    prefill, decode = (
        sorted(node.node_id for node in group.nodes.values() if node.role == role) for role in ("prefill", "decode")
    )
    row = [_field(field) for field in schema.row]
    requests = [_prompt_bytes(schema, prompt_len) for prompt_len in PROMPT_LENS]
    name = f"model {group.key.model}, algorithm {schema.algorithm}, {schema.page_size} tokens a page"
    return HandoffGroup(
        model=group.key.model,
        nodes=NodesOfRoles(prefill, decode),
        schema=schema,
        schema_digest=group.key.schema_digest,
        page_bytes=page_bytes(schema),
        row_bytes=row_bytes(schema),
        row=row,
        requests=requests,
        words=[
            f"{name}; prefill {', '.join(prefill) or 'none yet'}; decode {', '.join(decode) or 'none yet'}",
            *_page_words(schema),
            f"metadata row: {row_bytes(schema):,} bytes, one for each choice of a request, after the last page",
            *map(_field_words, row),
            "a request, one choice, of which decode has nothing cached:",
            *map(_prompt_words, requests),
        ],
    )


def _field(field: RowField) -> HandoffField:
    unknown = RowKind(field.name, "This router does not know the field.")  # from a node of a newer protocol
    kind = ROW_KINDS.get(field.name, unknown)
    return HandoffField(
        name=field.name,
        dtype=field.dtype,
        width=field.width,
        bytes=field_bytes(field),
        writer=kind.writer,
        reader=kind.reader,
        meaning=kind.meaning,
    )


def _prompt_bytes(schema: HandoffSchema, prompt_len: int) -> PromptBytes:
    moved = handoff_bytes(schema, prompt_len)
    return PromptBytes(prompt_tokens=prompt_len, **moved._asdict(), total=moved.total)


def _page_words(schema: HandoffSchema) -> list[str]:
    draft, key = _pool_words(schema.draft, schema.page_size), "its own tokens"
    if schema.frozen_layers:
        draft += f"; the drafter attends to KV of target layers {layer_words(schema.frozen_layers)}"
    if schema.key_lookahead:
        following = "one" if schema.key_lookahead == 1 else str(schema.key_lookahead)
        key += f" and the next {following}, on which draft KV depends"
    further = further_pools(schema)
    of_all = " of all pools" if further else " of both" if schema.draft else ""
    num_blocks = blocks_per_page(schema)
    checksums = f"{num_blocks} checksums ({schema.checksum})" if num_blocks else "no checksum"
    return [
        f"target KV: {_pool_words(schema.target, schema.page_size)}",
        f"draft KV: {draft}",
        *(f"{name}: {_pool_words(pool, schema.page_size)}" for name, pool in further.items()),
        f"a page{of_all}: {page_bytes(schema):,} bytes, checked by {checksums}",
        f"prefix caches know a page by {key}",
    ]


def _pool_words(pool: PoolLayout | FurtherPool | None, page_size: int) -> str:
    if pool is None:
        return "none"
    return f"{pool_words(pool)}, {KvLayout.of(pool, page_size).page_bytes:,} bytes per page"


def _field_words(field: HandoffField) -> str:
    size = f"{field.width} x {field.dtype}, {field.bytes:,} bytes"
    return f"  {field.name}: {size}, {field.writer} writes, {field.reader} reads. {field.meaning}"


def _prompt_words(moved: PromptBytes) -> str:
    return (
        f"  {moved.prompt_tokens:,} tokens: {moved.total:,} bytes = target KV {moved.target_kv:,} + draft KV"
        f" {moved.draft_kv:,} + hidden state {moved.hidden_state:,} + rest of the row {moved.rest_of_row:,}"
    )
