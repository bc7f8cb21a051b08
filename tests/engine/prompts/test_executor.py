"""The interface of executors of prompts imports no torch, and the executors have all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.engine.prompts.executor import PromptExecutor
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.executor import RankPrompts


def test_the_module_imports_no_torch() -> None:
    program = "import sys, baton.engine.prompts.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("executor", [Prompts, RankPrompts])
def test_an_executor_has_every_member(executor: type) -> None:
    wanted = {name for name in vars(PromptExecutor) if not name.startswith("_")}
    assert len(wanted) > 5
    assert wanted <= set(dir(executor))


@pytest.mark.parametrize("role", ["decode_node", "prefill_node"])
def test_the_parts_of_nodes_import_no_torch(role: str) -> None:
    program = f"import sys, baton.{role}.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
