"""A request on the wire: ids, sampling parameters, the identity of a unit of work, and the times of its stages.

Times are durations in seconds. Clock times are not sent, because the clocks of hosts differ. Lists of times are
bounded. When one is full, `add_bounded` adds up neighbours, so that sums stay right at any length. Imports no torch.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Struct, field

from ..errors import RequestError
from .protocol import Message, Since

MAX_CONTEXT = 1 << 20  # tokens
MAX_CHOICES = 128
MAX_BATCH = 4096  # units in one message
MAX_TEXT = 4096  # characters of a Text
MAX_TOP_LOGPROBS = 20
MAX_DRAFT_STEPS = 15  # tokens drafted in a round
MAX_GRAMMAR = 256 * 1024  # characters of a grammar
MAX_STEP_ITEMS = 5000  # of llguidance: the most work for a mask of a grammar, some 0.1 s
MAX_PREEMPTIONS = 8  # listed one by one; of more, neighbours are added up

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Digest = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ids = Annotated[bytes, Meta(max_length=4 * MAX_CONTEXT)]  # int32 little-endian
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ChoiceIndex = Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
Choices = Annotated[tuple[ChoiceIndex, ...], Meta(max_length=MAX_CHOICES)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

FinishReason = Literal["stop", "length"]


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return token ids, indices or counts as little-endian int32 bytes. Raises OverflowError for a value outside
    int32."""
    column = as_column(ids)
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the ids in the bytes of `pack_ids`. Raises ValueError if the length is no multiple of 4."""
    return ids_column(data).tolist()


def ids_column(data: bytes) -> array[int]:
    """Return the same as a column, which takes a fraction of the time and memory if the ids are many."""
    column = array("i", data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def as_column(ids: Iterable[int]) -> array[int]:
    """Return ids as a column: the same object if they are one, since a copy of a million takes milliseconds."""
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)


def choice_seed(seed: int, choice: int) -> int:
    """Return the sampling seed (0..2**63-1) of one choice. Choice 0 has the request's own seed, choice c has hash(seed,
    c)."""
    if choice == 0:
        return seed
    return xxhash.xxh3_64_intdigest(f"{seed}:{choice}".encode()) >> 1


class Unit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Identity of a unit of work: one choice of one request, in one attempt."""

    rid: Name
    choice: ChoiceIndex
    attempt: Index

    def __str__(self) -> str:
        return f"{self.rid}/{self.choice}.{self.attempt}"


Units = Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]


# fields of SamplingParams that a client may leave out: then the checkpoint's generation_config.json may give them
FROM_CHECKPOINT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class SamplingParams(Message, frozen=True):
    """Parameters that choose tokens and end a choice. The router checks the values; a node may trust their bounds.

    A new parameter also needs its field in router/http/generation/types.py, and its effect in engine/sampling and
    kernels/sampling."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Index = 0  # 0: off
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] = {}
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] = ()  # eos ids included unless ignored
    num_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # None: none; 0: the sampled token's
    seed: Count = 0  # the request's; a choice samples with choice_seed(seed, choice)
    # tokens drafted per round. None: as the node is configured; 0: no speculation for this request
    draft_steps: Annotated[int, Meta(ge=0, le=MAX_DRAFT_STEPS)] | None = None
    # the language of the output, as the router has checked it: the text of a grammar that llguidance's LLMatcher takes
    grammar: Annotated[Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)] | None, Since(6)] = None


class GenerationRequest(Message, frozen=True):
    """A request as nodes get it. `received_ids` are output tokens that earlier attempts have already produced."""

    prompt_ids: Ids
    params: SamplingParams
    received_ids: Ids = b""
    cache_salt: Digest = field(name="salt", default="")  # prefix caches match only prompts of equal salt
    prompt_logprobs: bool = False  # log-probabilities of the prompt's own tokens (echo with logprobs)
    marks_drafts: Annotated[bool, Since(8)] = False  # Tokens say which tokens are accepted drafts

    def __post_init__(self) -> None:
        if len(self.prompt_ids) % 4 or len(self.received_ids) % 4:
            raise ValueError(
                f"{len(self.prompt_ids)} and {len(self.received_ids)} bytes are not int32 columns: not multiples of 4"
            )

    def token_ids(self, vocab_size: int, context_len: int) -> tuple[list[int], list[int]]:
        """Return prompt ids and received ids. Raises RequestError if a model with this vocabulary and context length
        cannot run them."""
        prompt_ids, received_ids = unpack_ids(self.prompt_ids), unpack_ids(self.received_ids)
        num_tokens = len(prompt_ids) + len(received_ids)
        if not prompt_ids or num_tokens > context_len:
            raise RequestError(
                f"a prompt of {num_tokens} tokens is outside what this node computes: 1 to {context_len} tokens"
            )
        for ids in (prompt_ids, received_ids):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise RequestError(
                    f"a prompt has token ids {min(ids)} to {max(ids)}, but the vocabulary has {vocab_size} tokens"
                )
        return prompt_ids, received_ids


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probability of a token under the unprocessed distribution, and those of the most likely tokens."""

    logprob: float
    top_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()
    top_logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()


