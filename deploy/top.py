"""`baton top`: the state of the service in a terminal, drawn anew each second, or once as text or JSON."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..metadata.config import setting
from .client import Client
from .monitor import LOOK_EVERY_S, look
from .rates import Window

if TYPE_CHECKING:
    from .top_view import View

_BETWEEN_S = 1.1  # two looks of `--once`: the router makes a snapshot per second


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """Configuration of `baton top`: the router to ask, and the form of the output."""

    url: str = setting("http://127.0.0.1:8000", "where the router listens", metavar="URL")
    admin_key: str | None = setting(None, "the router's admin key, or in BATON_ADMIN_KEY", metavar="KEY")
    api_key: str | None = setting(None, "its API key if it has no admin key, or in BATON_API_KEY", metavar="KEY")
    once: bool = setting(False, "print the state once, as text; so too if the output is no terminal")
    json: bool = setting(False, "print the state once, as JSON: a snapshot, and the rates of the second before it")
    log_level: str = setting("warning", "debug shows a traceback with an error")


def run(config: TopConfig) -> int:
    """Show the service until `q` or Ctrl-C. Raises Unavailable, RequestError and ConfigError."""
    client = Client(config.url, config.admin_key or config.api_key)
    if config.json:
        window = Window()
        window.add(look(client))
        time.sleep(_BETWEEN_S)
        snapshot = look(client)
        answer = msgspec.json.encode({"snapshot": snapshot, "rates": window.add(snapshot)})
        print(msgspec.json.format(answer, indent=2).decode())
        return 0
    from .top_view import View  # rich is an extra, which JSON does not need

    view = View(client)
    view.look()
    if config.once or not view.is_on_terminal:
        time.sleep(_BETWEEN_S)
        view.look()
        view.print()
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, so the screen is restored
    with _unbuffered_keys(), view.screen():
        _show(view)
    return 0


def _show(view: View) -> None:
    """Draw until `q` is pressed. A router that does not answer is asked again each second."""
    next_look = time.monotonic() + LOOK_EVERY_S
    while True:
        view.draw()
        key = _read_key(max(0.0, next_look - time.monotonic()))
        if key == b"q":
            return
        view.press(key)
        if time.monotonic() >= next_look:
            view.try_look()
            next_look = time.monotonic() + LOOK_EVERY_S


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Let each key be read when it is pressed, unseen. Does nothing if stdin is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _read_key(timeout_s: float) -> bytes:
    """Return the next key as the terminal sends it, or nothing after `timeout_s`. Arrows are three bytes long."""
    if not sys.stdin.isatty():
        time.sleep(timeout_s)
        return b""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return b""
    key = os.read(sys.stdin.fileno(), 1)
    if key == b"\x1b" and select.select([sys.stdin], [], [], 0.01)[0]:
        key += os.read(sys.stdin.fileno(), 2)
    return key
