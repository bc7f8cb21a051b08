"""The schema of two configurations, its sizes, and the words for the differences between two schemas."""

from __future__ import annotations

import msgspec
import pytest
from imports import check_imports
from layouts import LOOKAHEAD
from layouts import make_layout as hidden

from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.schema import (
    CPU_CHECKSUM,
    FIRST_TOKEN,
    GPU_CHECKSUM,
    ROW_KINDS,
    blocks_per_page,
    describe,
    differences,
    digest,
    field_bytes,
    handoff_bytes,
    kv_layouts,
    make_schema,
    needed_protocol,
    on_gpu,
    page_bytes,
    pools,
    row_bytes,
    wire_name,
)
from baton.metadata.wire.node_info import MAX_FROZEN_LAYERS, FurtherPool, HandoffSchema, KvPlane, PoolLayout, RowField
from baton.metadata.wire.protocol import PROTOCOL_MIN
from baton.metadata.wire.request import MAX_TOP_LOGPROBS

TARGET = PoolLayout(num_layers=8, num_kv_heads=4, head_dim=32, dtype="float32")
DRAFT = PoolLayout(num_layers=1, num_kv_heads=2, head_dim=16, dtype="bfloat16")


def with_index(pool: PoolLayout, num_layers: int) -> PoolLayout:
    """Return the pool with one of keys of an indexer beside it."""
    index = FurtherPool("index", num_layers, (KvPlane("index", num_heads=1, head_dim=24, dtype="bfloat16"),))
    return msgspec.structs.replace(pool, further=(index,))


def names(schema) -> list[str]:
    return [field.name for field in schema.row]


PLAIN_FIELDS = ["first_token", "num_cached", "num_logprobs", "logprobs", "top_ids"]


@pytest.mark.parametrize(
    ("algorithm", "draft", "more", "extra_fields", "lookahead"),
    [
        ("none", None, {}, [], 0),
        ("ngram", None, {}, [], 0),
        ("standalone", DRAFT, {"draft_topk": 1}, ["topk_index"], 0),
        ("eagle", DRAFT, {"draft_topk": 4, "ranks_trees": True}, ["topk_index", "topk_score", "recurrent_hidden"], 1),
        ("eagle", DRAFT, {}, ["recurrent_hidden"], 1),
        ("eagle3", DRAFT, {"draft_topk": 4}, ["topk_index", "recurrent_hidden"], 1),
        ("frozen-kv-mtp", None, {"frozen_layers": (0, 7)}, ["recurrent_hidden"], 0),
    ],
)
def test_each_algorithm_has_its_row_fields(algorithm, draft, more, extra_fields, lookahead):
    schema = make_schema(
        TARGET, draft, 16, algorithm, hidden(algorithm), key_lookahead=LOOKAHEAD.get(algorithm, 0), **more
    )
    assert names(schema) == PLAIN_FIELDS + extra_fields
    assert schema.key_lookahead == lookahead
    assert schema.algorithm == wire_name(algorithm) and "-" not in schema.algorithm


@pytest.mark.parametrize("num_layers", [1, 3])
def test_mtp_hands_over_n_minus_one_target_rows_and_looks_n_tokens_ahead(num_layers):
    layout = hidden("mtp", num_target_rows=num_layers - 1)
    schema = make_schema(
        TARGET, DRAFT, 16, "mtp", layout, key_lookahead=num_layers, draft_topk=2, draft_rows=num_layers
    )
    widths = {field.name: field.width for field in schema.row}
    assert ("recurrent_hidden" in widths) == (num_layers == 1)  # several layers chain within a row
    assert widths.get("target_rows") == (None if num_layers == 1 else 2 * 64)
    assert widths["topk_index"] == 2 * num_layers
    assert schema.key_lookahead == num_layers


