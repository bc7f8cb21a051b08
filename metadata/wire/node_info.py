"""Description of a node on the wire: its model, handoff schema, sizes and counters. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .protocol import Message, Since
from .request import MAX_CONTEXT, MAX_TOP_LOGPROBS, Count, Digest, Index, Name, Seconds, Text, TokenId

MAX_FROZEN_LAYERS = 256
MAX_RANKS = 1024  # of a node
MAX_CANARY_TOKENS = 16
MAX_SPECIAL_TOKENS = 64  # with a name
MAX_FURTHER_POOLS = 7  # of a model
MAX_POOLS = 2 * (1 + MAX_FURTHER_POOLS)  # of target and draft

Role = Literal["prefill", "decode"]
Address = Annotated[str, Meta(max_length=256)]


class KvPlane(Message, frozen=True):
    """One plane of a page: the keys, values or latents of its heads (metadata/handoff/schema/kv_layout.py)."""

    name: Name
    num_heads: Index
    head_dim: Index  # elements per token of a head
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int64"]
    extra_bytes: Annotated[int, Meta(ge=0, le=4096)] = 0  # per token of a head, such as a scale
    alignment: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256] = 1  # of its blocks, bytes


class FurtherPool(Message, frozen=True, omit_defaults=True):
    """Layout of a pool that a model has beside the pool of its KV, such as keys of an indexer. It has layers and planes
    of its own. Without a window it has the same page numbers. With one it has *tail pages*, which have numbers and
    block tables of their own: a page is needed only while a layer reads back so far."""

    name: Name
    num_layers: Index
    planes: Annotated[tuple[KvPlane, ...], Meta(min_length=1, max_length=8)]
    window: Count = 0  # positions that its layers read back, their own included; 0: all
    num_rows: Count = 0  # rows of a page: the token at slot s has row s % num_rows; 0: as many as a page has tokens


class PoolLayout(Message, frozen=True, omit_defaults=True):
    """Layout of one KV pool. A page has K and V, [num_layers, 2, num_kv_heads, page_size, head_dim] of dtype.

    If `planes` are listed, a page has these instead. Then num_kv_heads and head_dim are 0, and dtype is that of the
    values as attention takes them (metadata/handoff/schema/kv_layout.py: pool_of). A pool without them has the same
    bytes on the wire in every protocol.
    """

    num_layers: Index
    num_kv_heads: Index
    head_dim: Index
    dtype: Literal["float32", "bfloat16", "float16"]
    planes: Annotated[tuple[KvPlane, ...], Meta(max_length=8), Since(6)] = ()
    further: Annotated[tuple[FurtherPool, ...], Meta(max_length=MAX_FURTHER_POOLS), Since(8)] = ()
    window: Annotated[Count, Since(8)] = 0  # of a draft: as `FurtherPool.window`


class RowField(Message, frozen=True):
    """One field of a metadata row: `width` elements of dtype. Absent fields are not listed and take no bytes."""

    name: Name
    dtype: Literal["int32", "int64", "float32", "bfloat16", "float16"]
    width: Annotated[int, Meta(ge=1, le=1 << 22)]


class HandoffSchema(Message, frozen=True):
    """Layout of a handoff on the wire, made from the configuration of target and draft (handoff/schema/schema.py)."""

    algorithm: Name
    page_size: Annotated[int, Meta(ge=1, le=4096)]
    target: PoolLayout
    draft: PoolLayout | None
    row: Annotated[tuple[RowField, ...], Meta(max_length=64)]
    key_lookahead: Annotated[
        int, Meta(ge=0, le=64)
    ]  # the prefix cache keys a page by its tokens and this many next ones
    checksum: Name
    # for each layer of a drafter without KV of its own: the target layer whose KV it attends to
    frozen_layers: Annotated[tuple[Index, ...], Meta(max_length=MAX_FROZEN_LAYERS)] = ()


class DevicePools(Message, frozen=True):
    """A node's pools on its GPU, in the order of the schema. Their file descriptors went to the peer's inbox with
    `token`."""

    device: Name  # its UUID
    sizes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_POOLS)]  # of the allocations, bytes
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]


class HostMemory(Message, frozen=True):
    """A pool in host memory, with its generations: /proc/PID/fd/FD of its owner, and its size in bytes."""

    pid: Count
    fd: Count
    size: Count


class GroupRank(Message, frozen=True):
    """Place of a node among the ranks of a group, which divide a model and live and die together."""

    group: Name  # name of the group: the node id that the operator gave
    epoch: Digest  # of the group's start
    rank: Index
    size: Index


class ModelCard(Message, frozen=True):
    """Properties of a model that let the router serve it without the model's files."""

    name: Name
    context_len: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    vocab_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    eos_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)]
    bos_token_id: TokenId | None
    tokenizer_digest: Digest
    chat_template: Annotated[str, Meta(max_length=1 << 20)] | None
    special_tokens: Annotated[dict[Name, Text], Meta(max_length=MAX_SPECIAL_TOKENS)] = {}  # for the template
    defaults: Annotated[dict[Name, float], Meta(max_length=64)] = {}  # generation_config: temperature, top_p, top_k ...


