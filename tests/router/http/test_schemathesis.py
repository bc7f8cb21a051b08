"""Schemathesis against a running router: every route answers as the OpenAPI document says, to valid and invalid input.

Skipped if the command `schemathesis` is not installed. The run has a fixed seed and a bounded number of examples.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.router.http.routes import ROUTES

from ..conftest import System
from ..test_runner import wait_until

COMMAND = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
MAX_EXAMPLES = int(os.environ.get("BATON_SCHEMATHESIS_EXAMPLES", "16"))  # per operation and phase


@pytest.mark.skipif(COMMAND is None, reason="schemathesis is not installed: pip install 'baton-serve[test]'")
def test_the_router_answers_as_its_document_says(make_system: Callable[..., System], tmp_path: Path) -> None:
    output = [300, 301, 302, 303, 1] * 128  # longer than the context, for requests that ignore the end of sequence
    system = make_system(router={"api_key": "client", "admin_key": "boss"}, script=lambda prompt, choice: output)
    system.behaviour.step_tokens = 64
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    key = {"Authorization": "Bearer boss"}
    wait_until(lambda: system.router.request("GET", "/ready", headers=key)[0] == 200)
    assert COMMAND is not None
    schema = tmp_path / "openapi.json"  # read from its URL, the document's own route would be left out
    schema.write_text(json.dumps(system.router.request("GET", "/openapi.json", headers=key)[1]))
    began = time.monotonic()
    here = Path(__file__).parent
    run = subprocess.run(
        [
            *(COMMAND, "--config-file", str(here / "schemathesis.toml"), "run", str(schema)),
            *(
                "--url",
                system.router.url,
                "--header",
                "Authorization: Bearer boss",
                "--checks",
                "all",
                "--max-examples",
                str(MAX_EXAMPLES),
            ),
            *("--exclude-checks", "positive_data_acceptance"),  # schemathesis_checks.py has another one
            *("--generation-deterministic", "--continue-on-failure", "--no-color"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    print(f"\n{time.monotonic() - began:.1f} s; {re.findall('.* generated.*', run.stdout)}")
    assert re.search(rf"Tested: +{len(ROUTES)}\n", run.stdout), run.stdout
