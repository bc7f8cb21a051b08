"""The interface of executors of prompts imports no torch, and both executors have all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.engine.prompt_executor import PromptExecutor
from baton.engine.prompts import Prompts
from baton.engine.rank_executor import RankPrompts


def test_the_module_imports_no_torch() -> None:
    program = "import sys, baton.engine.prompt_executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("executor", [Prompts, RankPrompts])
def test_an_executor_has_every_member(executor: type) -> None:
    wanted = {name for name in vars(PromptExecutor) if not name.startswith("_")}
    assert len(wanted) > 5
    assert wanted <= set(dir(executor))