class Peer(Message, frozen=True):
    """Address of a node for other nodes. `data_address` is where a prefill node serves pages."""

    node_id: Name
    epoch: Digest
    data_address: Address = ""
    protocol: Annotated[Index, Since(6)] = 0  # both nodes address each other in it; 0: the router does not say


class Lender(Message, frozen=True):
    """A node from which another one may borrow pages of a prompt."""

    peer: Peer
    num_pages: Count  # leading pages of the prompt that it has told to be in its prefix cache


class Capacity(Message, frozen=True):
    """Fixed sizes of a node. A pool has more tail pages than any one request uses."""

    num_pages: Count  # pages that requests may use (padding excluded)
    page_size: Index
    max_running: Count
    num_ranks: Annotated[Index, Since(6)] = 1  # processes that share the node's model
    # more than 1 on nodes of protocol 6 alone, whose ranks divide these pages and sequences: they are refused
    num_pools: Annotated[Index, Since(6)] = 1
    num_tails: Annotated[Count, Since(8)] = 0  # tail pages that requests may use; 0: the model has none
    tier_pages: Annotated[Count, Since(8)] = 0  # that its host and disk tiers hold at most, tail pages included

    @property
    def cached_pages(self) -> int:
        """The most pages and tail pages that its prefix cache can have."""
        return self.num_pages + self.num_tails + self.tier_pages


class RankLoad(Message, frozen=True):
    """Current load of one rank of a node of protocol 6, whose ranks have pages and sequences of their own. In later
    protocols each such rank is a node, with a load of its own."""

    free_pages: Count
    running: Count


class Load(Message, frozen=True):
    """Current load of a node, for placement and for /metrics."""

    free_pages: Count  # free or in the cache with no reference
    running: Count
    waiting: Count
    tickets: Count = 0
    queued_tokens: Count = 0  # prompt tokens still to compute
    # measured times of prompts under the present load; on a decode node, in chunks beside its streams. 0: unknown
    prompt_token_s: Annotated[Seconds, Since(6)] = 0.0  # per prompt token
    prompt_fixed_s: Annotated[Seconds, Since(6)] = 0.0  # per prompt, besides its tokens
    round_s: Annotated[Seconds, Since(6)] = 0.0  # of a round of a decode node
    has_prompt_room: Annotated[bool, Since(6)] = True  # the bound on gaps leaves room for a chunk beside the streams
    paced_prompt_tokens: Annotated[Count, Since(6)] = 0  # that prompt_token_s holds for, if more wait; 0: for all
    prompt_rest_token_s: Annotated[Seconds, Since(6)] = 0.0  # per prompt token beyond them
    # the shares of each rank in free_pages and running, of nodes of protocol 6; empty: the node has one pool
    ranks: Annotated[tuple[RankLoad, ...], Meta(max_length=MAX_RANKS), Since(6)] = ()
    free_tails: Annotated[Count, Since(8)] = 0  # tail pages, free or in the cache with no reference
    quarantined_slots: Annotated[Count, Since(8)] = 0  # of NIXL's staging ring: reads that were given up are not over
    # of a prefill node: how many prompts each router may have there at once; 0: the node does not say
    max_prompts: Annotated[Count, Since(8)] = 0
    num_routers: Annotated[Count, Since(8)] = 0  # that have given, or may give, what it has to do; 0: it does not say

    @classmethod
    def of_idle(cls, capacity: Capacity) -> Load:
        """Return the load of a node that has no work yet."""
        return cls(free_pages=capacity.num_pages, running=0, waiting=0, free_tails=capacity.num_tails)


