"""The engine of a node: a model, its KV pool, the pool's books, the sampler. It knows nothing of messages or roles."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs

from ..kernels.attention import history, prompt_attention
from ..kernels.operations import captures
from ..kernels.state.rows import gather_rows
from ..kernels.state.trees import move_slots_
from ..metadata.errors import ConfigError
from ..metadata.handoff.memory import PageMemory
from ..metadata.handoff.pages import DevicePool
from ..metadata.handoff.schema.hidden_layout import HiddenDtype
from ..metadata.handoff.schema.kv_layout import DTYPE_BYTES, KvLayout, Shard
from ..metadata.handoff.schema.schema import (
    are_tails,
    further_pools,
    kv_layouts,
    on_gpu,
    page_bytes,
    pools,
    tail_window,
)
from ..metadata.logs import size_in_words
from ..metadata.wire.node_info import HandoffSchema, ModelCard
from ..metadata.wire.request import TokenLogprobs
from .attention.context import AttentionContext
from .attention.latent_pieces import is_faster, piece_size
from .attention.paged import longest_rehearsal
from .background import begin
from .checkpoint.fingerprint import fingerprint, fingerprint_of
from .checkpoint.hub import name_of
from .checkpoint.made_checkpoint import FILES
from .checkpoint.model_card import read_card
from .checkpoint.model_check import longest_context, resolve_model
from .checkpoint.model_config import VALUES, ModelConfig
from .checkpoint.quantization import chosen
from .checkpoint.read_config import read_model_config
from .config import SHARING, EngineConfig
from .device import SCORED_AT_ONCE, choose_device, choose_dtype, kind_of
from .drafters.base import PromptChunk, PromptTail
from .drafters.family import Speculation
from .drafters.speculation import LONGEST_PATH, read_speculation
from .layers.delta_net import store_passed_states
from .models.decoder import DecoderModel
from .models.registry import load_model
from .progress import Progress
from .prompts.graphs import PromptGraphs
from .prompts.sizes import NO_PROMPT_SIZES, PromptSizes, bucket_sizes
from .ranks.ranks import ONE_RANK, Ranks
from .ranks.steps import GroupSteps
from .rounds.batch import Computed, ForwardBatch, MixedBatch
from .sampling.batch import SamplingBatch
from .sampling.grammar import Grammars
from .sampling.logprobs import Logprobs, compute_logprobs
from .sampling.row_shares import RowShares
from .sampling.sampling import SubmittedSample
from .sampling.state import SamplingState, each_kind
from .state.cuda_memory import pool_zeros
from .state.cuda_pool import CudaPool
from .state.host_memory import available_memory
from .state.model_pools import ModelPools
from .state.pages import Owner, PagePool, pages_in
from .state.prefix_cache import PrefixCache
from .state.tail_pages import Windows, tails_beside
from .tiers.cuda_copies import CudaCopies
from .tiers.host_copies import HostCopies
from .tiers.host_tier import HostTier
from .tiers.pinned_memory import grant
from .work import MAX_MISSED, BatchRow

logger = logging.getLogger(__name__)

MIN_LEASE_S = 1.0
LEASE_STEPS = 8  # a decode node that recomputes a chunk renews no lease meanwhile
_DEFAULT_POOL_TOKENS = 65_536
_PROCESSES_OF_HOST = "pid:[4026531836]"  # the namespace of a machine's first process (linux/proc_ns.h)
_MEMORY_SHARE = 0.25  # of what is free, for a pool of the default size
_STEP_LEN = 512  # tokens of a sequence in `padding_step`
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Computes rows of a batch over the paged pool and samples. One thread; `kv` is on `device`.

    Raises ModelError when the checkpoint cannot be served and ConfigError when the settings cannot work with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        ranks: Ranks = ONE_RANK,
        *,
        num_pages: int | None = None,
    ) -> None:
        """`num_pages`: of the first pools, if `resize` makes others later; None: as configured."""
        self.model_dir = resolve_model(config.model)
        of_files = read_target(self.model_dir, config)
        self.model_config = of_files.with_states(config.state_dtype)
        self.device = choose_device(config.device)
        self.kind = kind_of(self.device)
        self.dtype_name: HiddenDtype = choose_dtype(config.dtype, self.device, self.model_config.checkpoint_dtype)
        self.speculation = read_speculation(config, self.model_dir, self.model_config, self.dtype_name)
        _check_kernels(self.device, self.model_config, self.speculation)
        if not self.speculation.frozen_layers:  # these are read at any position by a drafter
            self.model_config = self.model_config.with_tail()
        if not self.speculation.shape.is_chain:
            self.model_config = self.model_config.with_trees(LONGEST_PATH)
        self.page_size = self.model_config.page_size(config.page_size)
        schema = self._schema(config)
        self.schema = on_gpu(schema) if self.kind.is_apart else schema
        self.context_len = longest_context(config, self.model_config)
        if self.speculation.draft is not None:
            ranks.of_drafts.check(self.speculation.draft)
        self._config, self._ranks = config, ranks
        dtype = _DTYPES[self.dtype_name]
        num_pages = (
            num_pages
            or config.num_pages
            or _default_num_pages(self.context_len, self.schema, self.device, ranks.num_nodes, self._num_tails)
        )
        _check_size(num_pages)
        fingerprints: Future[tuple[str, str | None]] | None = None
        if ranks.group.rank == 0 or ranks.rows is not None:  # the others say no hello
            fingerprints = begin(lambda: (self._fingerprint(of_files), self.speculation.fingerprint), "fingerprints")
        self.model = self._load_model(dtype, progress)
        self._fingerprints = fingerprints
        self.card: ModelCard = read_card(
            self.model_dir, self.model_config, config.model_name or name_of(self.model_dir), self.context_len
        )
        self.grammars = Grammars(self.model_dir, self.model_config.vocab_size, self.model_config.eos_token_ids)
        self.lease_s = MIN_LEASE_S
        self.longest_chunk: tuple[int, float] | None = None  # its tokens and seconds, sampling included
        self._bytes_per_row = 0.0  # working memory of a forward, by the rows of all ranks of a group; 0: not measured
        self._make_pools(num_pages)
        self.drafter = self.speculation.load(self.model, self.target_pools, self.draft_pools, progress, ranks.of_drafts)
        self._prompt_graphs: PromptGraphs | None = None

    def _schema(self, config: EngineConfig) -> HandoffSchema:
        target = self.model_config.pool(self.dtype_name, config.kv_dtype, self.page_size)
        return self.speculation.schema(target, self.page_size, checksums=config.checksums, kv_dtype=config.kv_dtype)

    def _load_model(self, dtype: torch.dtype, progress: Progress | None) -> DecoderModel:
        """Load the target. A GPU plans the attention of prompts meanwhile: in this thread, as plans belong to one."""
        load = functools.partial(
            load_model,
            self.model_dir,
            self.model_config,
            dtype,
            self.device,
            progress,
            self._ranks,
            load_format=self._config.load_format,
        )
        if not self.captures:
            return load()
        loading = begin(load, "weights")
        self._plan_prompts(min(self._config.chunk(self.device.type), self.context_len), dtype)
        return loading.result()

    def _fingerprint(self, config: ModelConfig) -> str:
        load_format = self._config.load_format
        if load_format == FILES:
            return fingerprint(self.model_dir, config)
        made = f"{load_format} on {self.device.type}"  # devices draw other numbers
        return fingerprint_of(config, {"": made.encode()})

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs can hold forwards and rounds, because the host reads nothing of them."""
        return captures(self.device)

    @property
    def rounds_coarsely(self) -> bool:
        """Whether nodes of this model that compute rightly may differ by more than its types say."""
        return self.model_config.rounds_coarsely(self.dtype_name, self._config.kv_dtype)

    @property
    def fingerprints(self) -> tuple[str, str | None]:
        """Digests of the weights of target and draft. They are made beside the start, and this waits for them. The
        process of a node has them."""
        assert self._fingerprints is not None, "only a node digests the weights"
        return self._fingerprints.result()

    @property
    def shard(self) -> Shard:
        """The heads of every page that lie in the pools of this process. The schema describes the whole page."""
        return self._ranks.of_heads

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return self._ranks.group.size

    @property
    def num_nodes(self) -> int:
        """Ranks that are nodes of their own, each with such an engine."""
        return self._ranks.num_nodes

    @property
    def group_steps(self) -> GroupSteps | None:
        """The steps that this rank takes together with other nodes; None: it takes none."""
        return self._ranks.steps

    @property
    def lens(self) -> tuple[int, ...]:
        """Rows of each rank in the forward that runs; none if all ranks have the same rows."""
        return self._ranks.lens

    def resize(self, num_pages: int) -> None:
        """Make the pools again, with `num_pages` pages. No page may be in use. What was made of the pools before,
        graphs and endpoints, is void. Raises ConfigError if the device or the host lacks the memory."""
        assert self.pool.num_free == self.pool.num_usable, self.pool.ledger()
        self._prompt_graphs = self.device_pool = None
        self._pools.clear()
        self.target_pools = self.draft_pools = ModelPools(torch.empty(0, device=self.device))
        if self.drafter is not None:
            self.drafter.use_pools(self.target_pools, self.draft_pools)
        for memory in self.memory:
            memory.close()
        self._make_pools(num_pages)
        if self.drafter is not None:
            self.drafter.use_pools(self.target_pools, self.draft_pools)

    def _make_pools(self, num_pages: int) -> None:
        """Make pools, their books and what lies in front of them. A request may be as long as the pool."""
        config, page_size = self._config, self.page_size
        num_pages = self._ranks.least(num_pages)
        _check_size(num_pages)
        self.context_len = min(longest_context(config, self.model_config), (num_pages - 1) * page_size)
        self.card = structs.replace(self.card, context_len=self.context_len)
        self.device_pool: DevicePool | None = None
        layouts = [layout.part_of(self.shard) for layout in kv_layouts(self.schema)]
        num_tails = self._num_tails(num_pages)
        counts = [num_tails if is_tail else num_pages for is_tail in are_tails(self.schema)]
        self.memory = [  # on a GPU: the host mirror of its pools
            PageMemory(layout, count, num_pages if is_tail else 0, num_counted=num_pages + num_tails)
            for layout, count, is_tail in zip(layouts, counts, are_tails(self.schema), strict=True)
        ]
        if self.kind.is_apart:
            self._pools = _on_gpu(layouts, counts, self.device, is_given=config.num_pages is not None)
            self.device_pool = CudaPool(self._pools, self.memory, has_checksums=self._config.checksums)
        else:
            self._pools = [torch.from_numpy(memory.pages) for memory in self.memory]
        self.target_pools, self.draft_pools = self._by_owner(map(_values, self._pools, layouts))
        self.pool = PagePool(num_pages, page_size, self.memory[0].generations, num_tails=num_tails)
        self.cache = PrefixCache(self.pool, self.schema.key_lookahead, enabled=config.prefix_cache)

    def open_tier(self, num_bytes: int, *, is_shared: bool = False) -> None:
        """Give the prefix cache a host tier of `num_bytes` bytes, with tail pages in the proportion of the pools. Call
        it when the pools have their size. `is_shared`: rank 0 of this node maps the slots, too."""
        got = grant(num_bytes, is_pinned=self.kind.is_apart)
        fitting = got.num_bytes * self.pool.num_pages // self.bytes_of(self.pool.num_pages)
        num_slots = self._ranks.least(fitting)
        num_tails = num_slots * self.pool.num_tails // self.pool.num_pages
        if self.kind.is_apart:
            copies = CudaCopies(self._pools, self.memory, num_slots, num_tails, is_shared=is_shared)
        else:
            copies = HostCopies(self.memory, num_slots, num_tails, is_shared=is_shared)
        self.cache.tier = HostTier(copies)
        words = f"host tier: {size_in_words(num_bytes)} asked for, {num_slots} pages and {num_tails} tail pages"
        if got.reason:
            logger.warning("%s: %s", words, got.reason)
        else:
            logger.info("%s", words)

    def _by_owner(self, tensors: Iterable[torch.Tensor]) -> tuple[ModelPools, ModelPools | None]:
        """Return the pools of target and draft, given all in the order of the schema."""
        named = dict(zip(pools(self.schema), tensors, strict=True))
        return _of_owner(named, "target"), None if self.schema.draft is None else _of_owner(named, "draft")

    def warm_up(self, chunk_tokens: int) -> None:
        """Run steps and a chunk, on CUDA by the drafter too, so that no request pays for first calls, and no node falls
        silent while a kernel compiles. Sets `lease_s` and `longest_chunk`."""
        num_pages = min(-(-chunk_tokens // self.pool.page_size), self.pool.num_free)
        pages = self.pool.allocate(num_pages, Owner.REQUEST)
        num_tokens = min(chunk_tokens, num_pages * self.pool.page_size, self.context_len)
        step_s = 0.0
        sizes = [size for size in self.kind.warm_up_sizes if size < num_tokens] or [1]
        for num_new in (*sizes, num_tokens, num_tokens):
            started = time.monotonic()
            self._ranks.announce(num_new)
            computed = self.compute([BatchRow([0] * num_new, 0, pages, tail=())])
            for state in each_kind(self.model_config.vocab_size):
                self.sample(computed.logits, [state])
            self._warm_up_drafter(num_new, pages, computed.extend)
            step_s = time.monotonic() - started
            if computed.final is not None:
                scored = computed.final[: self.kind.num_warm_up_scores]
                self.score(scored, torch.zeros(len(scored), dtype=torch.int64, device=self.device), 1)
        self.lease_s = max(MIN_LEASE_S, LEASE_STEPS * step_s)
        self.longest_chunk = num_tokens, step_s
        self._warm_up_history(num_tokens, pages)
        if self.num_nodes > 1 and self.kind.is_apart:  # rows of unlike numbers are padded, which takes memory
            self.compute([BatchRow([0] * self._ranks.announce_longest(num_tokens), 0, pages, tail=())])
            row = torch.zeros(1, self.model_config.hidden_size, dtype=_DTYPES[self.dtype_name], device=self.device)
            self._ranks.rehearse_exchanges(row, num_tokens + num_tokens // 4)  # rounds share the forward of a chunk
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._ranks.announce(num_tokens)
            self.compute([BatchRow([0] * num_tokens, 0, pages, tail=())])
            peak = torch.cuda.max_memory_allocated(self.device) - before
            self._bytes_per_row = peak / (num_tokens * self.num_nodes)
        self.pool.release(pages)

    def capture_prompts(self, progress: Progress | None = None) -> None:
        """Capture graphs for small chunks, on CUDA. `progress` counts them. Call it after `warm_up`, on a node that
        computes prompts."""

        def run(batch: ForwardBatch) -> Computed:
            self.announce(batch.num_tokens)
            return self.compute_batch(batch)

        if self.captures:
            quantization, num_shards = self.model_config.quantization, self._ranks.num_head_shards
            is_fp8 = quantization is not None and quantization.rounding != "none"
            sizes = bucket_sizes(self.model_config.layer_products, num_shards, is_fp8=is_fp8)
            shape = self.pool.page_size, self.context_len
            self._prompt_graphs = PromptGraphs(
                run, sizes, *shape, self.device, progress, has_tails=self.tail_window > 0
            )

    @property
    def prompt_sizes(self) -> PromptSizes:
        """The chunks for which there are graphs."""
        return NO_PROMPT_SIZES if self._prompt_graphs is None else self._prompt_graphs.sizes

    def _plan_prompts(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Let the fused attention of prompts plan every shape that it will meet in chunks of up to `num_tokens`."""
        config = self._ranks.own(self.model_config)
        if config.latent is not None or not prompt_attention.serves(self.device, dtype, config.head_dim):
            return
        num_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = torch.zeros(num_tokens, sum(num_heads), config.head_dim, dtype=dtype, device=self.device)
        for num_seqs, length in prompt_attention.shapes(num_tokens):
            q, k, v = qkv[: num_seqs * length].split(num_heads, dim=1)
            prompt_attention.prompt_attention(q, k, v, num_seqs)
        if history.serves(self.device, dtype, config.head_dim):
            layouts = [layout.part_of(self.shard) for layout in kv_layouts(self.schema)]
            pages = (
                qkv.new_zeros((layout.num_layers, 1, layout.page_layer_bytes), dtype=torch.uint8) for layout in layouts
            )
            page = self._by_owner(map(_values, pages, layouts))[0]
            values = None if page.values is None else page.values[0]
            history.plan(num_tokens, config.num_heads, page.kv[0], dtype, values)

    def _warm_up_history(self, num_tokens: int, pages: list[int]) -> None:
        """On CUDA, run chunks behind the histories that need most working memory. The pool need not hold the histories:
        all their pages are the first one of `pages`."""
        context_len, page_size = longest_context(self._config, self.model_config), self.pool.page_size
        config, num_seqs = self._ranks.own(self.model_config), 1
        if not self.captures:
            return
        if config.index is not None:
            rate = 1 if config.compressed is None else config.compressed.sparse_rate
            num_before = min(context_len, longest_rehearsal(config.index, num_tokens, rate)) - num_tokens
            takes = num_before > 0
        elif config.latent is not None:
            most = piece_size(config.latent, config.num_heads, self.kv.itemsize) + page_size
            num_seqs = -(-most // context_len)
            num_tokens = num_tokens // num_seqs
            num_before = min(context_len, most) - num_tokens
            takes = num_before > 0 and is_faster(config.latent, [num_tokens] * num_seqs, [num_before] * num_seqs)
        else:
            num_before = min(history.longest_rehearsal(), context_len - num_tokens)
            serves = history.serves(self.device, _DTYPES[self.dtype_name], config.head_dim)
            takes = serves and history.takes(num_tokens, num_before)
        if not takes:
            return
        table = [pages[0]] * (num_before // page_size) + pages + [pages[0]]
        self._ranks.announce(num_tokens * num_seqs)
        computed = self.compute([BatchRow([0] * num_tokens, num_before, table, tail=())] * num_seqs)
        if self.drafter is not None:
            chunk = PromptChunk([0] * (num_before + num_tokens), num_before, num_before + num_tokens, table)
            with torch.inference_mode():
                self.drafter.observe_prompt([chunk] * num_seqs, computed.extend)

    def _warm_up_drafter(self, num_tokens: int, pages: list[int], extend: torch.Tensor | None) -> None:
        if self.drafter is None or not self.kind.is_apart:
            return
        ids, num_rows = [0] * num_tokens, self.drafter.hidden.num_target_rows
        rows, last = (None, None) if extend is None else (extend[-1 - num_rows : -1], extend[-1:])
        with torch.inference_mode():
            self.drafter.observe_prompt([PromptChunk(ids, 0, num_tokens, pages)], extend)
            tails, tokens = [PromptTail(ids, pages, rows)], torch.zeros(1, dtype=torch.int64, device=self.device)
            for state in each_kind(self.model_config.vocab_size):  # a reduced vocabulary has kernels of its own
                self.drafter.finish_prompt(tails, tokens, last, SamplingBatch.of([state], self.device))

    def announce(self, num_rows: int) -> None:
        """Say that a forward of `num_rows` rows comes next, on every rank of the node that has sequences of its own."""
        self._ranks.announce(num_rows)

    def end_forward(self) -> None:
        """A forward of the target is submitted, directly or as a graph, as `GroupSteps.end_forward`."""
        if self._ranks.steps is not None:
            self._ranks.steps.end_forward()

    @property
    def row_shares(self) -> RowShares | None:
        """The ranks that divide the rows which are sampled; None: every rank samples its own. On GPUs no rank divides
        them: whether that pays was not measured there."""
        return None if self.kind.is_apart else self._ranks.row_shares

    def check(self) -> None:
        """Raise RuntimeError if results that the device has computed are wrong, because another rank is gone."""
        if self._ranks.group.size > 1:
            self._ranks.group.check()

    @property
    def window(self) -> int | None:
        """Positions that the layers of target and drafter see at most; None: some layer sees all."""
        configs = [each for each in (self.model_config, self.speculation.draft) if each is not None]
        windows = [window for config in configs for window in config.sliding_window]
        if any(config.further for config in configs):
            return None  # their readers see all
        return None if None in windows else max(filter(None, windows))

    @property
    def tail_window(self) -> int:
        """Positions that the layers with tail pages see; 0: there are no such layers."""
        return tail_window(self.schema)

    @property
    def held_window(self) -> int:
        """Positions whose tail pages a sequence holds: `tail_window` and, if the drafter has KV there, the rows that it
        may catch up on."""
        return self.tail_window + (MAX_MISSED if self.has_draft_tails else 0)

    @property
    def windows(self) -> Windows:
        """How many positions the layers read back."""
        return Windows(self.window, self.tail_window, self.held_window)

    @property
    def draft_window(self) -> int:
        """Positions that a drafter with KV in tail pages reads back; 0: there is none."""
        return 0 if self.schema.draft is None else self.schema.draft.window

    @property
    def has_draft_tails(self) -> bool:
        """Whether tail pages have KV of the drafter, which depends on the first token of a choice."""
        return self.draft_window > 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in the pools of this process, tail pages not counted."""
        return self._bytes_of(is_tail=False)

    def bytes_of(self, num_pages: int) -> int:
        """Return the bytes of the pools of this process with `num_pages` pages and the tail pages beside them."""
        return num_pages * self.page_bytes + self._num_tails(num_pages) * self._bytes_of(is_tail=True)

    def _bytes_of(self, *, is_tail: bool) -> int:
        layouts = zip(kv_layouts(self.schema), are_tails(self.schema), strict=True)
        return sum(layout.part_of(self.shard).page_bytes for layout, of_tail in layouts if of_tail == is_tail)

    def _num_tails(self, num_pages: int) -> int:
        """Return how many tail pages lie beside `num_pages` pages."""
        if not self.tail_window:
            return 0
        return tails_beside(
            num_pages,
            self.held_window,
            self.page_size,
            num_new=3 * (1 + self.speculation.shape.num_slots),
            chunk_len=self._config.chunk(self.device.type),
            max_running=self._config.max_running,
            relative_size=self._bytes_of(is_tail=True) / self.page_bytes,
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools on the device."""
        return sum(pool.nbytes for pool in self._pools)

    @property
    def kvs(self) -> tuple[torch.Tensor, ...]:
        """All pools of target and draft."""
        return self.target_pools.all + (() if self.draft_pools is None else self.draft_pools.all)

    @property
    def kv(self) -> torch.Tensor:
        """The target's pool, [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim]. If it is of e4m3,
        its scales lie behind it (kernels/state/fp8_pages.py)."""
        return self.target_pools.kv

    def forward(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Store the rows' KV; return their logits, [sum of num_logits, vocab_size] of the model's dtype, in order."""
        return self.compute(rows).logits

    def compute(self, rows: Sequence[BatchRow]) -> Computed:
        """Store the rows' KV; return their logits and the states that a drafter needs of their tokens."""
        assert not self.tail_window or all(row.tail is not None for row in rows), "a row lacks its tail pages"
        computed = None
        if self._prompt_graphs is not None and len(set(self.lens)) <= 1:  # a graph has as many rows of each rank
            computed = self._prompt_graphs.compute(rows, *self.lens[:1])
        if computed is not None:
            self.end_forward()
        return computed or self.compute_batch(ForwardBatch.build(rows, self.pool.page_size, self.device))

    def has_room(self, num_rows: int) -> bool:
        """Whether the device has the working memory of a forward of `num_rows` rows, those of all ranks together."""
        with suppress(torch.OutOfMemoryError):
            torch.empty(int(num_rows * self._bytes_per_row), dtype=torch.uint8, device=self.device)
            return True
        return False

    def compute_nothing(self) -> None:
        """Take part in the forward of other ranks without a row."""
        with torch.inference_mode():
            self.compute([])

    def compute_batch(self, batch: ForwardBatch) -> Computed:
        """Do the work of `compute` for a batch. If our compiled kernels serve, the host reads nothing of a tensor."""
        extend, final = self.states(batch)
        last = final
        if batch.logit_rows is not None and batch.logit_rows.shape[0] != final.shape[0]:
            [last] = gather_rows([final], batch.logit_rows)
        return Computed(extend, self.model.logits(last), final)

    def score(self, final: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
        """Return `compute_logprobs` of the logits of `final` [num_rows, hidden_size], states after the final norm, in
        host memory, there after the next `recorded_event` (device.py). No more than SCORED_AT_ONCE rows of logits exist
        at a time."""
        parts = [
            compute_logprobs(self.model.logits(states), ids, num_top)
            for states, ids in zip(final.split(SCORED_AT_ONCE), token_ids.split(SCORED_AT_ONCE), strict=True)
        ]
        return Logprobs(*map(torch.cat, zip(*parts, strict=True))).to_host()

    def states(self, batch: ForwardBatch | MixedBatch) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The state that the target hands to draft extend, [num_tokens, width] (None where no drafter wants one), and
        its hidden states after the final norm [num_tokens, hidden_size]."""
        states = self.model.forward_with_aux(batch, self.target_pools, self.speculation.aux_layers)
        self.end_forward()
        match self.speculation.hidden.extend:
            case None:
                return None, states.final
            case "aux":
                extend = torch.cat(states.aux, dim=1)
            case "final":
                extend = states.final
            case _:
                extend = states.handoff
        self.speculation.hidden.check("extend", extend)
        return extend, states.final

    def padding_step(self, num_rows: int) -> AttentionContext:
        """Return the attention of a decode step of `num_rows` sequences that have the padding page alone."""
        length = min(_STEP_LEN, self.context_len)
        numbers = torch.zeros(num_rows, -(-length // self.pool.page_size), dtype=torch.int64, device=self.device)
        last = torch.full((num_rows, 1), length - 1, device=self.device)
        batch = ForwardBatch.uniform(numbers[:, :1], last, last.squeeze(1) + 1, numbers, self.pool.page_size)
        return self.model.begin(batch, self.target_pools)

    def sample(
        self, logits: torch.Tensor, states: Sequence[SamplingState]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """One token for each row of `logits` [num_rows, vocab_size], None for a row whose logits are not numbers; and
        its log-probabilities where asked for."""
        with torch.inference_mode():
            submitted = SubmittedSample.of(logits, SamplingBatch.of(states, self.device))
            return submitted.read([state.params.num_logprobs for state in states])

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page into another in all pools that have them: both are kept pages, or tail pages."""
        for pool, memory in zip(self._pools, self.memory, strict=True):
            if memory.holds(source):
                pool[:, target - memory.first].copy_(pool[:, source - memory.first])

    def move_kv(
        self,
        block_table: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        tail_table: torch.Tensor | None = None,
    ) -> None:
        """Copy slots `sources` into slots `targets`, which follow the roots of trees, in every pool of the target, as
        `move_slots_ref_` does in one. A recurrent state passes the edges on the way."""
        for pool in self.target_pools.all:
            table = tail_table if tail_table is not None and self.has_tail_pages(pool) else block_table
            move_slots_(pool, table, sources, targets)
        if (delta := self.model_config.delta) is not None:
            table, num_new = block_table if tail_table is None else tail_table, 1 + targets.shape[1]
            starts, further = targets[:, 0] - 1, self.target_pools.further
            store_passed_states(delta, further, table, starts, num_new, self.page_size)

    def has_tail_pages(self, pool: torch.Tensor) -> bool:
        """Return whether a pool of target or draft has tail pages."""
        if self.draft_pools is not None and any(each is pool for each in self.draft_pools.all):
            return self.has_draft_tails
        windows = {name: each.window for name, each in further_pools(self.schema).items()}
        return any(each is pool and windows[f"target.{name}"] for name, each in self.target_pools.further.items())


def use_threads(config: EngineConfig) -> None:
    """Set how many threads of this process compute, as configured or half of the cores, which ranks share."""
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 2) // (2 * config.num_ranks)))


def read_target(model_dir: Path, config: EngineConfig) -> ModelConfig:
    """Read the configuration of the checkpoint in `model_dir`, with the quantization that is asked for."""
    model = read_model_config(model_dir)
    return replace(model, quantization=chosen(model.quantization, config.quantization))


def _check_kernels(device: torch.device, target: ModelConfig, speculation: Speculation) -> None:
    """Raise ConfigError if the target needs kernels that a GPU does not have."""
    if device.type == "cuda" and target.delta is not None and not speculation.shape.is_chain:
        raise ConfigError(
            f"draft_topk is {speculation.shape.topk}, but on a GPU layers with a gated delta rule, as "
            f"{target.architecture} has, verify chains alone; use --draft-topk 1"
        )


def _check_size(num_pages: int) -> None:
    if num_pages < 3:
        raise ConfigError(f"num_pages {num_pages} is too small: use 3 or more (one of them is padding)")


def _on_gpu(
    layouts: Sequence[KvLayout], counts: Sequence[int], device: torch.device, *, is_given: bool
) -> list[torch.Tensor]:
    """Return pools of zeros on a GPU, one per layout, with its count of pages, uint8 [num_layers, num_pages,
    page_layer_bytes]. Raises ConfigError if they do not fit. `is_given`: the operator chose the pages."""
    pools = list(zip(layouts, counts, strict=True))
    with suppress(torch.OutOfMemoryError):
        shapes = [(layout.num_layers, count, layout.page_layer_bytes) for layout, count in pools]
        return [pool_zeros(shape, torch.uint8, device) for shape in shapes]
    num_pages, needed = counts[0], sum(count * layout.page_bytes for layout, count in pools)
    free = torch.cuda.mem_get_info(device)[0]
    has = f"{size_in_words(needed)}, and this GPU has {size_in_words(free)} free"
    if is_given:
        advice = f"use {num_pages * free // needed} pages or fewer, or leave out --num-pages"
        raise ConfigError(f"num_pages {num_pages} need {has}; {advice}")
    raise ConfigError(f"the KV of this node needs {has}; if other processes use this GPU, {SHARING}")


def _values(pool: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Return the values in a pool, uint8 [num_layers, num_pages, page_layer_bytes], as a view: [num_layers, num_pages,
    num_planes, num_kv_heads, page_size, head_dim] of the planes' dtype."""
    plane, shape = layout.planes[0], layout.stacked_shape(pool.shape[1])
    blocks = pool.unflatten(2, (*shape[2:4], layout.block_bytes(plane)))
    num_bytes = layout.page_size * plane.head_dim * DTYPE_BYTES[plane.dtype]
    return blocks[..., :num_bytes].view(getattr(torch, plane.dtype)).unflatten(4, shape[4:])


def _of_owner(named: Mapping[str, torch.Tensor], owner: str) -> ModelPools:
    """Return the pools of target or draft, given all by the names of the schema."""
    further = {name.removeprefix(f"{owner}."): pool for name, pool in named.items() if name.startswith(f"{owner}.")}
    return ModelPools(named[owner], values=further.pop(VALUES, None), further=further)


def _default_num_pages(
    context_len: int,
    schema: HandoffSchema,
    device: torch.device,
    num_nodes: int = 1,
    num_tails: Callable[[int], int] = lambda _: 0,
) -> int:
    """Return the pages of four contexts or 65,536 tokens, but no more than a quarter of the free memory (of the GPU's
    and the host's) for the pools of `num_nodes` ranks together. `num_tails` returns how many tail pages lie beside a
    number of pages.

    A node on a GPU with our compiled kernels takes what its share allows instead (memory_share.py)."""
    wanted = max(4 * context_len, _DEFAULT_POOL_TOKENS) // schema.page_size + 1
    free = available_memory()
    if kind_of(device).is_apart:
        free = min(free, torch.cuda.mem_get_info(device)[0])
    kept, tail = page_bytes(schema), page_bytes(schema, of_tails=True)
    share = int(free * _MEMORY_SHARE) // num_nodes
    num_pages = max(3, min(wanted, pages_in(share, lambda num: num * kept + num_tails(num) * tail)))
    if num_pages * schema.page_size < context_len:
        logger.warning("memory for %d tokens only: longer requests will be refused", num_pages * schema.page_size)
    return num_pages


def default_node_id(role: str) -> str:
    """Return role-host-pid, which is unique where host names are. Containers may share a host name, and their process
    ids are alike, so in a process namespace of its own a node gets random digits instead."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    number = os.getpid() if namespace == _PROCESSES_OF_HOST else secrets.token_hex(4)
    return f"{role}-{os.uname().nodename[:40]}-{number}"
