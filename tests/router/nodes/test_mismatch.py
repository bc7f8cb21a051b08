"""The words that refuse a node, or warn it, name the values of both sides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.metadata.wire.node_info import FurtherPool, KvPlane
from baton.router.nodes.mismatch import incompatible_nodes, missing_partner, refusal

from ..fake_nodes import make_layout
from ..hellos import ClockedRegistry, make_hello


@pytest.fixture
def clocked() -> ClockedRegistry:
    return ClockedRegistry()


def reason_for(clocked: ClockedRegistry, **changes: Any) -> str:
    """Return why a decode node with these differences to the prefill nodes would be refused."""
    hello = make_hello("decode", "d0", **changes)
    incompatible = incompatible_nodes(hello, None, clocked.registry.nodes.values())
    assert incompatible
    return refusal(hello, incompatible)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": make_layout(page_size=32)}, "page_size: 32 here, 16 there"),
        ({"layout": make_layout(dtype="bfloat16")}, "dtype: bfloat16 here, float32 there"),
        (
            {"layout": msgspec.structs.replace(make_layout(), frozen_layers=(0, 1))},
            "frozen_layers: 0, 1 here, absent there",
        ),
        ({"target_fingerprint": "e" * 16}, f" weights: {'e' * 16} here, {'f' * 16} there"),
        ({"target_fingerprint": "e fp8 online"}, f" weights: e (fp8 online) here, {'f' * 16} (not quantized) there"),
        ({"draft_fingerprint": "d" * 16}, f"draft weights: {'d' * 16} here, None there"),
        ({"tokenizer": "b" * 16}, f"tokenizer: {'b' * 16} here, {'a' * 16} there"),
        ({"protocol_min": 9, "protocol_max": 10}, "protocol versions: 9..10 here, 4..8 there"),
    ],
)
def test_a_refusal_names_the_differences_with_both_values(
    changes: dict[str, Any], expected: str, clocked: ClockedRegistry
) -> None:
    clocked.join(name="p0", role="prefill")
    reason = reason_for(clocked, **changes)
    assert "it can be paired with nobody: prefill node p0 of model 'fake' differs in " in reason
    assert expected in reason, reason
    assert reason.startswith("these are two models") == ("target_fingerprint" in changes)


def test_nodes_of_two_commits_are_refused_with_both_though_their_weights_are_equal(clocked: ClockedRegistry) -> None:
    """A node of a directory, or of a release that knows no commits, goes with every commit of equal weights."""
    clocked.join(name="p0", role="prefill", commit="a" * 40)
    clocked.join(name="d0")
    clocked.join(name="d1", commit="a" * 40)
    group, nodes = clocked.registry.nodes[b"d0:e"].group, clocked.registry.nodes.values()
    hello = make_hello("decode", "d2", commit="b" * 40)
    incompatible = incompatible_nodes(hello, group, nodes)
    assert {node.node_id for node in incompatible} == {"p0", "d1"}
    words = f"differs in commit: {'b' * 40} here, {'a' * 40} there (give both one --revision)"
    reason = refusal(hello, incompatible)
    assert reason.count(words) == 2
    assert reason.startswith("nodes of its group serve another commit: "), "one of them is no partner in any case"
    other = make_hello("decode", "d2", commit="b" * 40, target_fingerprint="e" * 16)
    assert f"there, commit: {'b' * 40} here, " in refusal(other, incompatible_nodes(other, None, nodes))


def test_nodes_without_a_common_protocol_are_incompatible_though_the_router_knows_both(
    clocked: ClockedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.metadata.wire.protocol.PROTOCOL_MIN", 7)
    monkeypatch.setattr("baton.metadata.wire.protocol.PROTOCOL_MAX", 9)
    group = clocked.join(name="p0", role="prefill", protocol_min=7, protocol_max=8, protocol=8).group
    newer, both = (make_hello(protocol_min=low, protocol_max=9, protocol=9) for low in (9, 8))
    nodes = clocked.registry.nodes.values()
    assert "protocol versions: 9..9 here, 7..8 there" in refusal(newer, incompatible_nodes(newer, group, nodes))
    assert incompatible_nodes(both, group, nodes) == []


def test_the_nodes_that_were_heard_last_are_named_and_no_more_than_three(clocked: ClockedRegistry) -> None:
    for name in ("p0", "p1", "p2", "p3"):
        clocked.join(name=name, role="prefill")
        clocked.now += 0.1
    reason = reason_for(clocked, target_fingerprint="e" * 16)
    assert [word for word in reason.split() if word in ("p0", "p1", "p2", "p3")] == ["p3", "p2", "p1"]


def test_a_node_with_a_new_model_is_not_incompatible(clocked: ClockedRegistry) -> None:
    clocked.join(name="p0", role="prefill", model="other")
    clocked.join(name="d1", role="decode")
    assert incompatible_nodes(make_hello("decode"), None, clocked.registry.nodes.values()) == []


def test_a_node_misses_a_partner_if_only_other_models_are_served_by_the_other_role(clocked: ClockedRegistry) -> None:
    nodes = clocked.registry.nodes
    node = clocked.join(name="d0")
    assert missing_partner(node, nodes.values()) is None, "no node of the other role is here"
    clocked.join(name="p0", role="prefill", model="other", target_fingerprint="o" * 16)
    assert missing_partner(node, nodes.values()) == (
        "it can be paired with nobody yet: decode node d0 serves model 'fake', the prefill nodes here 'other'"
    )
    clocked.join(name="p1", role="prefill")
    assert missing_partner(node, nodes.values()) is None


def test_an_older_node_of_a_model_with_tail_pages_is_refused_with_both_layouts_and_protocols(
    clocked: ClockedRegistry,
) -> None:
    """Older releases have one pool for layers with a window and without one."""
    clocked.join(name="p0", role="prefill", protocol_max=7, protocol=7)
    planes = tuple(KvPlane(name, 2, 8, "float32") for name in ("k", "v"))
    layout = make_layout()
    target = msgspec.structs.replace(layout.target, further=(FurtherPool("window", 12, planes, 128),))
    reason = reason_for(clocked, layout=msgspec.structs.replace(layout, target=target), protocol_min=8)
    planes_in_words = "k: 2 heads x 8 float32, v: 2 heads x 8 float32"
    assert f"target.window: 12 layers x ({planes_in_words}) of 128 positions here, absent there" in reason
    assert "protocol versions: 8..8 here, 4..7 there" in reason