class Preemption(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One preemption of a unit, or the sum of several in a row, with the run before it."""

    num_preemptions: Count
    num_steps: Count  # before it, since the admission or the previous preemption
    num_tokens: Count
    ran_s: Seconds
    waited_s: Seconds  # without pages
    recompute_s: Seconds  # from getting pages to its next round
    num_restored: Annotated[Count, Since(8)] = 0  # tokens whose KV came back from the host tier


TokenLogprobsColumn = Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_CONTEXT)]


class Ended(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a choice ended, and its totals."""

    reason: FinishReason
    stop_id: TokenId | None
    num_prompt: Count
    num_generated: Count
    num_cached: Count  # prompt tokens that prefill found in its prefix cache
    num_rounds: Count = 0  # speculative: how often the target verified drafts of this choice
    num_drafted: Count = 0
    num_accepted: Count = 0
    num_steps: Count = 0  # rounds on the decode node, with and without drafts
    preemptions: Annotated[tuple[Preemption, ...], Meta(max_length=MAX_PREEMPTIONS)] = ()
    # how many of the num_rounds accepted 0, 1, ... drafts, up to the longest draft; sums up to num_rounds
    accept_counts: Annotated[tuple[Count, ...], Meta(max_length=MAX_DRAFT_STEPS + 1), Since(8)] = ()
    num_restored: Annotated[Count, Since(8)] = 0  # prompt tokens whose KV the decode node had in its host tier


MAX_CHUNKS = 16


class ChunkTimes(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One chunk of a prompt, or the sum of several in a row."""

    num_chunks: Count
    num_tokens: Count
    waited_s: Seconds  # since the chunk before, or the start, while pages were offered and other prompts computed
    compute_s: Seconds  # of the whole step, which may hold chunks of other prompts


class PrefillTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Times that PrefillDone carries besides its own. `sample_s` lasts from the end of the prompt's computation to the
    message with the first tokens."""

    sample_s: Seconds = 0.0
    num_offers: Count = 0
    early_pages: Count = 0  # offered before all chunks were computed
    chunks: Annotated[tuple[ChunkTimes, ...], Meta(max_length=MAX_CHUNKS)] = ()
    num_restored: Annotated[Count, Since(8)] = 0  # cached tokens whose KV came back from the host tier


class PullTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Times that Admitted carries besides its own."""

    transport: Annotated[str, Meta(max_length=128)] = ""
    last_s: Seconds = 0.0  # from the arrival of the last offer to the check of the last page
    admit_s: Seconds = 0.0  # from that check until the first round is submitted
    num_repeated: Count = 0  # pages pulled again because of a wrong checksum


_Summed = TypeVar("_Summed", ChunkTimes, Preemption)


def add_bounded(items: list[_Summed], item: _Summed, most: int) -> None:
    """Append an item. A list of `most` items is first halved by adding up each two neighbours."""
    if len(items) >= most:
        items[:] = [_sum(*items[index : index + 2]) for index in range(0, len(items), 2)]
    items.append(item)


def _sum(first: _Summed, *others: _Summed) -> _Summed:
    rows = [msgspec.structs.astuple(item) for item in (first, *others)]
    return type(first)(*map(sum, zip(*rows, strict=True)))
