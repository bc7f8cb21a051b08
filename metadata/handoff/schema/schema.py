"""The layout of a handoff: pages, checksums and metadata rows, made from the configuration of target, draft and
algorithm.

Both nodes build a `HandoffSchema`, compare it when they meet (`differences`), and size every buffer of the handoff from
it. Imports no torch, because the router groups nodes by it.

The number of pages that a request needs in a node's pool follows from the same layout. The nodes reserve them, and the
router counts with the same functions:

    prefill   the pages of all tokens that it computes. With n choices, pages whose draft KV depends on the sampled
              token exist n times
    decode    the same tokens and room for two rounds, but nothing beyond the model's context

The router does not know how many tokens a node drafts. It counts two rounds without drafts, the least that a node
reserves. An empty node has room for its drafts too, because its pool holds its whole context.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import xxhash

from ...errors import ConfigError
from ...wire.node_info import MAX_FROZEN_LAYERS, FurtherPool, HandoffSchema, PoolLayout, Role, RowField
from ...wire.protocol import PROTOCOL_MIN, fields_since
from ...wire.request import MAX_TOP_LOGPROBS
from .kv_layout import DTYPE_BYTES, KvLayout, plane_words, planes_of, planes_words

if TYPE_CHECKING:
    from .hidden_layout import HiddenLayout

PLAIN_ROUNDS_LEN = 2  # tokens of two rounds without drafts: one is generated in each
CPU_CHECKSUM, GPU_CHECKSUM = "xxh3_64", "multilinear64"


class RowKind(NamedTuple):
    """A field that metadata rows can have, what it means, and which role writes and reads it. Its width comes from the
    configuration, and so does the dtype of hidden states."""

    name: str
    meaning: str
    is_hidden_state: bool = False
    writer: Role = "prefill"
    reader: Role = "decode"

    def field(self, dtype: Literal["int32", "float32", "bfloat16", "float16"], width: int) -> RowField:
        """Return the field as one configuration has it."""
        return RowField(name=self.name, dtype=dtype, width=width)


FIRST_TOKEN = RowKind("first_token", "The token sampled after the prompt, with which decode's first round begins.")
NUM_CACHED = RowKind("num_cached", "How many tokens of the prompt prefill found in its prefix cache.")
NUM_LOGPROBS = RowKind(
    "num_logprobs", "How many columns of logprobs hold values: 0 none, 1 the first token's, 1 + k with the k likeliest."
)
LOGPROBS = RowKind("logprobs", "The log-probability of the first token, then those of the likeliest tokens.")
TOP_IDS = RowKind("top_ids", "The ids of the likeliest tokens in place of the first one.")
TOPK_INDEX = RowKind("topk_index", "The ids that the drafter proposes after the first token, for decode's first round.")
TOPK_SCORE = RowKind("topk_score", "The scores of those proposals, by which the branches of a tree are ranked.")
RECURRENT_HIDDEN = RowKind(
    "recurrent_hidden",
    "The hidden state at the last position of the prompt, from which the drafter takes its next step.",
    is_hidden_state=True,
)
TARGET_ROWS = RowKind(
    "target_rows",
    "The target's hidden states at the last positions, from which MTP layers recompute KV that drafts had shaped.",
    is_hidden_state=True,
)
ROW_KINDS = {
    kind.name: kind
    for kind in (
        FIRST_TOKEN,
        NUM_CACHED,
        NUM_LOGPROBS,
        LOGPROBS,
        TOP_IDS,
        TOPK_INDEX,
        TOPK_SCORE,
        RECURRENT_HIDDEN,
        TARGET_ROWS,
    )
}


class HandoffBytes(NamedTuple):
    """Size of what one choice of a request hands over, in bytes: whole pages and one metadata row. Pages in the decode
    node's prefix cache are not moved and not counted, nor are checksums and the frames of messages."""

    target_kv: int
    draft_kv: int
    hidden_state: int
    rest_of_row: int

    @property
    def total(self) -> int:
        return sum(self)


