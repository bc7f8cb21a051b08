"""Each line of the registry leads to a drafter that can be loaded, under one name."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters import ORDINARY, settings, target_of
from node_pair import node_pairs, params

from baton.decode_node.config import DecodeConfig
from baton.deploy.flags import settings_of
from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.drafters.family import Family, Speculation, Wanted
from baton.engine.drafters.registry import ALGORITHMS, DRAFTERS, Line
from baton.engine.drafters.speculation import load_family
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.trees import Drafts
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_a_line_names_the_module_of_its_drafter(algorithm: str) -> None:
    assert load_family(algorithm).name == algorithm


def test_the_flag_takes_every_drafter() -> None:
    (flag,) = (each for each in settings_of(DecodeConfig) if each.name == "speculative")
    assert flag.choices == ("auto", *ALGORITHMS) and flag.default == "auto"
    assert set(ALGORITHMS) == {"none", *DRAFTERS}


def test_a_drafter_that_is_not_registered_is_refused_by_the_flag() -> None:
    (flag,) = (each for each in settings_of(DecodeConfig) if each.name == "speculative")
    with pytest.raises(ValueError, match="must be one of auto, none, ngram, "):
        flag.check("medusa")


def test_names_are_read_without_torch_and_without_a_drafter() -> None:
    code = (
        "import sys; from baton.engine.drafters import registry; assert registry.DRAFTERS;"
        "bad = {'torch', 'numpy', 'baton.engine.drafters.eagle'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_every_drafter_has_a_kind_that_the_tests_over_all_drafters_run(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A drafter that no test loads does not pass unnoticed."""
    found = set()
    for kind in ("ngram", *ORDINARY):
        model = target_of(kind, checkpoint)
        engine = Engine(DecodeConfig(model=str(model), device="cpu", num_pages=8, **settings(kind, model, tmp_path)))
        assert engine.drafter is not None, kind
        found.add(engine.speculation.algorithm)
    assert found == set(DRAFTERS)


# --- a new drafter ------------------------------------------------------------------------------------------------


class EchoDrafter:
    """Proposes the last token again. All that the nodes know of it is in this class and its FAMILY."""

    has_kv = False
    proposer = None

    def __init__(self, hidden: HiddenLayout, shape: DraftShape) -> None:
        self.hidden, self.shape = hidden, shape

    def allocate(self, num_rows: int) -> DraftState:
        return DraftState()

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        return Drafts(rows.last_tokens.unsqueeze(1).expand(-1, shape.num_steps).clone())

    def observe(self, *_: Any) -> DraftState:
        return DraftState()

    def observe_prompt(self, *_: Any) -> None:
        pass

    def finish_prompt(self, *_: Any) -> DraftState:
        return DraftState()


def read_echo(wanted: Wanted) -> Speculation:
    return Speculation(
        algorithm=wanted.algorithm,
        shape=wanted.shape,
        hidden=wanted.layout(),
        make=lambda loading: EchoDrafter(loading.hidden, loading.shape),
    )


def test_a_new_drafter_takes_one_module_and_one_line(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of nodes speculates with a drafter that no other code names."""
    module = types.ModuleType("baton.engine.drafters.echo_twice")
    module.FAMILY = Family(name="echo-twice", read=read_echo)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(DRAFTERS, "echo-twice", Line("echo_twice"))
    model, node, texts = checkpoint("llama"), {"page_size": 4, "chunk_tokens": 6}, []
    with node_pairs() as start:
        for more in ({}, {"speculative": "echo-twice", "draft_steps": 2}):
            pair = start(model, prefill=node | more, decode=node | more)
            pair.submit("r", [5, 9, 9, 9, 2], params(20))
            texts.append(pair.run()["r", 0].ids)
    assert texts[0] == texts[1]
    assert pair.decode.executor.engine.schema.algorithm == "echo_twice"
    assert pair.decode.rounds.stats.num_drafted > 0
