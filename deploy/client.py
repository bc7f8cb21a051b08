"""A small HTTP client for the router, on the standard library: what `baton up` and `baton chat` need."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..metadata.errors import ConfigError, RequestError, Unavailable

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
_TIMEOUT_S = 10.0


class Piece(NamedTuple):
    """A piece of a streamed answer: text, or the reason why it ended (`stop`, `length`, ...), or both."""

    text: str
    finish_reason: str | None = None


class Client:
    """One router. Each call opens a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is like http://127.0.0.1:8000; a trailing /v1 is taken off. Raises ConfigError for anything else."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url {url}: must be like http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @classmethod
    def local(cls, host: str, port: int, api_key: str | None) -> Client:
        """The router that listens on `host` of this machine, which may be a wildcard address."""
        host = _EVERYWHERE.get(host, host)
        return cls(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", api_key)

    def is_ready(self) -> bool:
        """Whether GET /ready says yes. Nobody listening, or no answer in time, is a no."""
        try:
            return self.ready()[0] == 200
        except Unavailable:
            return False

    def ready(self) -> tuple[int, bytes]:
        """Status and body of GET /ready. Raises Unavailable when nobody answers."""
        return self._call("GET", "/ready", timeout_s=2.0)

    def why_not_ready(self) -> str:
        """What GET /ready answers, as text."""
        try:
            status, body = self._call("GET", "/ready")
        except Unavailable as error:
            return str(error)
        return f"/ready answers {status}: {body.decode('utf-8', 'replace').strip()[:500]}"

    def model_names(self) -> list[str]:
        """The names that GET /v1/models lists. Raises Unavailable or RequestError."""
        status, body = self._call("GET", "/v1/models")
        if status != 200:
            raise failure(status, body)
        return [model["id"] for model in json.loads(body)["data"]]

    def metrics(self) -> str:
        """The page of GET /metrics. Raises Unavailable or RequestError."""
        status, body = self._call("GET", "/metrics", timeout_s=2.0)
        if status != 200:
            raise failure(status, body)
        return body.decode("utf-8", "replace")

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of GET `path`. Raises Unavailable when nobody answers."""
        return self._call("GET", path)

    def stream_chat(self, body: dict[str, Any]) -> Generator[Piece]:
        """The pieces of a streamed chat completion. Closing the iterator cancels the request.

        Raises Unavailable when nobody listens or the stream breaks off, RequestError when the router says no.
        """
        connection = self._connect(timeout_s=None)
        try:
            payload = json.dumps({**body, "stream": True})
            headers = {"Content-Type": "application/json", **self._headers}
            connection.request("POST", f"{self._path}/v1/chat/completions", payload, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise failure(response.status, response.read())
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        finally:
            connection.close()

    def _call(self, method: str, path: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
        connection = self._connect(timeout_s)
        try:
            connection.request(method, self._path + path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        finally:
            connection.close()

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _unavailable(self, error: Exception) -> Unavailable:
        if isinstance(error, ConnectionRefusedError):
            return Unavailable(f"nothing listens at {self.url}: start Baton with `baton up`, or name it with --url")
        return Unavailable(f"{self.url}: {error or type(error).__name__}")


def _pieces(response: http.client.HTTPResponse) -> Iterator[Piece]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(event["error"].get("message", "the stream ended in an error"))
        for choice in event.get("choices", ()):
            piece = Piece(choice.get("delta", {}).get("content") or "", choice.get("finish_reason"))
            if any(piece):
                yield piece
    raise Unavailable("the stream broke off before its end")


def failure(status: int, body: bytes) -> RequestError:
    """What a response that is no success says."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace").strip()[:500]
    return RequestError(f"{message} (HTTP {status})")
