"""Causal attention over paged KV, for prefill chunks, decode steps and mixtures of them.

For a query at position p of a sequence, head h, and that sequence's keys K and values V of kv head h // group_size:

    out = sum_j softmax_j(q . K_j * scale) V_j,    j <= p  and, with a window w,  j > p - w

The scale is 1 / sqrt(head_dim), unless the model has another. A layer may have a sink per query head, a learnt number
(gpt-oss, after arXiv:2309.17453). It is one more score of the softmax, whose value is 0.

A layer's pages are one tensor `kv_layer` [num_pages, num_planes, num_kv_heads, page_size, head_dim]. Position j of a
sequence lies in slot j % page_size of page `block_table[seq, j // page_size]`. There are two planes, K and V, or one:
then the keys are also the values (MLA). Pages may be in e4m3 (fp8_pages.py). Then new tokens see their own keys and
values as they are stored, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..products.fp8 import E4M3
from ..state.fp8_pages import blocks_at, pages_at, parts_of, store_rows

# Sequences with the same few new tokens are attended together; longer ones (prefill chunks) one by one.
_GROUPED_QUERY_LEN = 16
_FUSED_KV_LEN = 16  # with fewer keys and no mask, torch's fused attention on a CPU takes scores that are NaN for none


def paged_attention_ref(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: int | None,
    positions: torch.Tensor | None = None,
    tree: Tree | None = None,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of `q` [num_tokens, num_heads, head_dim], sequences end to end: a new tensor of its shape.

    Computes in float32, one sequence at a time, and rounds to q's dtype at the end. `block_table` is [num_seqs,
    max_pages] int64. The KV of the new tokens must be stored already. Slots that a token does not see have no
    influence, even if they hold NaN.

    For new tokens of a tree, a window counts by `positions` [num_tokens] int64. `sinks` are [num_heads] float32.
    `values`: as in `paged_attention`."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_layer.shape[2]
    outputs: list[torch.Tensor] = []
    for seq, q_seq in enumerate(q.float().split(list(query_lens))):
        pages = pages_at(kv_layer, block_table[seq], q.dtype)  # [max_pages, num_planes, num_kv_heads, page_size, ...]
        planes = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : seq_lens[seq]]
        k, v = planes[0], planes[-1]  # each [num_kv_heads, seq_len, head_dim]
        if values is not None:
            rows = values[block_table[seq], 0].float().permute(1, 0, 2, 3).flatten(1, 2)[:, : seq_lens[seq]]
            v = F.pad(rows, (0, head_dim - rows.shape[-1]))
        grouped = q_seq.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("tkgd,kjd->kgtj", grouped, k) * (scale or head_dim**-0.5)
        if tree is None:
            mask = _mask(query_lens[seq], seq_lens[seq], window, seq_lens[seq], q.device)
        else:
            assert positions is not None
            tokens = slice(sum(query_lens[:seq]), sum(query_lens[: seq + 1]))
            start, seq_len = int(tree.starts[seq]), seq_lens[seq]
            mask = _tree_mask(positions[tokens], tree.visible[tokens, : seq_len - start], seq_len, window)
        weights = _softmax(scores.masked_fill(mask < 0, float("-inf")), sinks)
        out = _weighted(weights, v, mask == 0)  # [num_kv_heads, group_size, query_len, head_dim]
        outputs.append(out.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim))
    return torch.cat(outputs).to(q.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys, of the shape of `scores` [..., num_kv_heads, group_size, query_len, kv_len]. `sinks`
    are [num_heads] float32."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def _weighted(weights: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
    """Return the sums of values `v` [..., num_kv_heads, kv_len, head_dim] with `weights` [..., num_kv_heads,
    group_size, query_len, kv_len]: [..., num_kv_heads, group_size, query_len, head_dim]. `is_seen` is [..., query_len,
    kv_len]. A hidden value adds nothing, even if it is NaN. A value that is not finite makes the rows that see it NaN.
    """
    is_bad = ~v.isfinite().all(-1)  # [..., num_kv_heads, kv_len]
    sums = torch.einsum("...kgtj,...kjd->...kgtd", weights, v.masked_fill(is_bad.unsqueeze(-1), 0.0))
    sees_bad = (is_bad.unsqueeze(-2) & is_seen.unsqueeze(-3)).any(-1)  # [..., num_kv_heads, query_len]
    return sums.masked_fill(sees_bad[..., None, :, None], float("nan"))


class Tree(NamedTuple):
    """The slots that tokens of a tree see, beside all slots before the tree."""

    starts: torch.Tensor  # [num_seqs] int64, each sequence's first slot of the tree
    visible: torch.Tensor  # [num_tokens, num_columns] bool: a new token sees slot start + column


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences with the same number of new tokens, which one call attends."""

    tokens: slice | torch.Tensor  # rows of q: a slice if they lie together, else [num_seqs * query_len] int64
    num_seqs: int
    query_len: int
    kv_len: int  # of the longest sequence
    gather: torch.Tensor  # [num_planes * num_seqs * num_kv_heads * num_pages] int64, in order plane, seq, head, page
    masks: dict[int | None, torch.Tensor | None]  # per window, [num_seqs, 1, query_len, kv_len] additive; None: no mask
    is_causal: bool  # the plain triangle; masks are not used


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The inputs that all layers of one forward share: slots of new KV, blocks to gather, and masks."""

    store: torch.Tensor  # [num_tokens * num_planes * num_kv_heads] int64, slot rows in order token, plane, head
    fresh_pages: torch.Tensor | None  # [n] int64, pages that this forward begins and does not fill
    groups: tuple[_Group, ...]

    @classmethod
    def build(
        cls,
        block_table: torch.Tensor,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        *,
        page_size: int,
        num_kv_heads: int,
        windows: frozenset[int | None],
        dtype: torch.dtype,
        positions: torch.Tensor | None = None,
        tree: Tree | None = None,
        num_planes: int = 2,
    ) -> AttentionPlan:
        """`block_table` [num_seqs, max_pages] int64; `seq_lens` are the lengths after this forward. A tree has the same
        number of new tokens, with their `positions`, in every sequence."""
        device = block_table.device
        members: dict[tuple[int, int], list[int]] = {}
        for seq, query_len in enumerate(query_lens):
            members.setdefault((query_len, 0 if query_len <= _GROUPED_QUERY_LEN else seq), []).append(seq)
        starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        groups: list[_Group] = []
        for (query_len, _), seqs in members.items():
            lens = [seq_lens[seq] for seq in seqs]
            pages = block_table if len(seqs) == len(seq_lens) else block_table[seqs]
            is_causal = tree is None and query_len > 1 and set(lens) == {query_len} and windows == {None}
            masks: dict[int | None, torch.Tensor | None] = {}
            if tree is not None:
                assert positions is not None
                masks = {w: _tree_masks(tree, positions, seqs, query_len, lens, w, dtype) for w in windows}
            elif not is_causal:
                masks = {w: _group_mask(query_len, lens, w, device, dtype) for w in windows}
            groups.append(
                _Group(
                    tokens=_rows(seqs, starts, query_len, device),
                    num_seqs=len(seqs),
                    query_len=query_len,
                    kv_len=max(lens),
                    gather=_gather_index(pages, lens, page_size, num_kv_heads, num_planes),
                    masks=masks,
                    is_causal=is_causal,
                )
            )
        return cls(
            store=_store_index(block_table, query_lens, seq_lens, page_size, num_planes * num_kv_heads),
            fresh_pages=_fresh_pages(block_table, query_lens, seq_lens, page_size),
            groups=tuple(groups),
        )

    def seeing(self, seen: torch.Tensor, dtype: torch.dtype) -> AttentionPlan:
        """Return the plan of the same forward without windows whose tokens see `seen` [num_tokens, num_slots] bool."""
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

        def own(group: _Group) -> _Group:
            mask = hidden[group.tokens].view(group.num_seqs, 1, group.query_len, -1)[..., : group.kv_len]
            return replace(group, masks={None: mask.contiguous()}, is_causal=False)

        return replace(self, groups=tuple(map(own, self.groups)))


def store_kv(kv_new: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan) -> None:
    """Write the new tokens' keys and values: `kv_new` [num_tokens, num_planes * num_kv_heads, head_dim], keys
    first."""
    head_dim = kv_layer.shape[-1]
    assert kv_new.shape[0] * kv_new.shape[1] == plan.store.shape[0], (kv_new.shape, plan.store.shape)
    rows = kv_new.reshape(-1, head_dim)
    if kv_layer.dtype == E4M3:
        store_rows(rows, kv_layer, plan.store)
    else:
        kv_layer.view(-1, head_dim).index_copy_(0, plan.store, rows)


def clear_fresh_pages(kv: torch.Tensor, plan: AttentionPlan) -> None:
    """Zero the pages that this forward begins; `kv` is the whole pool, layers first.

    Slots beyond a sequence's length are gathered and masked. An earlier owner's numbers there must be finite for that,
    because 0 * NaN is NaN."""
    if plan.fresh_pages is not None:
        for part in parts_of(kv) if kv.dtype == E4M3 else (kv,):
            part.index_fill_(1, plan.fresh_pages, 0)


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    window: int | None,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `paged_attention_ref` by few torch operations: [num_tokens, num_heads, head_dim] -> the same shape.

    `values` [num_pages, 1, num_kv_heads, page_size, value_dim]: a layer of a pool of values alone, which are narrower
    than keys. Then `kv_layer` has keys alone, and the output has zeros behind `value_dim` numbers of each head."""
    assert q.shape[1] % kv_layer.shape[2] == 0 and q.shape[2] == kv_layer.shape[4], (q.shape, kv_layer.shape)
    if len(plan.groups) == 1:
        return _attend(q, kv_layer, plan.groups[0], window, scale, sinks, values)
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.tokens] = _attend(q[group.tokens], kv_layer, group, window, scale, sinks, values)
    return out


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one query per sequence, `q` [num_seqs, num_heads, head_dim] -> the same shape.

    `k` and `v` are [num_seqs, num_kv_heads, kv_len, head_dim]; `mask` [num_seqs, 1, 1, kv_len] is additive. The query
    heads of a kv head are rows of one matrix."""
    num_seqs, num_heads, head_dim = q.shape
    grouped = q.view(num_seqs, k.shape[1], num_heads // k.shape[1], head_dim)
    of_rows = None if sinks is None else sinks.view(k.shape[1], -1)
    return _fused(grouped, k, v, mask, scale, of_rows).reshape(num_seqs, num_heads, head_dim)


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return torch's fused attention of `q` [.., num_rows, head_dim] to k and v [.., kv_len, head_dim], of q's shape.

    `sinks` are [.., num_rows] float32, of any shape that broadcasts. The kernel of a CPU tells the logarithm of each
    row's sum of exponentials, and with it what is left of the weights beside the sink."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = fused(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale)
    return (out * torch.sigmoid(log_sums - sinks).unsqueeze(-1)).to(q.dtype)


def _attend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    group: _Group,
    window: int | None,
    scale: float | None,
    sinks: torch.Tensor | None,
    values: torch.Tensor | None,
) -> torch.Tensor:
    num_pages, num_planes, num_kv_heads, page_size, head_dim = kv_layer.shape
    num_seqs, query_len = group.num_seqs, group.query_len
    if kv_layer.dtype == E4M3:
        gathered = blocks_at(kv_layer, group.gather, q.dtype)
    else:
        blocks = kv_layer.view(num_pages * num_planes * num_kv_heads, page_size * head_dim)
        gathered = blocks.index_select(0, group.gather)
    planes = gathered.view(num_planes, num_seqs, num_kv_heads, -1, head_dim)[:, :, :, : group.kv_len]
    k, v = planes[0], planes[-1]  # each [num_seqs, num_kv_heads, kv_len, head_dim]
    if values is not None:
        width = values.shape[-1]
        blocks = values.view(num_pages * num_kv_heads, page_size * width).index_select(0, group.gather)
        blocks = blocks.view(num_seqs, num_kv_heads, -1, width)[:, :, : group.kv_len]
        v = F.pad(blocks, (0, head_dim - width))
    mask = None if group.is_causal else group.masks[window]
    if sinks is not None and not q.is_cpu:  # no other fused kernel serves all masks and tells its sums
        return _attend_selecting(q, k, v, mask, group, scale, sinks)
    if query_len == 1:
        out = decode_attention(q, k, v, mask, scale, sinks=sinks)
    else:
        out = _attend_several(q, k, v, mask, group, scale, sinks)
    is_lost = mask is None and group.kv_len < _FUSED_KV_LEN and bool((q.sum() + k.sum()).isnan())
    if is_lost or ((mask is not None or group.is_causal) and out.sum().isnan()):
        return _attend_selecting(q, k, v, mask, group, scale, sinks)
    return out


def _attend_several(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    group: _Group,
    scale: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    (num_tokens, num_heads, head_dim), (num_seqs, query_len) = q.shape, (group.num_seqs, group.query_len)
    num_kv_heads = k.shape[1]
    group_size = num_heads // num_kv_heads
    # [num_seqs * num_kv_heads, group_size, ...]: a kv head is broadcast over its query heads, not copied
    q = q.view(num_seqs, query_len, num_kv_heads, group_size, head_dim).permute(0, 2, 3, 1, 4)
    k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1) for x in (k, v))
    if mask is not None and num_seqs > 1:
        mask = mask.repeat_interleave(num_kv_heads, 0)
    of_rows = None if sinks is None else sinks.view(num_kv_heads, group_size, 1).repeat(num_seqs, 1, 1)
    out = _fused(q.flatten(0, 1), k, v, mask, scale, of_rows, is_causal=group.is_causal)
    out = out.view(num_seqs, num_kv_heads, group_size, query_len, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_tokens, num_heads, head_dim)


def _attend_selecting(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    group: _Group,
    scale: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend so that a hidden key has no influence, even if it is NaN, and one that is seen has: after a first try that
    gave NaN, or lost it."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    grouped = q.view(group.num_seqs, group.query_len, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if mask is None:  # the plain triangle
        mask = _mask(group.query_len, group.kv_len, None, group.kv_len, q.device).expand(group.num_seqs, 1, -1, -1)
    is_seen = mask == 0  # [num_seqs, 1, query_len, kv_len]
    scores = torch.einsum("stkgd,skjd->skgtj", grouped.float(), k.float()) * (scale or head_dim**-0.5)
    weights = _softmax(scores.masked_fill(~is_seen.unsqueeze(1), float("-inf")), sinks)
    out = _weighted(weights, v.float(), is_seen.squeeze(1))  # [num_seqs, num_kv_heads, group_size, query_len, head_dim]
    return out.permute(0, 3, 1, 2, 4).reshape(num_tokens, num_heads, head_dim).to(q.dtype)


def _mask(query_len: int, seq_len: int, window: int | None, kv_len: int, device: torch.device) -> torch.Tensor:
    """Return [query_len, kv_len] float32: 0 if a query sees a key, else -inf."""
    position = torch.arange(seq_len - query_len, seq_len, device=device).unsqueeze(1)
    key = torch.arange(kv_len, device=device)
    hidden = key > position if window is None else (key > position) | (key <= position - window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _tree_masks(
    tree: Tree,
    positions: torch.Tensor,
    seqs: list[int],
    query_len: int,
    lens: list[int],
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the additive masks of `seqs`, [num_seqs, 1, query_len, kv_len]; slots beyond a length are masked."""
    kv_len, starts, masks = max(lens), tree.starts.tolist(), []
    for seq, seq_len in zip(seqs, lens, strict=True):
        tokens = slice(seq * query_len, (seq + 1) * query_len)
        mask = _tree_mask(positions[tokens], tree.visible[tokens, : seq_len - starts[seq]], seq_len, window)
        masks.append(F.pad(mask, (0, kv_len - seq_len), value=float("-inf")))
    return torch.stack(masks).unsqueeze(1).to(dtype)