def make_schema(
    target: PoolLayout,
    draft: PoolLayout | None = None,
    page_size: int = 16,
    algorithm: str = "none",
    hidden: HiddenLayout | None = None,
    *,
    key_lookahead: int = 0,
    draft_topk: int = 0,
    draft_rows: int = 1,
    ranks_trees: bool = False,
    frozen_layers: tuple[int, ...] = (),
    checksums: bool = True,
) -> HandoffSchema:
    """Return the schema of one pairing of target and draft.

    `draft` is the pool of the draft's own KV, if it has any. `key_lookahead` says on how many next tokens that KV at a
    position depends. `draft_topk` proposals are handed over for each of `draft_rows` rows (n-layer MTP has n), 0 for
    none; their scores only if `ranks_trees`. Several MTP layers pass their hidden state on within a row, if at all, so
    none is handed over. `frozen_layers` names, for each layer of a drafter without KV of its own, the target layer
    whose KV it attends to. Raises ConfigError if the parts do not belong together.
    """
    if hidden is not None and hidden.algorithm != algorithm:
        raise ConfigError(f"hidden layout is of algorithm {hidden.algorithm!r}, the schema of {algorithm!r}")
    if key_lookahead and draft is None:
        raise ConfigError(f"key_lookahead is {key_lookahead}, but algorithm {algorithm!r} has no draft KV pages")
    _check_frozen_layers(algorithm, target, draft, frozen_layers)
    fields = _sampled_fields() + _draft_fields(hidden, draft_topk * draft_rows, ranks_trees)
    return HandoffSchema(
        algorithm=wire_name(algorithm),
        page_size=page_size,
        target=target,
        draft=draft,
        row=tuple(fields),
        key_lookahead=key_lookahead,
        checksum=CPU_CHECKSUM if checksums else "none",
        frozen_layers=frozen_layers,
    )


def wire_name(algorithm: str) -> str:
    """Return the spelling of an algorithm's name in schemas and hellos: underscores for the flag's hyphens."""
    return algorithm.replace("-", "_")


def on_gpu(schema: HandoffSchema) -> HandoffSchema:
    """Return the schema of a node whose pools lie on a GPU, which computes other checksums
    (kernels/state/triton_pages.py)."""
    return schema if schema.checksum == "none" else msgspec.structs.replace(schema, checksum=GPU_CHECKSUM)


def pools(schema: HandoffSchema) -> dict[str, PoolLayout | FurtherPool]:
    """Return the pools by name, in wire order: "target", further pools of the target such as "target.index", then the
    same of the draft, if it has a pool. All without a window have the same page numbers. Pools with one have tail
    pages, whose numbers come behind the others."""
    named: dict[str, PoolLayout | FurtherPool] = {}
    for owner, pool in (("target", schema.target), ("draft", schema.draft)):
        if pool is not None:
            named[owner] = pool
            named |= {f"{owner}.{each.name}": each for each in pool.further}
    return named


def kv_layouts(schema: HandoffSchema) -> tuple[KvLayout, ...]:
    """Return the layouts of the pools in wire order."""
    return tuple(KvLayout.of(pool, schema.page_size) for pool in pools(schema).values())


def further_pools(schema: HandoffSchema) -> dict[str, FurtherPool]:
    """Return the pools beside those of KV, by name."""
    return {name: pool for name, pool in pools(schema).items() if isinstance(pool, FurtherPool)}


def are_tails(schema: HandoffSchema) -> tuple[bool, ...]:
    """Return, for each pool in wire order, whether it has tail pages."""
    return tuple(pool.window > 0 for pool in pools(schema).values())


def tail_window(schema: HandoffSchema) -> int:
    """Return how many positions layers with tail pages read back, their own included; 0: there are no such layers."""
    return max(pool.window for pool in pools(schema).values())


