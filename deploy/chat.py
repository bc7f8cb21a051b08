"""`baton chat`: a conversation in the terminal with streamed answers. Each line of input is one message."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any

from ..metadata.config import setting
from ..metadata.errors import BatonError, RequestError
from .client import Client

_HELP = (
    "/reset starts a new conversation, /max N limits an answer to N tokens, /exit (or Ctrl-D) leaves, Ctrl-C stops an "
    "answer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The router to ask, and the parameters of each request."""

    url: str = setting("http://127.0.0.1:8000", "talk to the router at this URL", metavar="URL")
    api_key: str | None = setting(None, "send this API key (default: $BATON_API_KEY)", metavar="KEY")
    model: str | None = setting(None, "talk to this model (default: the first that the router lists)", metavar="NAME")
    system: str | None = setting(None, "start the conversation with this system message")
    temperature: float | None = setting(
        None, "sample at this temperature; 0 always takes the most likely token (default: the model's own)"
    )
    top_p: float | None = setting(
        None, "sample only from the most likely tokens, up to this total probability (default: the model's own)"
    )
    max_tokens: int = setting(512, "end an answer after this many tokens")
    seed: int | None = setting(None, "sample with this seed; the same seed gives the same answers")
    log_level: str = setting("warning", "print a traceback with each error if this is debug")


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the way to ask for the next one."""

    client: Client
    model: str
    config: ChatConfig
    messages: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None  # of the last answer, if it is complete
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_tokens = self.config.max_tokens

    @property
    def why_cut(self) -> str | None:
        """Why the last answer ended early and what to do, or None if the model ended it."""
        if self.finish_reason == "length":
            return f"cut at {self.max_tokens} tokens; /max N or --max-tokens N allows more"
        return None if self.finish_reason in (None, "stop") else f"ended early: {self.finish_reason}"

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.config.system}] if self.config.system else []

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer as it arrives.

        If no text arrives, the question is removed from the conversation. Half an answer stays in it.
        """
        self.messages.append({"role": "user", "content": text})
        self.finish_reason = None
        texts: list[str] = []
        try:
            with closing(self.client.stream_chat(self._body())) as stream:
                for chunk in stream:
                    self.finish_reason = chunk.finish_reason or self.finish_reason
                    if chunk.text:
                        texts.append(chunk.text)
                        yield chunk.text
        finally:
            if texts:
                self.messages.append({"role": "assistant", "content": "".join(texts)})
            else:
                self.messages.pop()

    def _body(self) -> dict[str, Any]:
        config = self.config
        given = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": self.max_tokens,
            "seed": config.seed,
        }
        return {
            "model": self.model,
            "messages": self.messages,
            **{name: value for name, value in given.items() if value is not None},
        }


def run(config: ChatConfig) -> int:
    """Talk until the input ends. Returns 1 if an answer failed and the input was not typed at a terminal, else 0."""
    client = Client(config.url, config.api_key)
    conversation = Conversation(client, config.model or client.model_names()[0], config)
    conversation.reset()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # no request can hold a byte that is no text; terminals show "?"
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # noqa: F401  (line editing and history for input())

        print(f"{conversation.model} at {client.url}. {_HELP}")
    has_failed = False
    for line in _lines(is_interactive):
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line.split()[:1] == ["/max"]:
            _set_max(conversation, line.split()[1:])
        elif line.startswith("/"):
            print(f"{line.split()[0]} is not a command: {_HELP}", file=sys.stderr)
        elif line:
            has_failed |= not _answer(conversation, line)
    return int(has_failed and not is_interactive)


def _lines(is_interactive: bool) -> Iterator[str]:
    while True:
        try:
            yield input("> " if is_interactive else "").strip()
        except EOFError:
            if is_interactive:
                print()
            return
        except KeyboardInterrupt:
            print()  # drop the unfinished line and read the next one
            if not is_interactive:
                raise


def _set_max(conversation: Conversation, words: list[str]) -> None:
    if len(words) == 1 and words[0].isascii() and words[0].isdecimal() and 0 < int(words[0]) < 1 << 31:
        conversation.max_tokens = int(words[0])
    else:
        print(f"/max needs a number of tokens, for example /max {2 * conversation.max_tokens}", file=sys.stderr)


def _answer(conversation: Conversation, text: str) -> bool:
    """Print the answer. Returns False if it failed."""
    try:
        with closing(conversation.ask(text)) as answer:
            for part in answer:
                print(part, end="", flush=True)
        print()
        if conversation.why_cut is not None:
            print(f"({conversation.why_cut})", file=sys.stderr)
    except KeyboardInterrupt:
        print(" (stopped)")
    except BatonError as error:
        print(f"{'refused' if isinstance(error, RequestError) else 'failed'}: {error}", file=sys.stderr)
        return False
    return True