def test_the_sizes_of_pages_blocks_and_rows_follow_from_the_schema():
    plain, both = make_schema(TARGET, None, 16), make_schema(TARGET, DRAFT, 16, "standalone")
    assert [layout.page_layer_bytes for layout in kv_layouts(both)] == [2 * 4 * 16 * 32 * 4, 2 * 2 * 16 * 16 * 2]
    assert page_bytes(plain) == 8 * 16384
    assert page_bytes(both) == 8 * 16384 + 2 * 2 * 16 * 16 * 2
    assert (blocks_per_page(plain), blocks_per_page(both)) == (8 * 2 * 4, 8 * 2 * 4 + 2 * 2)
    assert blocks_per_page(make_schema(TARGET, None, 16, checksums=False)) == 0
    assert row_bytes(plain) == sum(4 * field.width for field in plain.row)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("int32", 4)])
def test_a_field_takes_the_bytes_of_its_numbers(dtype, num_bytes):
    field = FIRST_TOKEN.field(dtype, 7)
    assert field == RowField(name="first_token", dtype=dtype, width=7)
    assert field_bytes(field) == 7 * num_bytes


def test_pools_are_those_of_the_target_and_then_those_of_the_draft():
    assert pools(make_schema(TARGET)) == {"target": TARGET}
    assert pools(make_schema(TARGET, DRAFT, 16, "standalone")) == {"target": TARGET, "draft": DRAFT}
    target, draft = with_index(TARGET, 3), with_index(DRAFT, 1)
    named = pools(make_schema(target, draft, 16, "standalone"))
    assert list(named) == ["target", "target.index", "draft", "draft.index"]
    assert [pool.num_layers for pool in named.values()] == [8, 3, 1, 1]


def test_a_further_pool_counts_for_its_owner_in_every_size():
    plain = make_schema(TARGET, DRAFT, 16, "standalone")
    schema = make_schema(with_index(TARGET, 3), with_index(DRAFT, 1), 16, "standalone")
    index_bytes = 16 * 24 * 2  # of a layer
    assert page_bytes(schema) == page_bytes(plain) + 4 * index_bytes
    assert blocks_per_page(schema) == blocks_per_page(plain) + 4
    moved, before = handoff_bytes(schema, 33), handoff_bytes(plain, 33)
    assert (moved.target_kv - before.target_kv, moved.draft_kv - before.draft_kv) == (9 * index_bytes, 3 * index_bytes)
    assert "target.index 3 layers x (index: 1 heads x 24 bfloat16), draft 1 layers" in describe(schema)


def test_unlike_further_pools_are_a_difference_that_names_the_pool():
    here, there = make_schema(with_index(TARGET, 3)), make_schema(with_index(TARGET, 2))
    words = "{} layers x (index: 1 heads x 24 bfloat16)"
    assert differences(here, there) == [f"target.index: {words.format(3)} here, {words.format(2)} there"]
    assert differences(here, make_schema(TARGET)) == [f"target.index: {words.format(3)} here, absent there"]
    assert digest(here) != digest(there) != digest(make_schema(TARGET))


def test_a_further_pool_needs_a_protocol_that_can_name_it():
    assert needed_protocol(make_schema(TARGET, DRAFT, 16, "standalone")) == PROTOCOL_MIN
    assert needed_protocol(make_schema(with_index(TARGET, 3))) == 8
    assert needed_protocol(make_schema(TARGET, with_index(DRAFT, 1), 16, "standalone")) == 8


def test_a_schema_has_no_speculation_by_default():
    assert make_schema(TARGET) == make_schema(TARGET, None, 16, "none", None, checksums=True)
    plain = make_schema(TARGET)
    assert (plain.algorithm, plain.page_size, plain.checksum) == ("none", 16, CPU_CHECKSUM)
    assert (plain.draft, plain.frozen_layers, plain.key_lookahead) == (None, (), 0)