def tails_before(window: int, page_size: int) -> int:
    """Return how many tail pages hold what the token behind a whole page sees of layers with this window."""
    return pages_of(max(0, window - 1), page_size)


def tail_pages(schema: HandoffSchema, num_tokens: int) -> range:
    """Return the pages of tokens whose tail pages are handed over with a prompt: those that the next token sees. None
    if the schema has no tail pages."""
    window, page_size = tail_window(schema), schema.page_size
    return range(max(0, num_tokens - window + 1) // page_size, pages_of(num_tokens, page_size)) if window else range(0)


def needed_protocol(schema: HandoffSchema) -> int:
    """Return the oldest protocol in which peers learn of all pools."""
    return fields_since(PoolLayout)["further"] if further_pools(schema) else PROTOCOL_MIN


def page_bytes(schema: HandoffSchema, *, of_tails: bool = False) -> int:
    """Return the bytes of one page number over all layers of all pools that have it: what crosses the link for it.
    `of_tails`: of a tail page."""
    layouts = zip(kv_layouts(schema), are_tails(schema), strict=True)
    return sum(layout.page_bytes for layout, is_tail in layouts if is_tail == of_tails)


def blocks_per_page(schema: HandoffSchema) -> int:
    """Return the number of checksums of one page: one per (layer, plane, head), pool by pool; 0 if the schema has no
    checksums."""
    if schema.checksum == "none":
        return 0
    return sum(layout.num_layers * layout.blocks_per_layer for layout in kv_layouts(schema))


def row_bytes(schema: HandoffSchema) -> int:
    """Return the bytes of one metadata row, its fields packed without gaps in declared order."""
    return sum(field_bytes(field) for field in schema.row)


def field_bytes(field: RowField) -> int:
    """Return the bytes of one field of a metadata row."""
    return field.width * DTYPE_BYTES[field.dtype]


def handoff_bytes(schema: HandoffSchema, prompt_len: int) -> HandoffBytes:
    """Return what the handoff of a prompt of `prompt_len` tokens moves if the decode node has none of it cached."""
    num_pages, num_tails = pages_of(prompt_len, schema.page_size), len(tail_pages(schema, prompt_len))
    of_owner: dict[str, int] = {"target": 0, "draft": 0}
    for name, layout, is_tail in zip(pools(schema), kv_layouts(schema), are_tails(schema), strict=True):
        of_owner[name.partition(".")[0]] += (num_tails if is_tail else num_pages) * layout.page_bytes
    is_hidden = {name for name, kind in ROW_KINDS.items() if kind.is_hidden_state}
    hidden_state = sum(field_bytes(field) for field in schema.row if field.name in is_hidden)
    return HandoffBytes(
        target_kv=of_owner["target"],
        draft_kv=of_owner["draft"],
        hidden_state=hidden_state,
        rest_of_row=row_bytes(schema) - hidden_state,
    )


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


def differences(here: HandoffSchema, there: HandoffSchema) -> list[str]:
    """Return what differs, one phrase per field that names both values ("page_size: 16 here, 32 there"); empty if
    equal."""
    by_planes = {name for schema in (here, there) for name, pool in pools(schema).items() if pool.planes}
    ours, theirs = _flat(here, by_planes), _flat(there, by_planes)
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name}: {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def describe(schema: HandoffSchema) -> str:
    """Return the schema in one line of words, for logs."""
    words = [f"algorithm {schema.algorithm}", f"page_size {schema.page_size}"]
    words += [f"{name} {pool_words(pool)}" for name, pool in pools(schema).items()]
    if schema.frozen_layers:
        words.append(f"draft on KV of target layers {layer_words(schema.frozen_layers)}")
    words.append(f"{page_bytes(schema)} bytes per page, {row_bytes(schema)} per row, checksum {schema.checksum}")
    return ", ".join(words)


def pool_words(pool: PoolLayout | FurtherPool) -> str:
    """Return a pool's layout in words."""
    window = f" of {pool.window} positions" if pool.window else ""
    if isinstance(pool, FurtherPool) or pool.planes:
        rows = f", {pool.num_rows} rows per page" if isinstance(pool, FurtherPool) and pool.num_rows else ""
        return f"{pool.num_layers} layers x ({planes_words(pool.planes)}){window}{rows}"
    return f"{pool.num_layers} layers x {pool.num_kv_heads} kv heads x {pool.head_dim} {pool.dtype}{window}"


def layer_words(layers: Sequence[int]) -> str:
    """Return numbers of layers in words."""
    return ", ".join(str(layer) for layer in layers)


def digest(schema: HandoffSchema) -> str:
    """Return a short name of the layout. Two names are equal exactly if the schemas are equal."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(schema))


def _check_frozen_layers(algorithm: str, target: PoolLayout, draft: PoolLayout | None, layers: tuple[int, ...]) -> None:
    if layers and draft is not None:
        raise ConfigError(
            f"algorithm {algorithm!r} reads KV of target layers {layer_words(layers)}, so it has no draft KV pages,"
            f" but the draft pool is {pool_words(draft)}"
        )
    if len(layers) > MAX_FROZEN_LAYERS or not all(0 <= layer < target.num_layers for layer in layers):
        raise ConfigError(
            f"frozen_layers {layers}: name at most {MAX_FROZEN_LAYERS} of the layers 0 to {target.num_layers - 1}"
        )


def _sampled_fields() -> list[RowField]:
    return [
        FIRST_TOKEN.field("int32", 1),
        NUM_CACHED.field("int32", 1),
        NUM_LOGPROBS.field("int32", 1),
        LOGPROBS.field("float32", 1 + MAX_TOP_LOGPROBS),
        TOP_IDS.field("int32", MAX_TOP_LOGPROBS),
    ]


def _draft_fields(hidden: HiddenLayout | None, num_proposals: int, ranks_trees: bool) -> list[RowField]:
    fields: list[RowField] = []
    if num_proposals:
        fields.append(TOPK_INDEX.field("int32", num_proposals))
    if num_proposals and ranks_trees:
        fields.append(TOPK_SCORE.field("float32", num_proposals))
    recurrent = hidden.spec("recurrent") if hidden is not None else None
    if hidden is not None and recurrent is not None and not hidden.num_target_rows:
        fields.append(RECURRENT_HIDDEN.field(recurrent.dtype, recurrent.width))
    extend = hidden.spec("extend") if hidden is not None else None
    if hidden is not None and extend is not None and hidden.num_target_rows:
        fields.append(TARGET_ROWS.field(extend.dtype, hidden.num_target_rows * extend.width))
    return fields


def _flat(schema: HandoffSchema, by_planes: Collection[str]) -> dict[str, Any]:
    """Return the values by dotted field names. `by_planes`: names of pools that are described by their planes, which a
    pool of K and V need not list."""
    flat: dict[str, Any] = {
        "algorithm": schema.algorithm,
        "page_size": schema.page_size,
        "key_lookahead": schema.key_lookahead,
        "checksum": schema.checksum,
    }
    for name, pool in pools(schema).items():
        if isinstance(pool, FurtherPool):
            flat[name] = pool_words(pool)
            continue
        fields = msgspec.structs.asdict(pool)
        del fields["planes"], fields["further"]
        if not pool.window:
            del fields["window"]
        if name in by_planes:
            del fields["num_kv_heads"], fields["head_dim"]
            planes = planes_of(pool) if pool.planes or pool.num_kv_heads else ()  # an old node tells no planes
            fields |= {f"plane {index}": plane_words(plane) for index, plane in enumerate(planes)}
        flat |= {f"{name}.{key}": value for key, value in fields.items()}
    if schema.frozen_layers:
        flat["frozen_layers"] = layer_words(schema.frozen_layers)
    flat["row order"] = " ".join(field.name for field in schema.row)
    flat |= {f"row.{field.name}": f"{field.width} x {field.dtype}" for field in schema.row}
    return flat
