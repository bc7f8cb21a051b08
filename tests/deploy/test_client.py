"""The client of the commands: URLs, streams and errors."""

from __future__ import annotations

import pytest

from baton.deploy.client import Client
from baton.deploy.up import free_port
from baton.metadata.errors import ConfigError, RequestError, Unavailable

from .conftest import Server


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:y", "http://x:99999999", "http://[::1", "http://me:pw@x"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url") as error:
        Client(url)
    assert "pw" not in str(error.value)


def test_the_client_takes_urls_as_people_write_them(server: Server) -> None:
    for url in [server.url, server.url + "/", server.url + "/v1", server.url + "/v1/", server.url[len("http://") :]]:
        assert Client(url).model_names() == ["toy"]
        chunks = list(Client(url).stream_chat({"messages": [{"content": "hi"}]}))
        assert "".join(chunk.text for chunk in chunks).startswith("answer")


def test_the_client_raises_the_error_of_the_router(server: Server) -> None:
    with pytest.raises(RequestError, match=r"no such thing \(HTTP 400\)"):
        list(Client(server.url).stream_chat({"messages": [{"content": "refuse"}]}))
    with pytest.raises(Unavailable, match="a node died"):
        list(Client(server.url).stream_chat({"messages": [{"content": "fail"}]}))
    client = Client.local("0.0.0.0", free_port(), None)
    assert not client.is_ready()
    assert "nothing listens" in client.why_not_ready()
