"""The handoff's wire layout, made from the joint configuration of target, draft and algorithm (DESIGN 1.2, 4).

Both nodes build a `HandoffSchema`, compare it when they meet (`differences`) and size every buffer of the handoff
from it: pages, checksums and metadata rows. Imports no torch: the router uses it to group nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from .errors import ConfigError
from .node_info import HandoffSchema, PoolLayout, RowField
from .request import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from .hidden_layout import HiddenLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
ALGORITHMS = ("none", "ngram", "standalone", "eagle", "eagle3", "mtp", "frozen_kv_mtp")
WITH_DRAFT_POOL = ("standalone", "eagle", "eagle3", "mtp")


def make_schema(
    target: PoolLayout,
    draft: PoolLayout | None = None,
    page_size: int = 16,
    algorithm: str = "none",
    hidden: HiddenLayout | None = None,
    *,
    draft_topk: int = 0,
    draft_rows: int = 1,
    ranks_trees: bool = False,
    checksums: bool = True,
) -> HandoffSchema:
    """The schema of one pairing.

    `draft_topk` proposals are handed over for each of `draft_rows` rows (n-layer MTP has n), 0 for none; their scores
    only where `ranks_trees`. Several MTP layers hand their state on within a row, if at all, so none travels. Raises
    ConfigError when the parts do not belong together.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm {algorithm!r} is unknown; known are {', '.join(ALGORITHMS)}")
    if (draft is not None) != (algorithm in WITH_DRAFT_POOL):
        raise ConfigError(
            f"algorithm {algorithm!r} {'hands over' if draft is None else 'has no'} draft KV pages, "
            f"but the draft pool is {'absent' if draft is None else _pool_words(draft)}"
        )
    if hidden is not None and hidden.algorithm != algorithm:
        raise ConfigError(f"hidden layout is of algorithm {hidden.algorithm!r}, the schema of {algorithm!r}")
    fields = _sampled_fields() + _draft_fields(hidden, draft_topk * draft_rows, ranks_trees)
    return HandoffSchema(
        algorithm=algorithm,
        page_size=page_size,
        target=target,
        draft=draft,
        row=tuple(fields),
        key_lookahead=_key_lookahead(algorithm, hidden),
        checksum="xxh3_64" if checksums else "none",
    )


def pools(schema: HandoffSchema) -> tuple[PoolLayout, ...]:
    """The KV pools in wire order: target, then draft where there is one."""
    return (schema.target,) if schema.draft is None else (schema.target, schema.draft)


def block_bytes(layout: PoolLayout, page_size: int) -> int:
    """Bytes of one checksummed block: one kv head's K or V of one layer of a page, [page_size, head_dim]."""
    return page_size * layout.head_dim * DTYPE_BYTES[layout.dtype]


def page_layer_bytes(layout: PoolLayout, page_size: int) -> int:
    """Bytes of one layer of one page, [2, num_kv_heads, page_size, head_dim], contiguous."""
    return 2 * layout.num_kv_heads * block_bytes(layout, page_size)


def page_bytes(schema: HandoffSchema) -> int:
    """Bytes of one page number over all layers of all pools: what crosses the link for it."""
    return sum(pool.num_layers * page_layer_bytes(pool, schema.page_size) for pool in pools(schema))


def blocks_per_page(schema: HandoffSchema) -> int:
    """Checksums of one page: one a (layer, K|V, kv head), target then draft; 0 when the schema has no checksums."""
    if schema.checksum == "none":
        return 0
    return sum(pool.num_layers * 2 * pool.num_kv_heads for pool in pools(schema))


def row_bytes(schema: HandoffSchema) -> int:
    """Bytes of one metadata row, its fields packed without gaps in declared order."""
    return sum(field.width * DTYPE_BYTES[field.dtype] for field in schema.row)


def differences(here: HandoffSchema, there: HandoffSchema) -> list[str]:
    """What differs, one phrase a field naming both values ("page_size: 16 here, 32 there"); empty when equal."""
    ours, theirs = _flat(here), _flat(there)
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name}: {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def describe(schema: HandoffSchema) -> str:
    """The schema in one line of words, for logs."""
    words = [f"algorithm {schema.algorithm}", f"page_size {schema.page_size}", f"target {_pool_words(schema.target)}"]
    if schema.draft is not None:
        words.append(f"draft {_pool_words(schema.draft)}")
    words.append(f"{page_bytes(schema)} bytes a page, {row_bytes(schema)} a row, checksum {schema.checksum}")
    return ", ".join(words)


def digest(schema: HandoffSchema) -> str:
    """A short name of the layout: equal exactly for equal schemas."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(schema))


def _sampled_fields() -> list[RowField]:
    return [
        RowField(name="first_token", dtype="int32", width=1),
        RowField(name="num_cached", dtype="int32", width=1),  # prompt tokens found in prefill's prefix cache
        # columns of `logprobs` that hold values: 0 none, 1 the sampled token's, 1 + k with the k most likely
        RowField(name="num_logprobs", dtype="int32", width=1),
        RowField(name="logprobs", dtype="float32", width=1 + MAX_TOP_LOGPROBS),
        RowField(name="top_ids", dtype="int32", width=MAX_TOP_LOGPROBS),
    ]


def _draft_fields(hidden: HiddenLayout | None, num_proposals: int, ranks_trees: bool) -> list[RowField]:
    fields: list[RowField] = []
    if num_proposals:
        fields.append(RowField(name="topk_index", dtype="int32", width=num_proposals))
    if num_proposals and ranks_trees:
        fields.append(RowField(name="topk_score", dtype="float32", width=num_proposals))
    recurrent = hidden.spec("recurrent") if hidden is not None else None
    if hidden is not None and recurrent is not None and not hidden.num_target_rows:
        fields.append(RowField(name="recurrent_hidden", dtype=recurrent.dtype, width=recurrent.width))
    extend = hidden.spec("extend") if hidden is not None else None
    if hidden is not None and extend is not None and hidden.num_target_rows:
        width = hidden.num_target_rows * extend.width
        fields.append(RowField(name="target_rows", dtype=extend.dtype, width=width))
    return fields


def _key_lookahead(algorithm: str, hidden: HiddenLayout | None) -> int:
    """Shifted drafters' KV at i depends on the next token, n-layer MTP's on the next n."""
    if algorithm == "mtp":
        return 1 if hidden is None else hidden.num_target_rows + 1
    return 1 if algorithm in ("eagle", "eagle3") else 0


def _pool_words(pool: PoolLayout) -> str:
    return f"{pool.num_layers} layers x {pool.num_kv_heads} kv heads x {pool.head_dim} {pool.dtype}"


def _flat(schema: HandoffSchema) -> dict[str, Any]:
    """Dotted field names and their values."""
    flat: dict[str, Any] = {
        "algorithm": schema.algorithm,
        "page_size": schema.page_size,
        "key_lookahead": schema.key_lookahead,
        "checksum": schema.checksum,
    }
    for name, pool in (("target", schema.target), ("draft", schema.draft)):
        if pool is not None:
            flat |= {f"{name}.{key}": value for key, value in msgspec.structs.asdict(pool).items()}
    flat["row order"] = " ".join(field.name for field in schema.row)
    flat |= {f"row.{field.name}": f"{field.width} x {field.dtype}" for field in schema.row}
    return flat
