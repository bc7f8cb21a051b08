"""Compiling Triton kernels in many threads, before their first launch.

Triton compiles a kernel in any number of threads, but its first launch belongs into one thread. It loads a launcher, an
extension module that has the same name for all kernels. If two threads load launchers at the same time, one of them may
read the other's function from the module that both share: the kernel is then launched with the arguments of another
one. So the threads here compile, and launch nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_all(jobs: Iterable[Callable[[], object]], num_threads: int) -> None:
    """Run the jobs in threads in which a launch of a kernel compiles it and launches nothing. So what a job computes is
    undefined. A job that raises is left out: its first real run raises again."""
    from triton.runtime.jit import JITFunction

    thread_here, launch = threading.local(), JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or hasattr(thread_here, "compiles"), **options)

    def begin() -> None:
        thread_here.compiles = True

    JITFunction.run = run
    try:
        with ThreadPoolExecutor(num_threads, initializer=begin) as threads:
            for job in jobs:
                threads.submit(job)
    finally:
        JITFunction.run = launch