def test_row_fields_have_the_width_and_type_of_their_contents():
    layout = hidden("eagle", draft_dtype="bfloat16")
    schema = make_schema(TARGET, DRAFT, 16, "eagle", layout, draft_topk=4, draft_rows=2, ranks_trees=True)
    assert [(field.name, field.dtype, field.width) for field in schema.row] == [
        ("first_token", "int32", 1),
        ("num_cached", "int32", 1),
        ("num_logprobs", "int32", 1),
        ("logprobs", "float32", 1 + MAX_TOP_LOGPROBS),
        ("top_ids", "int32", MAX_TOP_LOGPROBS),
        ("topk_index", "int32", 8),
        ("topk_score", "float32", 8),
        ("recurrent_hidden", "bfloat16", 32),
    ]
    layout = hidden("mtp", num_target_rows=2, target_dtype="float16")
    row = make_schema(TARGET, DRAFT, 16, "mtp", layout, draft_topk=1, draft_rows=3).row
    assert (row[-1].name, row[-1].dtype, row[-1].width) == ("target_rows", "float16", 2 * 64)


def test_scores_do_not_travel_without_proposals():
    schema = make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle"), ranks_trees=True)
    assert names(schema) == [*PLAIN_FIELDS, "recurrent_hidden"]


def test_a_node_on_a_gpu_computes_other_checksums_or_none():
    plain, bare = make_schema(TARGET), make_schema(TARGET, checksums=False)
    assert on_gpu(plain) == msgspec.structs.replace(plain, checksum=GPU_CHECKSUM) != plain
    assert on_gpu(bare) == bare


def test_another_order_of_the_same_fields_is_a_difference():
    here = make_schema(TARGET)
    there = msgspec.structs.replace(here, row=here.row[::-1])
    order = " ".join(PLAIN_FIELDS), " ".join(PLAIN_FIELDS[::-1])
    assert differences(here, there) == [f"row order: {order[0]} here, {order[1]} there"]
    assert digest(here) != digest(there)


def test_all_that_differs_is_named():
    fields = " ".join(PLAIN_FIELDS)
    here = make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle"), key_lookahead=1, draft_topk=4)
    there = make_schema(msgspec.structs.replace(TARGET, head_dim=64), None, 4, "frozen-kv-mtp", frozen_layers=(1, 0))
    assert differences(here, there) == [
        "algorithm: eagle here, frozen_kv_mtp there",
        "page_size: 16 here, 4 there",
        "key_lookahead: 1 here, 0 there",
        "target.head_dim: 32 here, 64 there",
        "draft.num_layers: 1 here, absent there",
        "draft.num_kv_heads: 2 here, absent there",
        "draft.head_dim: 16 here, absent there",
        "draft.dtype: bfloat16 here, absent there",
        f"row order: {fields} topk_index recurrent_hidden here, {fields} there",
        "row.topk_index: 4 x int32 here, absent there",
        "row.recurrent_hidden: 32 x float32 here, absent there",
        "frozen_layers: absent here, 1, 0 there",
    ]


def test_a_schema_is_described_in_words():
    schema = make_schema(TARGET, DRAFT, 16, "standalone")
    assert describe(schema) == (
        "algorithm standalone, page_size 16, target 8 layers x 4 kv heads x 32 float32,"
        " draft 1 layers x 2 kv heads x 16 bfloat16,"
        f" {page_bytes(schema)} bytes per page, {row_bytes(schema)} per row, checksum xxh3_64"
    )
    assert describe(frozen(0, 7)).startswith(
        "algorithm frozen_kv_mtp, page_size 16, target 8 layers x 4 kv heads x 32 float32,"
        " draft on KV of target layers 0, 7, "
    )


