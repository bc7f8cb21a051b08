"""The wheel as a user gets it: built, installed into a new environment, and run there without the checkout."""

from __future__ import annotations

import fnmatch
import http.client
import json
import os
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import psutil
import pytest
from cluster import free_port, wait_until

ROOT = Path(__file__).parents[2]
MAX_MIB = 40
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# Prompt and greedy answer of README.md.
PROMPT = "import os\n\ndef "
ANSWER = 'joinpath(path):\n    """Return a path-like object for Windows.'


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout: files left by earlier builds must not get into it."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    copytree(ROOT, source, ignore=ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "run"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment that holds the wheel. Its dependencies are those of the environment of the tests."""
    path = tmp_path_factory.mktemp("environment")
    venv.create(path, with_pip=False, symlinks=True)
    python = path / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = path.glob("lib/python*/site-packages")
    # Python does not read .pth files in directories that a .pth file names, so the editable checkout stays out.
    dependencies = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (site / "dependencies.pth").write_text("".join(f"{entry}\n" for entry in dependencies))
    return path


def test_the_wheel_holds_the_program_and_the_demo_model_alone(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        licences = [name for name in archive.namelist() if "/licenses/" in name]
    assert {name.split("/")[0] for name in names} == {"baton"}
    for pattern in (
        "*/tests/*",
        "*/training/*",
        "*/bench_*",
        "*/benchmarks/*",
        "*planted*",
        "*synthetic*",
        "*faulty*",
        "*/docs/*",
    ):
        assert not fnmatch.filter(names, pattern)
    folders = ["decode_node", "deploy", "engine", "kernels", "metadata", "prefill_node", "router"]
    code = (path for folder in folders for path in (ROOT / folder).rglob("*.py") if "training" not in path.parts)
    data = (path for path in (ROOT / "deploy" / "demo").rglob("*") if path.suffix in (".json", ".md", ".safetensors"))
    times = (ROOT / "deploy" / "simulation" / "measured").glob("*.json")
    page = (path for path in (ROOT / "router" / "http" / "page" / "static").rglob("*") if path.is_file())
    expected = {f"baton/{path.relative_to(ROOT)}" for path in (*code, *data, *times, *page)} | {"baton/__init__.py"}
    assert set(names) == expected
    assert "baton/deploy/demo/LICENSE-DATA.md" in names
    assert "LICENSE" in {Path(name).name for name in licences}
    size = wheel.stat().st_size / 2**20
    with capsys.disabled():
        print(f"\n{wheel.name}: {size:.1f} MiB, {len(names)} files")
    assert size < MAX_MIB


@pytest.mark.whole
def test_the_installed_command_serves_the_demo_model(environment: Path, tmp_path: Path) -> None:
    away = tmp_path / "elsewhere"
    away.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BATON"))}
    clean |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    python, baton = environment / "bin" / "python", environment / "bin" / "baton"
    origin = subprocess.run(
        [python, "-c", "import baton; print(baton.__file__)"], cwd=away, env=clean, capture_output=True, check=True
    )
    assert Path(origin.stdout.decode().strip()).is_relative_to(environment)
    port, output = free_port(), tmp_path / "up.log"
    argv = [baton, "up", "--port", str(port), "--num-pages", "64", "--run-dir", tmp_path / "run"]
    with output.open("w") as log, subprocess.Popen(argv, cwd=away, env=clean, stdout=log, stderr=log) as up:
        family: list[psutil.Process] = []
        try:
            wait_until(lambda: "Baton is ready" in output.read_text() or up.poll() is not None, output.read_text, 90)
            assert up.poll() is None, output.read_text()
            family = psutil.Process(up.pid).children(recursive=True)
            assert len(family) == 3
            assert all(Path(process.cmdline()[0]).is_relative_to(environment) for process in family)
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
            assert _complete(port, body)["choices"][0]["text"].startswith(ANSWER)
            up.send_signal(signal.SIGINT)
            assert up.wait(30) == 0, output.read_text()
            assert not psutil.wait_procs(family, 10)[1]
        finally:
            for process in (up, *family):
                if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                    process.kill()
    assert not list(away.iterdir())


def _complete(port: int, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()
