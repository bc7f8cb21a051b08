"""What a node finds out before it loads anything big, and what it does before it serves."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
from key_files import Listed

from baton.engine import startup
from baton.engine.config import EngineConfig
from baton.engine.startup import load_keys, node_id
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ("127.0.0.1:5700", "neither tcp://HOST:PORT nor"),
        ("tcp://127.0.0.1", "neither tcp://HOST:PORT nor"),
        ("http://127.0.0.1:8000", "neither tcp://HOST:PORT nor"),
        ("tcp://127.0.0.1:99999", "above 65535"),
        ("tcp://192.0.2.1:5700", "--keys"),
    ],
)
def test_a_wrong_router_address_is_told_before_the_model_loads(router: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_keys(EngineConfig(router=router))


def test_so_is_an_address_of_its_own_that_needs_keys(tmp_path: Path) -> None:
    KeyPair.create(tmp_path / "keys")
    with pytest.raises(ConfigError, match="--keys"):
        load_keys(EngineConfig(), "tcp://192.0.2.1:*")
    assert load_keys(EngineConfig(keys=str(tmp_path / "keys")), "tcp://192.0.2.1:*") is not None


def test_a_nodes_name_is_what_the_allow_list_calls_its_key(tmp_path: Path) -> None:
    listed = Listed(tmp_path / "list", "router", "d0")
    for name, pair in listed.pairs.items():
        pair.write(tmp_path / name)
    given = {"keys": str(tmp_path / "d0"), "allow_list": str(listed.path)}
    assert node_id(EngineConfig(**given), "decode") == "d0"
    keys = load_keys(EngineConfig(**given, node_id="d0"))
    assert keys is not None and keys.name == "d0"
    with pytest.raises(
        ConfigError, match=r"--node-id d1: allow-list .* calls this node's key 'd0'; .*baton keys --name d1 "
    ):
        load_keys(EngineConfig(**given, node_id="d1"))
    with pytest.raises(ConfigError, match=r"calls this key .* is a router's"):
        load_keys(EngineConfig(keys=str(tmp_path / "router"), allow_list=str(listed.path)))


def test_full_collections_pass_over_what_was_there_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them holds up every stream, for 0.1 s where torch is loaded."""
    made: list[list[int]] = []
    thresholds = gc.get_threshold()
    membership = SimpleNamespace(is_over=False, member=None)
    for name in ("install_signals", "start", "report", "wait", "close"):
        setattr(membership, name, lambda: None)

    class OneStep:
        links = SimpleNamespace(close=lambda: None)
        is_idle = True

        def __init__(self) -> None:
            made.append([1])

        def step(self) -> bool:
            self.watched = {id(each) for each in gc.get_objects()}  # frozen ones are not among them
            membership.is_over = True
            return False

    node: OneStep | None = None

    def make_node(_: object) -> OneStep:
        nonlocal node
        node = OneStep()
        return node

    monkeypatch.setattr(startup, "make_membership", lambda *_, **__: membership)
    engine = SimpleNamespace(group_steps=None, cache=SimpleNamespace(close=lambda: None))
    try:
        assert startup.serve(EngineConfig(), "d", "decode", engine, None, "e", "", make_node) == 0  # type: ignore[arg-type]
        assert node is not None and id(made[0]) not in node.watched and id(made) not in node.watched
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
