"""Sdist and wheel as a user gets them: built, compared, and the wheel installed and run without the checkout."""

from __future__ import annotations

import fnmatch
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from bill_of_materials import bill_of_materials
from cluster import free_port, wait_until
from distributions import build
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EPOCH = 1_800_000_000  # seconds since 1970
MAX_MIB = 40
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "run")
USERS_EXTRAS = ("hub", "node", "otel", "terminal")
# Prompt and greedy answer of README.md.
PROMPT = "import os\n\ndef "
ANSWER = 'joinpath(path):\n    """Return a path-like object for Windows.'


def _copy_without_weights(source: str, target: str) -> None:
    """Copy a file; weights become empty files, because packing them takes most of a build."""
    if source.endswith(".safetensors"):
        Path(target).touch()
    else:
        shutil.copy2(source, target)


def _build_elsewhere(folder: Path, out: Path) -> tuple[Path, Path]:
    """Build in a folder of another name from files of other times and modes, beside what Python and numba cached."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, copy_function=_copy_without_weights)
    for path in folder.rglob("*.*"):
        os.utime(path, (0, 1e9))
        path.chmod(0o700 if path.is_dir() else 0o600)
    cache = folder / "kernels" / "__pycache__"
    cache.mkdir()
    for name in ("left.cpython-311.pyc", "left.nbi"):
        (cache / name).touch()
    umask = os.umask(0o077)
    try:
        return build(folder, out, EPOCH)
    finally:
        os.umask(umask)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sdist and wheel of the checkout, without the weights of the demo model."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT, copy_function=_copy_without_weights)
    return build(source, out, EPOCH)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a release has."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    return build(source, out, EPOCH)[1]


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


def test_two_builds_are_equal_to_the_bit(light: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    again = _build_elsewhere(tmp_path / "another folder", tmp_path / "out")
    assert [path.name for path in again] == [path.name for path in light]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in light]


def test_the_sdist_holds_the_wheel_and_the_pages(light: tuple[Path, Path]) -> None:
    with tarfile.open(light[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    with zipfile.ZipFile(light[1]) as wheel:
        assert {name.removeprefix("baton/") for name in wheel.namelist() if ".dist-info/" not in name} <= names
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "engine").rglob("*.md")}
    assert {str(path.relative_to(ROOT)) for path in pages} | {"constraints.txt"} <= names
    for pattern in ("tests/*", "*/training/*", "*__pycache__*"):
        assert not fnmatch.filter(names, pattern)


def test_the_wheel_holds_the_program_and_the_demo_model_alone(light: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(light[1]) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
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
    operators = ("container", "dashboards", "kubernetes", "nginx.conf", "slurm", "systemd")
    places = [ROOT / "deploy" / name for name in operators]
    for_operators = (file for place in places for file in (place, *place.rglob("*")) if file.is_file())
    found = (*code, *data, *times, *for_operators, *page, ROOT / "__init__.py")
    files = {f"baton/{path.relative_to(ROOT)}": path for path in found}
    assert set(names) == set(files)
    assert sum(path.stat().st_size for path in files.values()) < MAX_MIB * 2**20


def test_the_wheel_has_the_licence_of_all_that_others_wrote(light: tuple[Path, Path]) -> None:
    """That is what carries a notice or lies in a folder `vendor`, and the demo model, which has read others' text."""
    with zipfile.ZipFile(light[1]) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        licences = [name.partition("/licenses/")[2] for name in archive.namelist() if "/licenses/" in name]
        notice = re.compile(rb"copyright \(c\)|all rights reserved", re.I)
        foreign = {name for name in names if "/vendor/" in name or notice.search(archive.read(name))}
    foreign |= {name for name in names if name.endswith((".safetensors", "/tokenizer.json"))}
    assert foreign and "LICENSE" in licences
    folders = [f"baton/{name.rpartition('/')[0]}/" for name in licences if "/" in name]
    assert [name for name in sorted(foreign) if not name.startswith(tuple(folders))] == []


def test_the_bill_of_materials_lists_every_pin_and_whether_baton_needs_it() -> None:
    listed = json.loads(bill_of_materials(ROOT, EPOCH))["components"]
    packages = {each["purl"].partition("/")[2]: each["scope"] for each in listed if "pkg:pypi/" in each["purl"]}
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert set(packages) == {f"{canonicalize_name(name)}@{version}" for name, version in pins}
    assert "uplot" in {each["name"] for each in listed}
    required = {package.partition("@")[0] for package, scope in packages.items() if scope == "required"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for name in USERS_EXTRAS for line in project["optional-dependencies"][name]),
    ]
    needed: set[str] = set()
    while lines:
        each = Requirement(lines.pop())
        name = canonicalize_name(each.name)
        if name not in needed and (each.marker is None or each.marker.evaluate({"extra": ""})):
            needed.add(name)
            try:
                lines += metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # of the extra `otel`
                continue
    assert needed <= required


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
