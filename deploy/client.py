"""A small HTTP client for the router, used by the commands that ask it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from ..metadata.errors import ConfigError, RequestError, Unavailable
from .terminal import printable

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
_TIMEOUT_S = 10.0
_KEYS = (
    "; give the router's admin key, --admin-key or BATON_ADMIN_KEY (start the router with one if it has none), else an "
    "API key, --api-key or BATON_API_KEY"
)
_Answer = TypeVar("_Answer")
Key = str | Callable[[], str | None] | None  # an API key, or what returns the one of the moment


class StreamPart(NamedTuple):
    """A chunk of a streamed answer: text, or the reason why the answer ended (`stop`, `length`, ...), or both."""

    text: str
    finish_reason: str | None = None


class HttpAnswer(NamedTuple):
    """The whole answer to a request. `date`: what its header says of the router's clock."""

    status: int
    body: bytes
    date: str


class Client:
    """One router. Each call opens its own connection."""

    def __init__(self, url: str, api_key: Key = None) -> None:
        """`url` is like http://127.0.0.1:8000; a trailing /v1 is removed. Raises ConfigError if it is no such URL."""
        wrong = ConfigError(f"--url {url}: write it like http://127.0.0.1:8000")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.username is not None:  # messages and files name the address
            raise ConfigError("--url holds a password or a key: give it by BATON_API_KEY")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self.url = url.rstrip("/").removesuffix("/v1")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key = api_key

    @classmethod
    def local(cls, host: str, port: int, api_key: Key) -> Client:
        """Return a client for the router on this machine that listens on `host`, which may be a wildcard address."""
        host = _WILDCARDS.get(host, host)
        return cls(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", api_key)

    def is_ready(self) -> bool:
        """Return whether GET /ready answers 200. False if nobody listens or no answer comes in time."""
        try:
            return self.ready()[0] == 200
        except Unavailable:
            return False

    def ready(self) -> tuple[int, bytes]:
        """Return status and body of GET /ready. Raises Unavailable if nobody answers."""
        return self.get("/ready", timeout_s=2.0)

    def why_not_ready(self) -> str:
        """Return the answer of GET /ready as text."""
        try:
            status, body = self.get("/ready")
        except Unavailable as error:
            return str(error)
        return f"/ready answers {status}: {_one_line(body.decode('utf-8', 'replace'))[:500]}"

    def model_names(self) -> list[str]:
        """Return the names that GET /v1/models lists. Raises Unavailable or RequestError."""
        status, body = self.get("/v1/models")
        if status != 200:
            raise _with_key(failure(status, body), status)
        return [model["id"] for model in json.loads(body)["data"]]

    def get(self, path: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
        """Return status and body of GET `path`. Raises Unavailable if nobody answers."""
        answer = self.exchange(path, timeout_s=timeout_s)
        return answer.status, answer.body

    def read(self, path: str, timeout_s: float = _TIMEOUT_S, absent: str = "") -> bytes:
        """Return the answer of GET `path`. Raises Unavailable if nobody answers, RequestError if it is an error.

        `absent`: what it means if there is no such path."""
        status, body = self.get(path, timeout_s)
        if status == 404 and absent:
            raise Unavailable(f"{self.url}: {absent}")
        if status != 200:
            raise RequestError(f"{failure(status, body)}{_KEYS if status in (401, 403) else ''}")
        return body

    def decoded(self, path: str, body: bytes, kind: type[_Answer]) -> _Answer:
        """Return the answer of GET `path` as `kind`. Raises Unavailable if it is none."""
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise Unavailable(f"{self.url}{path}: this is not the answer of a Baton router: {body[:80]!r}") from error

    def exchange(
        self, path: str, headers: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S
    ) -> HttpAnswer:
        """Return the answer to GET `path`, with more `headers`. Raises Unavailable if none comes in time."""
        connection = self._connect(timeout_s)
        try:
            connection.request("GET", self._path + path, headers={**self._headers(), **(headers or {})})
            response = connection.getresponse()
            return HttpAnswer(response.status, response.read(), response.headers.get("Date", ""))
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        finally:
            connection.close()

    def stream_chat(self, body: dict[str, Any]) -> Generator[StreamPart]:
        """Yield the chunks of a streamed chat completion. Closing the generator cancels the request.

        Raises Unavailable if nobody listens or the stream breaks off, RequestError if the router refuses the request.
        """
        connection = self._connect(timeout_s=None)
        try:
            payload = json.dumps({**body, "stream": True})
            headers = {"Content-Type": "application/json", **self._headers()}
            connection.request("POST", f"{self._path}/v1/chat/completions", payload, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _with_key(failure(response.status, response.read()), response.status)
            yield from _chunks(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        key = self._api_key() if callable(self._api_key) else self._api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _unavailable(self, error: Exception) -> Unavailable:
        if isinstance(error, ConnectionRefusedError):
            return Unavailable(f"nothing listens at {self.url}: run `baton up`, or give a router's address with --url")
        return Unavailable(f"{self.url}: {error or type(error).__name__}")


def _chunks(response: http.client.HTTPResponse) -> Iterator[StreamPart]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(_one_line(event["error"].get("message", "the stream ended in an error")))
        for choice in event.get("choices", ()):
            chunk = StreamPart(choice.get("delta", {}).get("content") or "", choice.get("finish_reason"))
            if any(chunk):
                yield chunk
    raise Unavailable("the stream broke off before its end")


def failure(status: int, body: bytes) -> RequestError:
    """Return the error of a response with a status other than 200."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = _one_line(body.decode("utf-8", "replace"))[:500]
    return RequestError(f"{_one_line(message)} (HTTP {status})")


def _with_key(error: RequestError, status: int) -> RequestError:
    """Return the error of a client's route, with how to give a key if that is what it lacks."""
    return RequestError(f"{error}; give an API key, --api-key or BATON_API_KEY") if status == 401 else error


def _one_line(text: object) -> str:
    """Return what a server said as one line that a terminal shows and does not obey."""
    return printable(" ".join(str(text).split()))