def _tree_mask(positions: torch.Tensor, visible: torch.Tensor, seq_len: int, window: int | None) -> torch.Tensor:
    """Return one sequence's mask [query_len, seq_len] float32. `positions` are [query_len]; `visible` [query_len,
    num_columns] speaks of the last slots. A window counts slots before the new tokens as positions."""
    num_new, num_columns = visible.shape
    slots = torch.arange(seq_len - num_new, device=positions.device)
    seen = torch.cat((visible.new_ones(num_new, seq_len - num_columns), visible), dim=1)
    if window is not None:
        seen = seen & (torch.cat((slots, positions)) > positions.unsqueeze(1) - window)
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))


def _group_mask(
    query_len: int, lens: list[int], window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    kv_len = max(lens)
    if query_len == 1 and min(lens) == kv_len and (window is None or window >= kv_len):
        return None
    masks = [_mask(query_len, seq_len, window, kv_len, device) for seq_len in lens]
    return torch.stack(masks).unsqueeze(1).to(dtype)


def _rows(seqs: list[int], starts: list[int], query_len: int, device: torch.device) -> slice | torch.Tensor:
    if seqs == list(range(seqs[0], seqs[-1] + 1)):
        return slice(starts[seqs[0]], starts[seqs[-1]] + query_len)
    first = torch.tensor([starts[seq] for seq in seqs], device=device).unsqueeze(1)
    return (first + torch.arange(query_len, device=device)).flatten()


def _gather_index(
    pages: torch.Tensor, lens: list[int], page_size: int, num_kv_heads: int, num_planes: int
) -> torch.Tensor:
    """Return the blocks to gather, in order plane, seq, head, column: [num_planes * num_seqs * num_kv_heads *
    num_columns] int64.

    They index a layer that is viewed as [num_pages * num_planes * num_kv_heads, page_size * head_dim]. There are as
    many columns as the longest sequence has pages. A sequence with fewer pages repeats its first page, which is finite
    and masked."""
    device = pages.device
    counts = [-(-seq_len // page_size) for seq_len in lens]
    pages = pages[:, : max(counts)]
    if min(counts) < max(counts):
        beyond = torch.arange(pages.shape[1], device=device) >= torch.tensor(counts, device=device).unsqueeze(1)
        pages = torch.where(beyond, pages[:, :1], pages)
    head = torch.arange(num_kv_heads, device=device).view(1, 1, num_kv_heads, 1)
    plane = torch.arange(num_planes, device=device).view(num_planes, 1, 1, 1)
    return ((pages.unsqueeze(1) * num_planes + plane) * num_kv_heads + head).flatten()


def _store_index(
    block_table: torch.Tensor,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    page_size: int,
    num_blocks: int,
) -> torch.Tensor:
    """Return the rows of new KV in a layer that is viewed as [num_pages * num_blocks * page_size, head_dim], with
    `num_blocks` of num_planes * num_kv_heads."""
    device = block_table.device
    if max(query_lens) == 1:
        position = torch.tensor(seq_lens, device=device) - 1
        page = block_table.gather(1, (position // page_size).unsqueeze(1)).squeeze(1)
    else:
        spans = zip(query_lens, seq_lens, strict=True)
        position = torch.cat([torch.arange(end - length, end, device=device) for length, end in spans])
        seq = torch.repeat_interleave(torch.tensor(query_lens, device=device))
        page = block_table[seq, position // page_size]
    block = torch.arange(num_blocks, device=device)
    return ((page.unsqueeze(1) * num_blocks + block) * page_size + (position % page_size).unsqueeze(1)).flatten()


def _fresh_pages(
    block_table: torch.Tensor, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], page_size: int
) -> torch.Tensor | None:
    fresh = [
        (seq, seq_len // page_size)
        for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        if 0 < seq_len % page_size <= query_len
    ]
    if not fresh:
        return None
    seqs, columns = zip(*fresh, strict=True)
    return block_table[list(seqs), list(columns)]
