"""`baton chat`: a conversation in the terminal, answers streamed. One line of input is one turn."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..metadata.config import setting
from ..metadata.errors import BatonError, RequestError
from .client import Client

_HELP = (
    "/reset forgets the conversation, /max N sets the longest answer in tokens, /exit (or Ctrl-D) leaves, Ctrl-C stops "
    "an answer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """What to ask, and whom."""

    url: str = setting("http://127.0.0.1:8000", "where the router listens", metavar="URL")
    api_key: str | None = setting(None, "the router's API key, or in BATON_API_KEY", metavar="KEY")
    model: str | None = setting(None, "name of the model (default: the first that the router lists)", metavar="NAME")
    system: str | None = setting(None, "system message that begins the conversation")
    temperature: float | None = setting(None, "0 is greedy (default: the model's own)")
    top_p: float | None = setting(None, "sample from the most likely tokens of this total probability")
    max_tokens: int = setting(512, "longest answer, in tokens")
    seed: int | None = setting(None, "the same seed gives the same answers")
    log_level: str = setting("warning", "debug shows a traceback with an error")


@dataclass(slots=True)
class Conversation:
    """The messages so far, and how to ask for the next."""

    client: Client
    model: str
    config: ChatConfig
    messages: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None  # of the last answer, if it came to its end
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_tokens = self.config.max_tokens

    @property
    def why_cut(self) -> str | None:
        """Why the last answer is not all that the model would have said, and what helps; None if it is."""
        if self.finish_reason == "length":
            return f"cut at {self.max_tokens} tokens; /max N or --max-tokens N allows more"
        return None if self.finish_reason in (None, "stop") else f"ended early: {self.finish_reason}"

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.config.system}] if self.config.system else []

    def ask(self, text: str) -> Generator[str]:
        """The answer's pieces as they come. A question without any answer is taken back; half an answer is kept."""
        self.messages.append({"role": "user", "content": text})
        self.finish_reason = None
        pieces: list[str] = []
        try:
            with closing(self.client.stream_chat(self._body())) as stream:
                for piece in stream:
                    self.finish_reason = piece.finish_reason or self.finish_reason
                    if piece.text:
                        pieces.append(piece.text)
                        yield piece.text
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _body(self) -> dict[str, Any]:
        config = self.config
        wanted = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": self.max_tokens,
            "seed": config.seed,
        }
        return {
            "model": self.model,
            "messages": self.messages,
            **{name: value for name, value in wanted.items() if value is not None},
        }


def run(config: ChatConfig) -> int:
    """Talks until the input ends. Exit status 1 when an answer failed and nobody sat there to try again."""
    client = Client(config.url, config.api_key)
    conversation = Conversation(client, config.model or client.model_names()[0], config)
    conversation.reset()
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
            print(f"{line.split()[0]} is no command: {_HELP}", file=sys.stderr)
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
            print()  # an unfinished line is thrown away, the conversation goes on
            if not is_interactive:
                raise


def _set_max(conversation: Conversation, words: list[str]) -> None:
    if len(words) == 1 and words[0].isascii() and words[0].isdecimal() and 0 < int(words[0]) < 1 << 31:
        conversation.max_tokens = int(words[0])
    else:
        print(f"/max takes a number of tokens, as in /max {2 * conversation.max_tokens}", file=sys.stderr)


def _answer(conversation: Conversation, text: str) -> bool:
    """Prints the answer; False when it failed."""
    try:
        with closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print()
        if conversation.why_cut is not None:
            print(f"({conversation.why_cut})", file=sys.stderr)
    except KeyboardInterrupt:
        print(" (stopped)")
    except BatonError as error:
        print(f"{'refused' if isinstance(error, RequestError) else 'failed'}: {error}", file=sys.stderr)
        return False
    return True
