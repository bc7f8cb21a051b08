"""Processes of the `baton` command and of ranks, forked from one that has imported their modules, because importing
torch takes most of their start.

    rooms.py --fork--> fork server of a room --fork--> node --fork--> ranks 1 and above of the node

test_up.py starts the command itself from a bare interpreter. Here the same function runs with the same arguments, in
its own process, group, log and environment. A process of another release forgets this tree's modules, and imports that
release's. Tests of engine/ranks start ranks as a node does.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from importlib import import_module
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

FAULT_PLAN = "BATON_FAULT_PLAN"  # names a file (tests/chaos/faulty.py) that says what is wrong with the process
HOST = "BATON_HOST"  # files that name the namespaces of the process's host (tests/support/hosts), with : between them
RANK_CONTEXT = "BATON_RANK_CONTEXT"  # a context in which ranks run: "module function argument"
_PRELOAD = [f"baton.{name}" for name in ("prefill_node.main", "decode_node.main", "router.main", "deploy.cli")]
_PRELOAD += ["baton.kernels.numba_kernels", "pytest"]  # pytest: a child imports its parent's main module


def preload() -> None:
    """Import what processes of the command import, and do once what each of them does first: load a small checkpoint,
    and compute a prompt and a round. The first time takes longer than the rest of a small node's start. Objects that
    stay are left out of garbage collection."""
    for name in _PRELOAD:
        import_module(name)
    # neither a bar of transformers nor a tokenizer starts a thread that forked processes would lack
    with mock.patch("tqdm.tqdm.monitor_interval", 0), mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"):
        _compute_once()
    gc.collect()  # its engine has threads of llguidance
    gc.freeze()


def _compute_once() -> None:
    from checkpoints import make_checkpoint

    from baton.decode_node.config import DecodeConfig
    from baton.engine.pace.padding import measure_costs
    from baton.engine.rounds.device_executor import executor_of
    from baton.engine.startup import load_engine
    from baton.metadata.wire.membership import Hello
    from baton.metadata.wire.protocol import sinces
    from baton.router.text.chat_template import ChatTemplate

    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # bars of progress
        model = make_checkpoint(Path(folder))
        engine = load_engine(DecodeConfig(router="tcp://127.0.0.1:1", model=str(model), device="cpu", threads=1))
        measure_costs(executor_of(engine, 1), engine.page_size, engine.page_size)
        ChatTemplate.of(engine.card)
        sinces(Hello)
        for thread in set(threading.enumerate()) - {threading.current_thread()}:  # it digests weights, or reads a file
            thread.join()


def fork_server() -> None:
    """Start the fork server of multiprocessing as a fork of this process, which must have one thread. Without this
    call a server starts with the first process of `fork_context`, as a new interpreter that imports _PRELOAD. So it
    does with Python 3.14 and later, whose server has a key."""
    if sys.version_info >= (3, 14):
        return
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()  # the server ends when nobody has its other end
        server._forkserver_address, server._forkserver_pid = address, os.fork()
        if not server._forkserver_pid:
            os.close(server._forkserver_alive_fd)
            try:
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
        os.close(alive)


def fork_context() -> Any:
    """Return the context of multiprocessing whose processes are forked, with the environment of the first of them. A
    forked process spawns its own children, because it cannot ask the server."""
    if multiprocessing.parent_process() is not None:
        return multiprocessing.get_context("spawn")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # read when the server starts, with the first process
    return context


class Forked:
    """The part of `subprocess.Popen` that the tests use."""

    def __init__(self, argv: Sequence[str], log: Path, environ: dict[str, str], release: Path | None = None) -> None:
        """Start `baton *argv`, and append its output to `log`. `release`: the directory with another `baton`."""
        arguments = (list(argv), str(log), environ, release)
        self._process = fork_context().Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(argv: list[str], log: str, environ: dict[str, str], release: Path | None) -> None:
    """Run the command in the child."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start ranks
    os.setpgid(0, 0)
    for fd, flags, path in ((0, os.O_RDONLY, os.devnull), (1, os.O_WRONLY | os.O_APPEND, log)):
        opened = os.open(path, flags)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environ)
    if HOST in environ:
        from namespaces import begin_processes, enter

        enter(environ[HOST].split(":"))
        if FAULT_PLAN not in environ:  # the first process of a namespace could not strike itself
            begin_processes()
    if FAULT_PLAN in environ:
        from faulty import switch_on

        switch_on(environ[FAULT_PLAN])
    if release is not None:
        _forget_this_tree()
        sys.path.insert(0, str(release))
    from baton.deploy.cli import main

    if release is None:
        from baton.engine.ranks import processes as rank_processes

        rank_processes.multiprocessing = _RanksOfNode  # type: ignore[assignment]
    sys.exit(main(argv))


def _forget_this_tree() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "baton"]:
        del sys.modules[name]


# --- ranks ---


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Fork the ranks that start in the block. They end with their pipes; the kernel does not end them with rank 0."""
    from baton.engine.ranks import processes as rank_processes

    with mock.patch.object(rank_processes, "multiprocessing", _Ranks):
        yield


class _Ranks:
    """The part of `multiprocessing` that RankProcesses uses."""

    def __init__(self) -> None:
        self._context = fork_context()
        self.Pipe = self._context.Pipe

    @staticmethod
    def get_context(method: str) -> _Ranks:
        assert method == "spawn", method
        return _Ranks()

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], name: str) -> Any:  # noqa: N802
        return self._context.Process(target=_run_rank, args=(dict(os.environ), target, *args), name=name)


def _run_rank(environ: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """Run a rank in the child, whose parent is the server and not rank 0."""
    from baton.engine.ranks import processes as rank_processes

    os.environ.clear()
    os.environ.update(environ)
    rank_processes.die_with = lambda parent: None
    with _rank_context(environ):
        target(*args)


class _RanksOfNode:
    """The part of `multiprocessing` that RankProcesses uses, in a forked node. The node has one thread when it starts
    its ranks, so they are forked from it."""

    _ends: list[Any] = []  # of all pipes

    @staticmethod
    def get_context(method: str) -> type[_RanksOfNode]:
        assert method == "spawn", method
        return _RanksOfNode

    @classmethod
    def Pipe(cls, duplex: bool = True) -> tuple[Any, Any]:  # noqa: N802
        ends = multiprocessing.Pipe(duplex)
        cls._ends += ends
        return ends

    @classmethod
    def Process(cls, *, target: Callable[..., None], args: tuple[Any, ...], name: str) -> Any:  # noqa: N802
        assert threading.active_count() == 1, threading.enumerate()
        return multiprocessing.get_context("fork").Process(target=cls._run_rank, args=(target, *args), name=name)

    @classmethod
    def _run_rank(cls, target: Callable[..., None], *args: Any) -> None:
        """Run a rank in the child, without the node's ends of pipes: a pipe ends when the node closes its end."""
        for end in cls._ends:
            if end not in args:
                end.close()
        target(*args)


def _rank_context(environ: dict[str, str]) -> AbstractContextManager[None]:
    if RANK_CONTEXT not in environ:
        return nullcontext()
    module, function, argument = environ[RANK_CONTEXT].split(" ", 2)
    return getattr(import_module(module), function)(argument)
