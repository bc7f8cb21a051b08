"""Metadata rows round-trip through bytes, column for column, and refuse what the schema does not declare."""

from __future__ import annotations

import itertools

import pytest
import torch
from layouts import make_layout

from baton.engine.drafters import base as drafters
from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.schema import buffers
from baton.metadata.handoff.schema.buffers import MetadataBuffers, Sampled
from baton.metadata.handoff.schema.hidden_layout import spec_hidden_size
from baton.metadata.handoff.schema.schema import ROW_KINDS, make_schema, row_bytes
from baton.metadata.wire.node_info import PoolLayout
from baton.metadata.wire.request import MAX_TOP_LOGPROBS, TokenLogprobs

POOL = PoolLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
PLAIN = make_schema(POOL, None, 4)
HIDDEN = make_layout(
    "eagle",
    target_hidden_size=16,
    draft_hidden_size=12,
    draft_dtype="bfloat16",
    target_dtype="bfloat16",
    draft_hc_mult=4,
)
EAGLE = make_schema(POOL, POOL, 4, "eagle", HIDDEN, draft_topk=3, ranks_trees=True)


def test_absent_fields_take_no_bytes_and_have_no_name():
    plain, eagle = MetadataBuffers(PLAIN), MetadataBuffers(EAGLE)
    assert "recurrent_hidden" not in plain and "recurrent_hidden" in eagle
    assert len(plain.pack()) == row_bytes(PLAIN) == 4 * (3 + 21 + 20)
    assert len(eagle.pack()) - len(plain.pack()) == 3 * 4 + 3 * 4 + 12 * 4 * 2
    for call in (plain.get, lambda name: plain.set(name, torch.zeros(12))):
        with pytest.raises(KeyError):
            call("recurrent_hidden")


def test_every_column_of_a_row_survives():
    source, sink = MetadataBuffers(EAGLE), MetadataBuffers(EAGLE)
    generator = torch.Generator().manual_seed(0)
    for field in EAGLE.row:
        tensor = source.get(field.name)
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 100)
    source.get("recurrent_hidden")[-1] = 0.12345  # the last column
    sink.unpack(source.pack())
    for field in EAGLE.row:
        assert torch.equal(sink.get(field.name), source.get(field.name)), field.name
    assert sink.get("recurrent_hidden")[-1] == torch.tensor(0.12345, dtype=torch.bfloat16)
    assert sink.get("recurrent_hidden").shape == (48,)


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(47, dtype=torch.bfloat16),
        torch.zeros(1, dtype=torch.bfloat16),  # would broadcast
        torch.zeros(48, dtype=torch.float32),  # would be cast
        torch.zeros(1, 48, dtype=torch.bfloat16),
        [0.0] * 47,
    ],
    ids=["narrow", "broadcast", "dtype", "rank", "list"],
)
def test_unlike_widths_and_dtypes_raise(values):
    with pytest.raises(ValueError, match="recurrent_hidden"):
        MetadataBuffers(EAGLE).set("recurrent_hidden", values)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_row_of_another_length_is_refused(change):
    data = MetadataBuffers(EAGLE).pack()
    with pytest.raises(ProtocolError, match="bytes"):
        MetadataBuffers(EAGLE).unpack(data[:-1] if change < 0 else data + b"\0")


@pytest.mark.parametrize("num_top", [None, 0, 2, MAX_TOP_LOGPROBS])
def test_sampled_fields_round_trip(num_top):
    logprobs = None
    if num_top is not None:
        logprobs = TokenLogprobs(-0.5, tuple(range(num_top)), tuple(-float(i) for i in range(num_top)))
    sampled = Sampled(first_token=31999, num_cached=48, logprobs=logprobs)
    source, sink = MetadataBuffers(PLAIN), MetadataBuffers(PLAIN)
    source.set_sampled(Sampled(1, 1, TokenLogprobs(-9.0, tuple(range(20)), (-9.0,) * 20)))  # leaves nothing behind
    source.set_sampled(sampled)
    sink.unpack(source.pack())
    assert sink.get_sampled(32000) == sampled


def test_a_row_with_impossible_counts_is_refused():
    rows = MetadataBuffers(PLAIN)
    rows.set("num_logprobs", [22])
    with pytest.raises(ProtocolError, match="num_logprobs 22"):
        rows.get_sampled(32000)


@pytest.mark.parametrize("token", [-1, 32000, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("field", ["first_token", "top_ids", "topk_index"])
def test_a_row_that_names_no_token_is_refused(field, token):
    """An embedding would raise in the middle of a round, which all sequences share."""
    rows = MetadataBuffers(EAGLE)
    rows.set(field, [0] * (rows.get(field).numel() - 1) + [31999])
    rows.get_sampled(32000)
    rows.set(field, [0] * (rows.get(field).numel() - 1) + [token])
    with pytest.raises(ProtocolError, match=f"whose {field} has"):
        rows.get_sampled(32000)


def _rows_of_the_page() -> list[list[str]]:
    """The rows of the table in the module's docstring: field, writer, reader, width."""
    lines = (buffers.__doc__ or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:2] == ["field", "writer"])
    return [line.split(maxsplit=3) for line in itertools.takewhile(str.strip, lines[start + 1 :])]


def test_the_page_of_the_module_lists_every_field_with_its_writer_and_reader():
    rows = _rows_of_the_page()
    assert [field for field, *_ in rows] == list(ROW_KINDS)
    row = MetadataBuffers(EAGLE)
    for field in EAGLE.row:
        row.get(field.name).fill_(7)
    row.set_sampled(Sampled(1, 2, None))
    written = [field.name for field in EAGLE.row if (row.get(field.name) != 7).any()]
    assert written == [field for field, writer, *_ in rows if writer == "set_sampled"]
    assert [*drafters._FIELDS.values()] == [field for field, writer, *_ in rows if writer == "set_draft"]
    assert all(reader == writer.replace("set", "get") for _, writer, reader, _ in rows)


@pytest.mark.parametrize("num_mtp_layers", [None, 3])
def test_the_page_of_the_module_states_every_width(num_mtp_layers):
    """There are hyper-connection streams, so every hidden state has the width `spec_hidden_size`."""
    algorithm = "eagle" if num_mtp_layers is None else "mtp"
    num_rows = 0 if num_mtp_layers is None else num_mtp_layers - 1
    hidden = make_layout(
        algorithm, target_hidden_size=8, hc_mult=4, draft_hidden_size=6, draft_hc_mult=2, num_target_rows=num_rows
    )
    schema = make_schema(POOL, POOL, 4, algorithm, hidden, draft_topk=3, draft_rows=2, ranks_trees=True)
    names = {"MAX_TOP_LOGPROBS": MAX_TOP_LOGPROBS, "draft_topk": 3, "draft_rows": 2, "hidden": hidden}
    stated = {field: width for field, _, _, width in _rows_of_the_page()}
    assert {field.name: eval(stated[field.name], names) for field in schema.row} == {
        field.name: field.width for field in schema.row
    }
    widths = {field.name: field.width for field in schema.row}
    if num_mtp_layers is None:
        assert widths["recurrent_hidden"] == spec_hidden_size(6, 2)
    else:
        assert widths["target_rows"] == 2 * spec_hidden_size(8, 4)
