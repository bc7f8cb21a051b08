"""The schema of the joint configuration, its sizes, and the words in which two of them differ."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from baton.metadata.errors import ConfigError
from baton.metadata.hidden_layout import HiddenLayout
from baton.metadata.node_info import HandoffSchema, PoolLayout
from baton.metadata.schema import (
    ROW_KINDS,
    blocks_per_page,
    describe,
    differences,
    digest,
    handoff_bytes,
    make_schema,
    page_bytes,
    page_layer_bytes,
    row_bytes,
)

TARGET = PoolLayout(num_layers=8, num_kv_heads=4, head_dim=32, dtype="float32")
DRAFT = PoolLayout(num_layers=1, num_kv_heads=2, head_dim=16, dtype="bfloat16")


def hidden(algorithm: str, **more) -> HiddenLayout:
    return HiddenLayout(algorithm=algorithm, target_hidden_size=64, draft_hidden_size=32, num_aux=3, **more)


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
        ("frozen_kv_mtp", None, {"frozen_layers": (0, 7)}, ["recurrent_hidden"], 0),
    ],
)
def test_fields_by_algorithm(algorithm, draft, more, extra_fields, lookahead):
    schema = make_schema(TARGET, draft, 16, algorithm, hidden(algorithm), **more)
    assert names(schema) == PLAIN_FIELDS + extra_fields
    assert schema.key_lookahead == lookahead


@pytest.mark.parametrize("num_layers", [1, 3])
def test_mtp_hands_over_n_minus_one_target_rows_and_looks_n_tokens_ahead(num_layers):
    layout = hidden("mtp", num_mtp_layers=num_layers, is_chained=True)
    schema = make_schema(TARGET, DRAFT, 16, "mtp", layout, draft_topk=2, draft_rows=num_layers)
    widths = {field.name: field.width for field in schema.row}
    assert ("recurrent_hidden" in widths) == (num_layers == 1)  # several layers chain within a row
    assert widths.get("target_rows") == (None if num_layers == 1 else 2 * 64)
    assert widths["topk_index"] == 2 * num_layers
    assert schema.key_lookahead == num_layers


def test_sizes():
    plain, both = make_schema(TARGET, None, 16), make_schema(TARGET, DRAFT, 16, "standalone")
    assert page_layer_bytes(TARGET, 16) == 2 * 4 * 16 * 32 * 4
    assert page_bytes(plain) == 8 * 16384
    assert page_bytes(both) == 8 * 16384 + 2 * 2 * 16 * 16 * 2
    assert (blocks_per_page(plain), blocks_per_page(both)) == (8 * 2 * 4, 8 * 2 * 4 + 2 * 2)
    assert blocks_per_page(make_schema(TARGET, None, 16, checksums=False)) == 0
    assert row_bytes(plain) == sum(4 * field.width for field in plain.row)


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


def test_wider_streams_on_one_side_are_a_difference():
    """Prefill and decode with different hc_mult refuse each other."""
    a, b = (make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle", draft_hc_mult=m), draft_topk=1) for m in (None, 4))
    assert differences(a, b) == ["row.recurrent_hidden: 32 x float32 here, 128 x float32 there"]


def frozen(*layers: int):
    return make_schema(TARGET, None, 16, "frozen_kv_mtp", hidden("frozen_kv_mtp"), frozen_layers=layers)


def test_another_map_of_frozen_layers_is_a_difference():
    """Also the order counts: it is by layer of the drafter."""
    assert differences(frozen(0, 7), frozen(0, 6)) == ["frozen_layers: 0, 7 here, 0, 6 there"]
    assert differences(frozen(0, 7), frozen(7, 0)) == ["frozen_layers: 0, 7 here, 7, 0 there"]
    assert "frozen_layers: 7 here, absent there" in differences(frozen(7), make_schema(TARGET, None, 16))
    assert len({digest(frozen(*layers)) for layers in ((0, 7), (7, 0), (0, 6), (7,))}) == 4
    both = msgspec.msgpack.decode(msgspec.msgpack.encode(frozen(0, 7)), type=HandoffSchema)
    assert both == frozen(0, 7)


@pytest.mark.parametrize("layers", [(8,), (0, -1), (0,) * 257, ()])
def test_layers_that_the_target_lacks_are_refused(layers):
    with pytest.raises(ConfigError, match="frozen_layers"):
        frozen(*layers)


def test_only_frozen_kv_names_layers():
    with pytest.raises(ConfigError, match=r"'ngram' does not read .*frozen_layers is \(1,\)"):
        make_schema(TARGET, None, 16, "ngram", hidden("ngram"), frozen_layers=(1,))


@pytest.mark.parametrize(
    ("algorithm", "draft", "of"),
    [("eagle", None, "eagle"), ("none", DRAFT, "none"), ("magic", None, "none"), ("none", None, "eagle")],
    ids=["no draft", "a draft too many", "unknown", "hidden of another"],
)
def test_parts_that_do_not_belong_together_are_refused(algorithm, draft, of):
    with pytest.raises(ConfigError):
        make_schema(TARGET, draft, 16, algorithm, hidden(of))


def test_describe_names_the_sizes():
    assert "page_size 16" in describe(make_schema(TARGET, None, 16))
    assert "draft on KV of target layers 0, 7" in describe(frozen(0, 7))
    assert "layers 0" not in describe(make_schema(TARGET, None, 16))


def test_the_router_gets_the_schema_without_torch():
    program = "import sys, baton.metadata.schema, baton.metadata.handoff_server as _; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_what_a_handoff_moves():
    """Whole pages, and a row split into hidden state and the rest; no prompt is free of its row."""
    row = make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle"), draft_topk=4)
    assert handoff_bytes(row, 17) == (2 * 8 * 16384, 2 * 2048, 32 * 4, row_bytes(row) - 32 * 4)
    assert handoff_bytes(row, 16).total == page_bytes(row) + row_bytes(row)
    mtp = make_schema(TARGET, DRAFT, 16, "mtp", hidden("mtp", num_mtp_layers=3), draft_topk=1, draft_rows=3)
    assert handoff_bytes(mtp, 1).hidden_state == 2 * 64 * 4
    alone = make_schema(TARGET, DRAFT, 16, "standalone", draft_topk=4)
    assert handoff_bytes(alone, 1) == (8 * 16384, 2048, 0, row_bytes(alone))


def test_every_field_is_declared_with_its_meaning():
    layouts = [make_schema(TARGET, DRAFT, 16, "eagle", hidden("eagle"), draft_topk=4, ranks_trees=True)]
    layouts.append(make_schema(TARGET, DRAFT, 16, "mtp", hidden("mtp", num_mtp_layers=3), draft_topk=1, draft_rows=3))
    used = {field.name for layout in layouts for field in layout.row}
    assert used == set(ROW_KINDS)
    for kind in ROW_KINDS.values():
        assert kind.meaning[0].isupper() and kind.meaning.endswith("."), kind
        assert (kind.writer, kind.reader) == ("prefill", "decode"), kind
