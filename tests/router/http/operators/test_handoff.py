"""The page on which operators see what a handoff moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from layouts import LOOKAHEAD, WITH_DRAFT_POOL, make_layout
from msgspec.structs import replace

from baton.metadata.handoff.schema.schema import make_schema, row_bytes
from baton.metadata.wire.node_info import FurtherPool, HandoffSchema, KvPlane, PoolLayout, RowField

from ...conftest import System

TARGET = PoolLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
DRAFT = PoolLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="bfloat16")


def layout(algorithm: str, **more: Any) -> HandoffSchema:
    hidden = make_layout(algorithm, target_hidden_size=16, draft_hidden_size=12)
    draft = DRAFT if algorithm in WITH_DRAFT_POOL else None
    return make_schema(TARGET, draft, 16, algorithm, hidden, key_lookahead=LOOKAHEAD.get(algorithm, 0), **more)


def told(make_system: Callable[..., System], schema: HandoffSchema) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of the only group, and the lines of the text."""
    system = make_system()
    for role in ("prefill", "decode"):
        system.cluster.add(role, role, layout=schema)
    system.router.wait_ready()
    status, body, _ = system.router.request("GET", "/debug/handoff")
    assert status == 200
    (group,) = body["groups"]
    status, text, headers = system.router.request("GET", "/debug/handoff?format=text")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    assert text.decode().splitlines() == group["words"]
    return group, group["words"]


def test_the_page_shows_eagle_in_words_and_bytes(make_system: Callable[..., System]) -> None:
    group, words = told(make_system, layout("eagle", draft_topk=4))
    assert (group["model"], group["nodes"]) == ("fake", {"prefill": ["prefill"], "decode": ["decode"]})
    assert group["schema"]["draft"] == {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "bfloat16"}
    assert group["page_bytes"] == 2 * 2 * 2 * 16 * 8 * 4 + 2 * 16 * 4 * 2
    fields = {field.pop("name"): field for field in group["row"]}
    assert set(fields) == {field["name"] for field in group["schema"]["row"]}
    assert fields["recurrent_hidden"].pop("meaning").startswith("The hidden state")
    assert fields["recurrent_hidden"] == {
        "dtype": "float32",
        "width": 12,
        "bytes": 48,
        "writer": "prefill",
        "reader": "decode",
    }
    assert group["row_bytes"] == sum(field["bytes"] for field in fields.values())
    text = "\n".join(words)
    for phrase in (
        "algorithm eagle, 16 tokens a page; prefill prefill; decode decode",
        "target KV: 2 layers x 2 kv heads x 8 float32, 4,096 bytes per page",
        "draft KV: 1 layers x 1 kv heads x 4 bfloat16, 256 bytes per page",
        "a page of both: 4,352 bytes, checked by 10 checksums (xxh3_64)",
        "its own tokens and the next one",
        "first_token: 1 x int32, 4 bytes, prefill writes, decode reads. The token sampled after the prompt",
    ):
        assert phrase in text, (phrase, text)


def test_a_further_pool_has_a_line_of_its_own(make_system: Callable[..., System]) -> None:
    index = FurtherPool("index", 2, (KvPlane("index", num_heads=1, head_dim=8, dtype="float32"),))
    _, words = told(make_system, make_schema(replace(TARGET, further=(index,)), None, 16))
    assert "target.index: 2 layers x (index: 1 heads x 8 float32), 1,024 bytes per page" in words
    assert "a page of all pools: 5,120 bytes, checked by 10 checksums (xxh3_64)" in words
    assert any(" = target KV 40,960 + draft KV 0 + " in line for line in words)


def test_the_bytes_of_requests_add_up(make_system: Callable[..., System]) -> None:
    schema = layout("eagle", draft_topk=4)
    group, words = told(make_system, schema)
    assert [request["prompt_tokens"] for request in group["requests"]] == [128, 1024, 8192]
    for request in group["requests"]:
        num_pages = request["prompt_tokens"] // 16
        assert (request["target_kv"], request["draft_kv"]) == (num_pages * 4096, num_pages * 256)
        assert request["hidden_state"] == 48
        assert request["rest_of_row"] == row_bytes(schema) - 48
        assert request["total"] == num_pages * group["page_bytes"] + group["row_bytes"]
    assert "128 tokens: 35,056 bytes = target KV 32,768 + draft KV 2,048 + hidden state 48 + " in "\n".join(words)


@pytest.mark.parametrize(("algorithm", "draft_kv"), [("standalone", 2048), ("ngram", 0), ("none", 0)])
def test_drafters_without_hidden_state_move_none(
    make_system: Callable[..., System], algorithm: str, draft_kv: int
) -> None:
    group, words = told(make_system, layout(algorithm))
    assert not any("hidden" in field["name"] for field in group["row"])
    assert [request["hidden_state"] for request in group["requests"]] == [0, 0, 0]
    assert group["requests"][0]["draft_kv"] == draft_kv
    assert ("draft KV: none" in words) == (draft_kv == 0)
    assert any(line.startswith("a page: 4,096 bytes") for line in words) == (draft_kv == 0)
    assert any(line == "prefix caches know a page by its own tokens" for line in words)


def test_the_layers_that_a_drafter_without_kv_reads_are_shown(make_system: Callable[..., System]) -> None:
    group, words = told(make_system, layout("frozen-kv-mtp", frozen_layers=(1, 0)))
    assert group["schema"]["frozen_layers"] == [1, 0]
    assert "draft KV: none; the drafter attends to KV of target layers 1, 0" in words


def test_a_field_that_the_router_does_not_know_is_shown(make_system: Callable[..., System]) -> None:
    plain = layout("none")
    schema = HandoffSchema(
        algorithm=plain.algorithm,
        page_size=plain.page_size,
        target=plain.target,
        draft=None,
        row=(*plain.row, RowField(name="from_elsewhere", dtype="int64", width=2)),
        key_lookahead=3,
        checksum="none",
    )
    group, words = told(make_system, schema)
    assert (group["row"][-1]["name"], group["row"][-1]["bytes"]) == ("from_elsewhere", 16)
    assert "by no checksum" in "\n".join(words)
    assert "its own tokens and the next 3" in "\n".join(words)


def test_groups_without_nodes_are_left_out_and_formats_are_checked(system: System) -> None:
    status, body, _ = system.router.request("GET", "/debug/handoff?format=yaml")
    assert (status, body["error"]["param"]) == (400, "format")
    for name in ("p0", "d0"):
        system.cluster.by_name(name).stop()
    for _ in range(500):
        _, body, _ = system.router.request("GET", "/debug/handoff")
        if body == {"groups": []}:
            break
    assert body == {"groups": []}
    assert system.router.request("GET", "/debug/handoff?format=text")[1] == b"no node has joined\n"


def test_the_page_needs_the_key(make_system: Callable[..., System]) -> None:
    system = make_system(router={"api_key": "secret"})
    assert system.router.request("GET", "/debug/handoff")[0] == 401
    headers = {"Authorization": "Bearer secret"}
    assert system.router.request("GET", "/debug/handoff", headers=headers)[:2] == (200, {"groups": []})
