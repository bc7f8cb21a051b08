"""Groups, nodes and requests as the registry and the routes make them, without sockets or threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import xxhash

from baton.metadata.cache.names import PromptNames
from baton.metadata.errors import BatonError
from baton.metadata.wire.membership import CachedPages, Hello
from baton.metadata.wire.node_info import Capacity, ModelCard
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import SamplingParams
from baton.router.nodes.node import GroupKey, Node, NodeGroup
from baton.router.requests.delta import Delta, TextOptions
from baton.router.requests.request import Request, Sequence
from baton.router.text.tokenizer import TextTokenizer

from .fake_nodes import make_layout, make_tokenizer


@cache
def tokenizer_file() -> bytes:
    return make_tokenizer()


@cache
def text_tokenizer() -> TextTokenizer:
    return TextTokenizer(tokenizer_file())


def make_hello(
    role: Any,
    name: str,
    *,
    num_pages: int = 100,
    max_running: int = 8,
    context_len: int = 512,
    page_size: int = 16,
    key_lookahead: int = 0,
    epoch: str = "1",
) -> Hello:
    digest = xxhash.xxh3_128_hexdigest(tokenizer_file())
    return Hello(
        role=role,
        node_id=name,
        epoch=epoch,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        layout=msgspec.structs.replace(make_layout(page_size), key_lookahead=key_lookahead),
        target_fingerprint="f",
        draft_fingerprint=None,
        model=ModelCard("fake", context_len, 420, (1,), 0, digest, None),
        capacity=Capacity(num_pages, page_size, max_running),
        data_address="tcp://127.0.0.1:1",
        protocol=PROTOCOL_MAX,
    )


def make_group(hello: Hello | None = None) -> NodeGroup:
    """Return a group without nodes that has its tokenizer."""
    group = NodeGroup(GroupKey("s", "f", None, "fake", "t"), hello or make_hello("prefill", "x"))
    group.tokenizer = text_tokenizer()
    return group


def add_node(group: NodeGroup, role: str, name: str, **sizes: Any) -> Node:
    """Let a node join the group, and return it."""
    node = Node(make_hello(role, name, **sizes), group, 0.0)
    group.nodes[node.routing_id] = node
    return node


class Heard:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.deltas: list[tuple[Sequence, Delta]] = []
        self.ends: list[BatonError | None] = []

    def on_delta(self, sequence: Sequence, delta: Delta, /) -> None:
        self.deltas.append((sequence, delta))

    def on_done(self, _request: Request, /) -> None:
        self.ends.append(None)

    def on_error(self, _request: Request, error: BatonError, /) -> None:
        self.ends.append(error)


def make_request(
    group: NodeGroup,
    rid: str = "r",
    *,
    prompt_len: int = 3,
    num_choices: int = 1,
    text: TextOptions | None = None,
    params: dict[str, Any] | None = None,
    now: float = 0.0,
    **more: Any,
) -> Request:
    """Return a request that no dispatcher knows. `params` are sampling parameters, `more` fields of Request."""
    sampling = SamplingParams(**{"max_tokens": 20, **(params or {})})
    options, ids = text or TextOptions(), [5] * prompt_len
    return Request(rid, group, ids, sampling, Heard(), num_choices=num_choices, options=options, now=now, **more)


def tell_pages(node: Node, names: PromptNames, num_pages: int) -> None:
    """Let a node tell that it has the first pages of a prompt, and no other ones."""
    list(names)
    stored = b"".join(names._whole[:num_pages])
    node.cache.take(CachedPages(number=0, stored=stored, removed=b"", num_changes=num_pages, is_whole=True))
