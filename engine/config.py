"""Configuration of model execution, shared by both kinds of node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..metadata.config import NodeConfig, at_least, setting
from .drafters.registry import ALGORITHMS

CHUNK_TOKENS = 512
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(NodeConfig):
    """Settings of what a node loads. None: the program decides from the model and the machine."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 8192

    model: str | None = setting(None, "Hugging Face checkpoint directory (default: the demo model)", metavar="DIR")
    model_name: str | None = setting(None, "name that requests call the model by (default: the directory's name)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs; auto: cuda where there is one")
    dtype: DtypeChoice = setting("auto", "computation type; auto: float32 on CPU, the checkpoint's own on cuda")
    page_size: int = setting(16, "tokens a KV page")
    num_pages: int | None = setting(None, "KV pages of the pool (default: from free memory, at least four contexts)")
    max_running: int = setting(64, "requests computed at the same time")
    chunk_tokens: int | None = setting(
        None,
        "prompt tokens computed in one step (default: 512; on CUDA 8192 for a prefill node, 1024 for a decode node)",
    )
    context_len: int | None = setting(None, "longest prompt plus output (default: the model's own)")
    prefix_cache: bool = setting(True, "keep finished requests' pages for prompts that begin alike")
    threads: int | None = setting(None, "CPU threads of this node's computation (default: half the cores)")
    speculative: str = setting(
        "auto",
        "how decode nodes draft tokens ahead: not at all (none), from the request's own text (ngram), by a small model"
        " (standalone), or by a head on the target's hidden states (the others); auto: as speculation.json in the"
        " model's directory says, none if there is no such file",
        choices=("auto", *ALGORITHMS),
    )
    draft_model: str | None = setting(
        None, "checkpoint directory of the drafter (default: one that lies in the model's directory)", metavar="DIR"
    )
    draft_dtype: DtypeChoice = setting("auto", "computation type of the drafter; auto: the target's")
    draft_steps: int | None = setting(
        None, "tokens drafted in a round, or depth of a tree (default: as speculation.json says, else 5)"
    )
    draft_topk: int = setting(1, "branches per node of a draft tree, if the drafter drafts trees; 1: a chain")
    draft_adaptive: bool = setting(
        True, "draft no more steps in a round than pay, by live acceptance and measured times; off: always draft_steps"
    )
    draft_tokens: int | None = setting(
        None, "draft tokens of a tree that are verified in a round (default: twice the branches times the depth)"
    )

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)  # super() does not work in slotted dataclasses
        for name in ("num_pages", "threads", "max_running", "chunk_tokens"):
            at_least(self, name, 1)

    def chunk(self, device: str) -> int:
        """Return the prompt tokens of a step on this type of device."""
        return self.chunk_tokens or (self.CUDA_CHUNK_TOKENS if device == "cuda" else CHUNK_TOKENS)
