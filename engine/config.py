"""Configuration of model execution, shared by both kinds of node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..metadata.config import NodeConfig, at_least, setting
from ..metadata.errors import ConfigError
from .drafters.registry import ALGORITHMS

CHUNK_TOKENS = 512
MEMORY_SHARE = 0.9  # of a GPU, for all nodes on it together
SHARING = (  # what to do if nodes on one GPU take each other's memory
    f"start nodes that share a GPU with shares that sum to {MEMORY_SHARE} (two nodes: --memory-share "
    f"{MEMORY_SHARE / 2:.2f} each)"
)
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
KvDtype = Literal["auto", "fp8"]
StateDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(NodeConfig):
    """Settings of what a node loads. None: the program decides from the model and the machine."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 8192

    model: str | None = setting(
        None,
        "load the Hugging Face checkpoint in this directory, or download ORG/NAME from the Hugging Face hub (default: "
        "the demo model)",
        metavar="MODEL",
    )
    revision: str | None = setting(
        None,
        "of ORG/NAME, take this branch, tag or commit (default: the newest commit of its main branch)",
        metavar="REVISION",
    )
    model_name: str | None = setting(
        None, "serve the model under this name (default: ORG/NAME, or the name of its directory)"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "run the model on this device; auto takes cuda if there is a CUDA device"
    )
    dtype: DtypeChoice = setting(
        "auto", "compute in this type; auto takes float32 on cpu and the type of the checkpoint on cuda"
    )
    load_format: str = setting(
        "safetensors",
        "dummy: make random weights instead of reading files, to measure a model of which only config.json and the "
        "tokenizer are here; the text is noise; MODULE:FUNCTION: make them by a function of your own "
        "(engine/checkpoint/made_checkpoint.py)",
    )
    quantization: Literal["auto", "fp8"] = setting(
        "auto",
        "fp8: round the weights of a 16-bit checkpoint to FP8 while they are read, with a scale for each row, and the "
        "rows that they multiply as well; auto takes them as the checkpoint has them",
    )
    kv_dtype: KvDtype = setting(
        "auto",
        "fp8: keep keys and values in FP8, of target and draft, with a scale for each token and head, in about half "
        "the memory of 16 bits; auto keeps them in the type that computes with them",
    )
    state_dtype: StateDtype = setting(
        "float32",
        "keep the recurrent states of layers with a gated delta rule in this type; bfloat16 takes half the memory, and "
        "rounds a state at the end of each block of tokens",
    )
    page_size: int | None = setting(
        None,
        "hold this many tokens in a KV page; smaller pages waste less memory, larger ones need fewer copies (default: "
        "16; 64 for models with a gated delta rule or indexers; 128 for DeepSeek-V4)",
    )
    num_pages: int | None = setting(
        None,
        "keep this many KV pages in memory; more pages hold more or longer requests (default: on cuda as many as "
        "--memory-share leaves room for; on a CPU, or with BATON_TRITON=0, four contexts, if a quarter of the free "
        "memory holds them)",
    )
    memory_share: float | None = setting(
        None,
        "on cuda, take at most this share of the GPU's memory for weights, graphs, working memory and KV together; "
        "unless --transport is cuda, the KV also fits in this share of the host's free memory, through which pages may "
        "travel (default: 0.9; with baton up an equal part of what the shares given to other nodes of the GPU leave of "
        "0.9)",
    )
    max_running: int = setting(
        64, "compute at most this many sequences at once; more raise the throughput and slow each answer down"
    )
    chunk_tokens: int | None = setting(
        None,
        "compute at most this many prompt tokens per step; shorter steps delay other sequences less (default: "
        "512; on cuda 8192 for prefill nodes and 1024 for decode nodes)",
    )
    context_len: int | None = setting(
        None, "accept at most this many tokens of prompt and output together (default: the model's context length)"
    )
    prefix_cache: bool = setting(
        True, "keep the KV pages of finished requests, so that prompts with the same beginning start sooner"
    )
    host_cache_gb: float | None = setting(
        None,
        "keep pages that leave the prefix cache in so many gigabytes (10^9 bytes) of host memory, of all ranks "
        "together; a prompt gets them back if that is sooner than to compute them (default: none)",
        metavar="GB",
    )
    disk_cache: str | None = setting(
        None,
        "write the pages of the host tier to files in this directory of yours, and read them after a restart, too; "
        "they hold prompts; needs --host-cache-gb",
        metavar="DIR",
    )
    disk_cache_gb: float = setting(
        64.0, "of these files, keep so many gigabytes (10^9 bytes); with --dp-attention, for each rank", metavar="GB"
    )
    disk_cache_ttl: float = setting(86400.0, "remove files that were not used for so many seconds", metavar="SECONDS")
    tune: bool = setting(
        True,
        "on cuda, measure at the first start which kernels multiply the model's matrices fastest, and keep the result "
        "in ~/.cache/baton; without it, use what is kept there, or defaults",
    )
    threads: int | None = setting(
        None, "compute with this many CPU threads, in each rank (default: half of the cores, divided by the ranks)"
    )
    tp: int = setting(
        1,
        "divide the model among this many ranks, each a process with some heads and hidden units of every layer; on "
        "cuda each rank has a GPU of its own",
    )
    dp_attention: int = setting(
        1,
        "serve with this many ranks, each a process with sequences, KV pages and drafter of its own, and some hidden "
        "units of every feed-forward layer; --num-pages and --max-running are per rank; on cuda each rank has a GPU of "
        "its own; not with --tp",
    )
    speculative: str = setting(
        "auto",
        "draft tokens on decode nodes with ngram (from the request's own text), standalone (a small model), or a head "
        "on the target's hidden states (the others); none drafts nothing; auto follows speculation.json in the model's "
        "directory, and without that file drafts nothing",
        choices=("auto", *ALGORITHMS),
    )
    draft_model: str | None = setting(
        None,
        "load the drafter from this checkpoint directory, or from ORG/NAME of the Hugging Face hub (default: the one "
        "inside the model's directory)",
        metavar="MODEL",
    )
    draft_revision: str | None = setting(
        None,
        "of a drafter's ORG/NAME, take this branch, tag or commit (default: the newest commit of its main branch)",
        metavar="REVISION",
    )
    draft_dtype: DtypeChoice = setting("auto", "computation type of the drafter; auto: the target's")
    draft_steps: int | None = setting(
        None, "draft this many tokens per round, or a tree of this depth (default: what speculation.json says, else 5)"
    )
    draft_topk: int = setting(
        1, "draft a tree with this many branches per node (eagle, eagle3, mtp, frozen-kv-mtp); 1 drafts a chain"
    )
    draft_adaptive: bool = setting(
        True,
        "draft fewer steps, or none, whenever measured times and acceptance say that this is faster; without it, "
        "draft --draft-steps in every round",
    )
    draft_tokens: int | None = setting(
        None, "verify this many tokens of a draft tree per round (default: two times the branches times the depth)"
    )

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)  # super() does not work in slotted dataclasses
        for name in ("num_pages", "threads", "tp", "dp_attention", "max_running", "chunk_tokens"):
            at_least(self, name, 1)
        if self.tp > 1 and self.dp_attention > 1:
            raise ConfigError(
                f"tp is {self.tp} and dp_attention is {self.dp_attention}: ranks have either some heads of all "
                "sequences or all heads of some sequences; leave one of the two at 1"
            )
        if self.disk_cache is not None and self.host_cache_gb is None:
            raise ConfigError(
                f"--disk-cache {self.disk_cache} needs --host-cache-gb: pages go to files by way of host memory"
            )
        for name in ("host_cache_gb", "disk_cache_gb", "disk_cache_ttl"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share}; it must be above 0, and at most 1")

    @property
    def num_ranks(self) -> int:
        """The processes that share the node's model."""
        return self.tp * self.dp_attention

    @property
    def share(self) -> float:
        """The share of the GPU's memory that this node may take, and of the host's for what travels through it."""
        return MEMORY_SHARE if self.memory_share is None else self.memory_share

    def chunk(self, device: str) -> int:
        """Return the prompt tokens of a step on this type of device."""
        return self.chunk_tokens or (self.CUDA_CHUNK_TOKENS if device == "cuda" else CHUNK_TOKENS)
