"""The disk tier behind a cache: pages come back from files, after a restart, too, and a slow or broken disk holds up
nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from patience import wait_until
from tiered_node import PAGE, Node

from baton.engine.tiers.disk_thread import MOST_WRITES
from baton.engine.tiers.page_files import PageFiles, PageHeader

MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(num_pages: int = 21, num_slots: int = 12, **more: object) -> Node:
        nodes.append(Node(num_pages, num_slots, directory=tmp_path / "cache", **more))
        return nodes[-1]

    yield make
    for node in nodes:
        node.cache.close()


def settle(node: Node) -> None:
    """Let the thread do all that it was asked for."""

    def is_settled() -> bool:
        node.cache.tend()
        return node.disk.thread.is_idle and not node.disk._found and not node.disk.thread._events

    wait_until(is_settled)
    node.check_books()


def await_files(node: Node, text: list[int], salt: str = "") -> None:
    """Fetch the files of a text as a prompt does."""
    fetch = node.cache.fetch(text, salt, (len(text) - 1) // PAGE, node.num_tails)

    def is_over() -> bool:
        node.cache.tend()
        return not node.cache.is_awaited(fetch)

    wait_until(is_over)


def damage(path: Path) -> None:
    """Replace what a file holds. Raises FileNotFoundError if it is gone."""
    with path.open("r+b") as file:
        file.truncate()
        file.write(b"damaged")


def texts(num: int, num_pages: int = 8) -> list[list[int]]:
    return [random.Random(seed).choices(range(100), k=num_pages * PAGE) for seed in range(num)]


@pytest.mark.parametrize("num_tails", [0, 12])
@pytest.mark.parametrize("restarts", [False, True])
def test_pages_come_back_from_files(num_tails: int, restarts: bool, make_node: MakeNode) -> None:
    node = make_node(num_slots=24, num_tails=num_tails)
    for text in texts(6):
        node.run(text)
        settle(node)
    node.cache.evict(40)
    settle(node)
    if restarts:
        node.cache.close()
        node = make_node(num_slots=24, num_tails=num_tails)
        settle(node)
    node.num_computed = 0
    for text in texts(6):
        longer = [*text, *range(PAGE)]
        await_files(node, longer)
        node.run(longer)
        settle(node)
    assert node.disk.num_read > 12
    assert node.num_computed == 6, "the last page of each"
    assert node.disk.thread.num_damaged == node.disk.thread.num_failures == 0


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("num_tails", [0, 12])
def test_random_lives_find_what_was_computed_for_their_tokens(
    num_tails: int, settles: bool, make_node: MakeNode
) -> None:
    node = make_node(16, 6, num_tails=num_tails, lookahead=1)
    rng = random.Random(num_tails)
    for step in range(300):
        text = [rng.randrange(2) for _ in range(rng.randint(0, 12))] + [rng.randrange(2)] * rng.randint(3, 30)
        salt = rng.choice(["", "a"])
        match rng.randrange(14):
            case 0:
                node.cache.evict(rng.randint(1, 20))
            case 1 if step % 40 == 0:
                node.cache.flush()
                settle(node)
                assert not node.cache.first_pages() and not list(node.files.path.iterdir())
            case 2:
                settle(node)
            case 3 if paths := [path for path in node.files.path.iterdir() if path.suffix != ".new"]:
                path = rng.choice(paths)
                with suppress(FileNotFoundError):  # the thread may have removed it
                    path.unlink() if rng.random() < 0.5 else damage(path)
            case 4:
                node.cache.fetch(text, salt, (len(text) - 1) // PAGE, node.num_tails)
            case 5 | 6:
                await_files(node, text, salt)
                node.run(text, salt)
            case _:
                node.run(text, salt)
        node.cache.tend()
        node.check_books()
        if settles:
            settle(node)
    settle(node)
    if settles:
        assert node.disk.num_read > 20
    known = {f"{node.disk._names[each].hex()}.{kind}" for each, kind in node.disk._files}
    assert {path.name for path in node.files.path.iterdir()} <= known, "a file is left that nobody finds"


def test_damaged_files_are_computed_anew(make_node: MakeNode) -> None:
    node = make_node()
    for text in texts(5):
        node.run(text)
        node.cache.evict(40)
        settle(node)
    for path in node.files.path.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    node.num_computed = 0
    await_files(node, texts(1)[0])
    node.run(texts(1)[0])
    settle(node)
    assert node.num_computed == 8 and node.disk.thread.num_damaged == 7 and node.disk.num_read == 0


def test_no_more_bytes_than_asked_for_and_none_that_are_too_old(make_node: MakeNode) -> None:
    node = make_node(num_file_bytes=10_000)
    for text in texts(8):
        node.run(text)
        settle(node)
    settle(node)
    sizes = [path.stat().st_size for path in node.files.path.iterdir()]
    assert 5_000 < sum(sizes) == node.disk.ledger().num_bytes <= 10_000
    node.disk.ttl_s = 1e-6
    settle(node)
    wait_until(lambda: not list(node.files.path.iterdir()))
    assert node.disk.ledger().files == 0


def test_a_disk_that_hangs_holds_no_step_up(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(40, 400)
    go_on = threading.Event()
    write = PageFiles.write

    def hang(files: PageFiles, name: bytes, header: PageHeader, slot: np.ndarray) -> int:
        go_on.wait()
        return write(files, name, header, slot)

    monkeypatch.setattr(PageFiles, "write", hang)
    for text in texts(MOST_WRITES // 8 + 12):
        begun = time.monotonic()
        node.run(text)
        node.cache.tend()
        assert time.monotonic() - begun < 5.0
    assert node.disk.ledger().writing == MOST_WRITES + 1, "one is under way, and further ones are refused"
    go_on.set()
    settle(node)
    assert node.disk.num_written <= MOST_WRITES + 1


def test_a_prompt_waits_no_longer_than_computing_takes(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node()
    [text, *others] = texts(5)
    for each in (text, *others):
        node.run(each)
        settle(node)
    node.cache.evict(40)
    settle(node)
    go_on = threading.Event()
    read = PageFiles.read

    def hang(files: PageFiles, name: bytes, header: PageHeader, slot: np.ndarray) -> bool:
        go_on.wait()
        return read(files, name, header, slot)

    monkeypatch.setattr(PageFiles, "read", hang)
    node.tier.compute_token_s = lambda: 0.001
    begun = time.monotonic()
    await_files(node, text)
    assert 0.01 < time.monotonic() - begun < 5.0
    node.run(text)
    assert node.cache.fetch(others[0]) is None, "the disk is known to be slow now"
    node.cache.flush()  # files are still being read
    go_on.set()
    settle(node)
    assert node.tier.kept.num_used == 0 and not list(node.files.path.iterdir())


def test_a_full_disk_is_counted_and_nothing_else_happens(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    node = make_node()
    monkeypatch.setattr(PageFiles, "write", full)
    for text in texts(6):
        node.run(text)
        settle(node)
    assert node.disk.thread.num_failures > 20 and node.disk.ledger().files == 0
    monkeypatch.undo()
    node.run(texts(7)[6])
    node.cache.evict(40)
    settle(node)
    assert node.disk.ledger().files > 0


@pytest.mark.parametrize("num_tails", [0, 12])
def test_the_pages_of_a_tenant_leave_all_tiers_at_once(num_tails: int, make_node: MakeNode, tmp_path: Path) -> None:
    """Pages that a request uses stay as long, and go when the node is told again."""
    node = make_node(num_slots=24, num_tails=num_tails)
    first, second, third = texts(3)
    for text, salt in ((first, "a1"), (second, "b1"), (third, "a2"), (third, ""), (first, "b1"), (second, "a1")):
        node.run(text, salt)
        settle(node)
    in_use = node.cache.acquire(second, "a1")
    assert in_use.pages and list(tmp_path.glob("*/*/*.page"))
    node.cache.forget("a")
    left = {page.key[: -4 * PAGE].decode() for page in node.cache.first_pages()}
    assert left == {"a1", "b1", ""} and node.cache.match(second, "a1") == len(in_use.pages)
    node.cache.release(in_use)
    node.cache.forget("a")
    settle(node)
    assert {page.key[: -4 * PAGE].decode() for page in node.cache.first_pages()} == {"b1", ""}
    salts = {node.files._look(path.name, 0.0).header.salt for path in tmp_path.glob("*/*/*") if path.suffix != ".lock"}
    assert salts <= {"b1", ""}
    for text, salt in ((first, "b1"), (first, "a1")):
        node.run(text, salt)
        settle(node)
