"""Facts as they are read on this machine."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.deploy.doctor.config import DoctorConfig
from baton.deploy.doctor.facts import Facts, proxies_of_loopback, read_facts
from baton.deploy.doctor.gpu_facts import Driver, ProbeRun, parse_cores
from baton.deploy.run_dir import make_run_dir
from baton.deploy.up import kernel_folders
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError


@pytest.fixture
def listener() -> Iterator[int]:
    """A port at which this process listens. It greets the first connection as ZeroMQ does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with suppress(OSError), server.accept()[0] as connection:
                connection.sendall(b"\xff")

        thread = threading.Thread(target=greet)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(autouse=True)
def quick_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is imported in no time, for the process that asks it."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace as N\n"
        "__version__, version = '9.9', N(cuda='13.0')\n"
        "cuda = N(is_available=lambda: True, device_count=lambda: 3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


def test_all_facts_of_this_machine_are_read_and_nothing_is_changed(tmp_path: Path, listener: int) -> None:
    keys = tmp_path / "a.key"
    KeyPair.create(keys)

    def files() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}  # of the stub of torch

    before = files()
    facts = read_facts(
        DoctorConfig(port=listener, keys=str(keys), node_address="tcp://*:*", router=f"tcp://127.0.0.1:{listener}")
    )
    assert files() == before
    assert facts.python == sys.version_info[:3]
    assert facts.free_memory > 0
    assert facts.has_sealed_memory
    assert facts.cores == os.sched_getaffinity(0)
    assert facts.gpu.torch is not None
    assert (facts.gpu.torch.version, facts.gpu.torch.cuda, facts.gpu.torch.num_gpus) == ("9.9", "13.0", 3)
    assert {each.installed for each in facts.requirements if each.name == "pyzmq"} != {None}
    assert facts.keys is not None
    assert not facts.keys.failure
    assert facts.model is not None
    assert not facts.model.failure
    assert all(each.is_writable and each.free_bytes for each in facts.caches)
    (port,) = facts.ports
    assert port.holder is not None
    assert port.holder.pid == os.getpid()
    assert [each.failure for each in facts.routers] == [""]


def test_a_cache_that_baton_up_makes_is_the_one_that_is_checked(tmp_path: Path) -> None:
    folder = make_run_dir(None).parent.parent
    assert str(folder) in {each.path for each in read_facts(DoctorConfig(port=0, node_address="tcp://*:*")).caches}


def test_the_folders_of_kernels_are_those_that_baton_up_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    paths = {each.what: Path(each.path) for each in _facts().caches}
    assert paths["kernels of Triton"] == tmp_path / ".triton" / "cache"
    assert paths["kernels of the CPU"] in kernel_folders(os.environ, of_gpus=False)


def test_a_model_that_this_host_cannot_hold_is_refused_as_baton_up_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.checkpoint.model_check.gpu_memory", lambda: [1 << 10])
    model = _facts().model
    assert model is not None and "divide the model among more GPUs with --tp" in model.failure


def _facts(**settings: str) -> Facts:
    return read_facts(DoctorConfig(port=0, node_address="tcp://*:*", **settings))


def test_damaged_files_fail_as_they_would_at_the_start(tmp_path: Path) -> None:
    keys, api_keys = tmp_path / "a.key", tmp_path / "api"
    KeyPair.create(keys)
    keys.chmod(0o644)
    api_keys.write_text("a-key-of-some-client\n")
    api_keys.chmod(0o644)
    facts = _facts(keys=str(keys), api_keys=str(api_keys), model=str(tmp_path / "none"))
    assert facts.keys is not None
    assert f"chmod 600 {keys}" in facts.keys.failure
    assert facts.are_api_keys_public
    assert facts.api_keys is not None
    assert not facts.api_keys.failure
    assert facts.model is not None
    assert "no such directory" in facts.model.failure


@pytest.mark.parametrize(
    ("flag", "value"),
    [("router", "x"), ("router", "tcp://127.0.0.1:*"), ("router", "ipc:///x"), ("node_address", "x"), ("port", 99999)],
)
def test_a_wrong_address_is_refused_before_anything_is_read(flag: str, value: str | int) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(value))):
        DoctorConfig(**{flag: value})


def test_a_program_that_hangs_is_waited_for_no_longer_than_its_limit() -> None:
    start = time.monotonic()
    answer = ProbeRun([sys.executable, "-S", "-c", "import time; time.sleep(600)"], 0.2).answer(Driver)
    assert "no answer within 0.2 s" in answer.failure
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("code", "words"), [("import os; os.abort()", "status -6"), ("print('x')", "malformed"), ("", "")]
)
def test_a_program_that_dies_or_says_nonsense_is_a_failure(code: str, words: str) -> None:
    answer = ProbeRun([sys.executable, "-S", "-c", code], 60).answer(Driver)
    assert answer.failure
    assert words in answer.failure


def test_lists_of_cores_are_parsed() -> None:
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}


def test_proxies_count_only_if_they_catch_loopback_and_show_no_password() -> None:
    environ = {"HTTP_PROXY": "http://user:secret@proxy.example:3128/"}
    assert proxies_of_loopback(environ) == {"HTTP_PROXY": "http://proxy.example:3128"}
    for exceptions in ("127.0.0.1", "localhost,127.0.0.1", "*"):
        assert not proxies_of_loopback({**environ, "NO_PROXY": exceptions})
    assert not proxies_of_loopback({"https_proxy": "http://proxy.example"})
