"""Kinds of sampling that benchmarks measure, as chat models ask for them: fields of SamplingParams by name."""

from __future__ import annotations

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p": {"temperature": 0.6, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "penalties": {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "num_logprobs": 5},
}