@pytest.mark.parametrize(
    ("algorithm", "draft", "of", "more", "words"),
    [
        ("none", None, "eagle", {}, "hidden layout is of algorithm 'eagle', the schema of 'none'"),
        ("eagle", DRAFT, "eagle3", {}, "hidden layout is of algorithm 'eagle3', the schema of 'eagle'"),
        ("eagle3", DRAFT, "eagle", {}, "hidden layout is of algorithm 'eagle', the schema of 'eagle3'"),
        (
            "ngram",
            None,
            None,
            {"key_lookahead": 2},
            "key_lookahead is 2, but algorithm 'ngram' has no draft KV pages",
        ),
        (
            "frozen-kv-mtp",
            DRAFT,
            "frozen-kv-mtp",
            {"frozen_layers": (0, 7)},
            "algorithm 'frozen-kv-mtp' reads KV of target layers 0, 7, so it has no draft KV pages, but the draft pool"
            " is 1 layers x 2 kv heads x 16 bfloat16",
        ),
    ],
)
def test_a_refused_schema_names_the_parts_that_do_not_fit(algorithm, draft, of, more, words):
    with pytest.raises(ConfigError) as raised:
        make_schema(TARGET, draft, 16, algorithm, None if of is None else hidden(of), **more)
    assert str(raised.value) == words


def test_a_head_has_at_most_as_many_layers_as_the_wire_takes():
    assert len(frozen(*[0] * MAX_FROZEN_LAYERS).frozen_layers) == MAX_FROZEN_LAYERS
    for layers in ((0,) * (MAX_FROZEN_LAYERS + 1), (8,)):
        with pytest.raises(ConfigError) as raised:
            frozen(*layers)
        assert str(raised.value) == (f"frozen_layers {layers}: name at most {MAX_FROZEN_LAYERS} of the layers 0 to 7")


def test_equal_schemas_have_no_differences_and_one_digest():
    a, b = make_schema(TARGET, None, 16), make_schema(TARGET, None, 16)
    assert differences(a, b) == [] and digest(a) == digest(b)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(a), type=type(a)) == b


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make_schema(TARGET, None, 32), "page_size: 16 here, 32 there"),
        (
            make_schema(msgspec.structs.replace(TARGET, dtype="bfloat16"), None, 16),
            "target.dtype: float32 here, bfloat16 there",
        ),
        (make_schema(TARGET, DRAFT, 16, "standalone"), "draft.num_layers: absent here, 1 there"),
        (make_schema(TARGET, None, 16, checksums=False), "checksum: xxh3_64 here, none there"),
        (
            make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle", draft_hc_mult=4)),
            "row.recurrent_hidden: absent here, 128 x float32 there",
        ),
    ],
    ids=["page size", "dtype", "draft", "checksum", "row"],
)
def test_differences_name_both_values(other, words):
    here = make_schema(TARGET, None, 16)
    assert words in differences(here, other)
    assert digest(here) != digest(other)
    assert differences(here, other) != differences(other, here)


@pytest.mark.parametrize("pool", ["target", "draft"])
@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "dtype"])
def test_a_pool_that_is_larger_smaller_or_of_another_dtype_is_a_difference(pool, name):
    own = {"target": TARGET, "draft": DRAFT}
    value = getattr(own[pool], name)
    others = {"float32", "bfloat16", "float16"} - {value} if name == "dtype" else {value - 1, value + 1, 2 * value}
    here = make_schema(*own.values(), 16, "standalone")
    for other in others:
        changed = own | {pool: msgspec.structs.replace(own[pool], **{name: other})}
        there = make_schema(*changed.values(), 16, "standalone")
        assert differences(here, there) == [f"{pool}.{name}: {value} here, {other} there"]
        assert differences(there, here) == [f"{pool}.{name}: {other} here, {value} there"]
        assert digest(here) != digest(there)


def test_rows_that_are_wider_or_of_another_dtype_are_a_difference_in_both_directions():
    kinds = {
        (width, dtype): make_schema(
            TARGET, DRAFT, 16, "eagle", hidden("eagle", draft_hidden_size=width, draft_dtype=dtype)
        )
        for width in (31, 32, 33)
        for dtype in ("float32", "bfloat16", "float16")
    }
    for here, one in kinds.items():
        for there, other in kinds.items():
            words = f"row.recurrent_hidden: {here[0]} x {here[1]} here, {there[0]} x {there[1]} there"
            assert differences(one, other) == ([] if here == there else [words])


