"""Forwards of our own models outside an engine, and what their indexers pick, as `Reference.all_logits` takes it."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from model_pools import pools_of

from baton.engine.attention import gathered_entries, picked
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow


class PickRecord:
    """The picks of one sequence's forwards on the CPU, chunk after chunk."""

    def __init__(self) -> None:
        self._calls: list[torch.Tensor] = []

    def pick(self, scores: torch.Tensor, num_picks: int) -> torch.Tensor:
        picks = _pick(scores, num_picks)
        self._calls.append(picks)
        return picks

    def of_layers(self, num_indexers: int) -> list[torch.Tensor]:
        """Return the picks of each indexer, [num_tokens, num_picks] int32, -1 behind the last."""
        width = max((each.shape[1] for each in self._calls), default=0)
        padded = [F.pad(each, (0, width - each.shape[1]), value=-1) for each in self._calls]
        return [torch.cat(padded[i::num_indexers]) for i in range(num_indexers)]


@contextmanager
def recorded_picks() -> Iterator[PickRecord]:
    """Record the picks of all forwards of this process."""
    record = PickRecord()
    with (
        mock.patch.object(picked, "pick", record.pick),
        mock.patch.object(gathered_entries, "pick", record.pick),
    ):
        yield record


def forward(
    model: Path, ids: Sequence[int], chunks: Sequence[int] = (), page_size: int | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of all tokens on the CPU, [len(ids), vocab_size], from pools full of NaN with scattered pages,
    and the picks of each indexer. `chunks`: sizes of the parts that are computed one after the other; by default all
    at once."""
    config = read_model_config(model)
    if page_size is None:
        page_size = 4 if config.compressed is None else config.compressed.page_unit
    loaded = _load(model, (model / "model.safetensors").stat().st_mtime_ns)
    num_pages = -(-len(ids) // page_size) + 12
    pools = pools_of(config, page_size, num_pages, float("nan"))
    pages, position, logits = random.Random(0).sample(range(1, num_pages), num_pages - 10), 0, list[torch.Tensor]()
    with recorded_picks() as record:
        for num in chunks or (len(ids),):
            batch = ForwardBatch.build([BatchRow(ids[position : position + num], position, pages)], page_size, "cpu")
            logits.append(loaded.logits(loaded.forward(batch, pools)))
            position += num
    return torch.cat(logits), record.of_layers(len(config.further[0].layers)) if config.index else []


@functools.lru_cache(maxsize=2)
def _load(model: Path, written_ns: int) -> DecoderModel:
    """Load a model, again if its file was written again."""
    return load_model(model, read_model_config(model), torch.float32, "cpu")


_pick = picked.pick