class HostFigures(Message, frozen=True):
    """Slots of a node's host tier, those of tail pages included, and counters since the node's start."""

    num_slots: Count = 0
    num_used: Count = 0
    num_stored: Count = 0  # pages that were copied to it
    num_restored: Count = 0  # pages that were copied back into the pool
    restore_seconds: Seconds = 0.0
    num_files: Count = 0  # of the disk tier
    file_bytes: Count = 0
    files_written: Count = 0
    files_read: Count = 0
    files_damaged: Count = 0  # or gone, or another page's
    disk_failures: Count = 0


class NodeStats(Message, frozen=True):
    """Counters since the node's start, for /metrics."""

    steps: Count = 0
    prompt_tokens: Count = 0
    computed_tokens: Count = 0
    cached_tokens: Count = 0
    generated_tokens: Count = 0
    preemptions: Count = 0
    pages_moved: Count = 0
    bytes_moved: Count = 0
    checksum_failures: Count = 0
    dropped_frames: Count = 0
    transfer_seconds: Seconds = 0.0
    num_rounds: Count = 0  # speculative rounds, counted once per sequence
    num_drafted: Count = 0
    accepted_at: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()  # accepted drafts by draft position
    masked_rounds: Annotated[Count, Since(6)] = 0  # with grammars, whose masks the host filled
    late_masks: Annotated[Count, Since(6)] = 0  # of these, the rounds in which the device waited for the masks
    mask_seconds: Annotated[Seconds, Since(6)] = 0.0
    # by rank, if each has sequences of its own: rounds in which others had some and this one had none
    idle_rounds: Annotated[tuple[Count, ...], Meta(max_length=MAX_RANKS), Since(6)] = ()
    cache_changes: Annotated[Count, Since(8)] = 0  # pages that the prefix cache stored or removed
    host: Annotated[HostFigures | None, Since(8)] = None  # None: it has no host tier
    borrowed_tokens: Annotated[Count, Since(8)] = 0  # of cached_tokens, by pages of another node


class Service(Message, frozen=True):
    """What concerns all routers of a node: requests of operators, and who sends canaries. The node repeats it in each
    heartbeat, so a router also learns what an operator has asked of another router."""

    is_cordoned: bool = False  # an operator has asked a router to drain the node
    num_flushes: Count = 0  # how often its prefix cache was emptied
    canary_router: Digest = ""  # epoch of the router that sends the routine canaries; "": the node has joined none


class CanaryToken(Message, frozen=True):
    """A token of the answer to a canary, and those that were a tie with it for the node; None: nearly all were."""

    id: TokenId
    ties: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOP_LOGPROBS)] | None = ()


class CanaryOutcome(Message, frozen=True):
    """How a canary on a node went, alone or in a pair."""

    prompt: Digest  # of its token ids: answers to other prompts are not compared
    partner: Digest = ""  # epoch of the prefill node, or of its group; "": the node was alone
    tokens: Annotated[tuple[CanaryToken, ...], Meta(max_length=MAX_CANARY_TOKENS)] = ()
    failure: Text = ""  # why there is no answer


class PoolLedger(Message, frozen=True):
    """Number of pages of each owner. The first five sum to the pool."""

    free: Count
    padding: Count
    request: Count
    ticket: Count
    cache: Count
    cache_referenced: Count  # cached pages whose reference count is not zero


class SlotLedger(Message, frozen=True):
    """Number of slots of a host tier by use: `free`, `cache` and `reading` sum to the slots."""

    free: Count
    cache: Count
    cache_in_pool: Count  # of `cache`, those whose page lies in the pool, too
    reading: Count = 0  # into which a file is read


class DiskLedger(Message, frozen=True):
    """Files of a node's disk tier, and those that are under way."""

    files: Count
    num_bytes: Count
    writing: Count
    reading: Count


class TierLedger(Message, frozen=True):
    """Slots of a node's host tier, and its files."""

    pages: SlotLedger
    tail_pages: SlotLedger | None = None  # None: the model has none
    disk: DiskLedger | None = None  # None: the node writes no files
