"""Fields under another name: only refusals of a named field change."""

from __future__ import annotations

import pytest

from baton.metadata.errors import BatonError, RequestError
from baton.router.errors import NotFound
from baton.router.http.bodies.fields import renamed

NAMES = {"stop": "stop_sequences", "a.b": "c.d.e", "f[].g.h": "i[].h", "f[].g": "i[]"}


@pytest.mark.parametrize(
    ("words", "shown", "param"),
    [
        ("stop: too many", "stop_sequences: too many", "stop_sequences"),
        ("stop[3]: empty", "stop_sequences[3]: empty", "stop_sequences"),
        ("a.b.x: bad", "c.d.e.x: bad", "c"),
        ("stop_token_ids: bad", "stop_token_ids: bad", "p"),
        ("a: bad", "a: bad", "p"),
        ("f[12].g.h.x: bad", "i[12].h.x: bad", "i"),
        ("f[0].g.name: bad", "i[0].name: bad", "i"),
        ("f[0].gh: bad", "f[0].gh: bad", "p"),
        ("f.g: bad", "f.g: bad", "p"),
    ],
)
def test_a_refusal_names_the_clients_field(words: str, shown: str, param: str) -> None:
    with pytest.raises(RequestError) as caught, renamed(NAMES):
        raise RequestError(words, param="p")
    assert (str(caught.value), caught.value.param) == (shown, param)


@pytest.mark.parametrize("error", [NotFound("model 'x' is not served", param="model"), BatonError("stop: broken")])
def test_other_errors_stay_as_they_are(error: BatonError) -> None:
    with pytest.raises(BatonError) as caught, renamed(NAMES):
        raise error
    assert caught.value is error