def test_wider_streams_on_one_side_are_a_difference():
    """Prefill and decode nodes with different hc_mult refuse each other."""
    a, b = (make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle", draft_hc_mult=m), draft_topk=1) for m in (None, 4))
    assert differences(a, b) == ["row.recurrent_hidden: 32 x float32 here, 128 x float32 there"]


def frozen(*layers: int):
    return make_schema(TARGET, None, 16, "frozen-kv-mtp", hidden("frozen-kv-mtp"), frozen_layers=layers)


def test_another_map_of_frozen_layers_is_a_difference():
    """The order counts too: the map is by layer of the drafter."""
    assert differences(frozen(0, 7), frozen(0, 6)) == ["frozen_layers: 0, 7 here, 0, 6 there"]
    assert differences(frozen(0, 7), frozen(7, 0)) == ["frozen_layers: 0, 7 here, 7, 0 there"]
    assert "frozen_layers: 7 here, absent there" in differences(frozen(7), make_schema(TARGET, None, 16))
    assert len({digest(frozen(*layers)) for layers in ((0, 7), (7, 0), (0, 6), (7,))}) == 4
    both = msgspec.msgpack.decode(msgspec.msgpack.encode(frozen(0, 7)), type=HandoffSchema)
    assert both == frozen(0, 7)


@pytest.mark.parametrize("layers", [(8,), (0, -1), (0,) * 257])
def test_layers_that_the_target_lacks_are_refused(layers):
    with pytest.raises(ConfigError, match="frozen_layers"):
        frozen(*layers)


def test_describe_names_the_sizes():
    assert "page_size 16" in describe(make_schema(TARGET, None, 16))
    assert "draft on KV of target layers 0, 7" in describe(frozen(0, 7))
    assert "layers 0" not in describe(make_schema(TARGET, None, 16))


def test_the_router_gets_the_schema_without_torch():
    check_imports(["baton.metadata.handoff.schema.schema", "baton.metadata.handoff.server"], ["torch"])


def test_a_handoff_moves_whole_pages_and_one_row():
    """The bytes of the row are counted as hidden state and rest. A prompt without full pages still has a row."""
    row = make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle"), draft_topk=4)
    assert handoff_bytes(row, 17) == (2 * 8 * 16384, 2 * 2048, 32 * 4, row_bytes(row) - 32 * 4)
    assert handoff_bytes(row, 16).total == page_bytes(row) + row_bytes(row)
    mtp = make_schema(TARGET, DRAFT, 16, "mtp", hidden("mtp", num_target_rows=2), draft_topk=1, draft_rows=3)
    assert handoff_bytes(mtp, 1).hidden_state == 2 * 64 * 4
    plain = make_schema(TARGET)
    assert handoff_bytes(plain, 33) == (3 * 8 * 16384, 0, 0, row_bytes(plain))
    alone = make_schema(TARGET, DRAFT, 16, "standalone", draft_topk=4)
    assert handoff_bytes(alone, 1) == (8 * 16384, 2048, 0, row_bytes(alone))


def test_every_field_is_declared_with_its_meaning():
    layouts = [make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle"), draft_topk=4, ranks_trees=True)]
    layouts.append(make_schema(TARGET, DRAFT, 16, "mtp", hidden("mtp", num_target_rows=2), draft_topk=1, draft_rows=3))
    used = {field.name for layout in layouts for field in layout.row}
    assert used == set(ROW_KINDS)
    for kind in ROW_KINDS.values():
        assert kind.meaning[0].isupper() and kind.meaning.endswith("."), kind
        assert (kind.writer, kind.reader) == ("prefill", "decode"), kind
