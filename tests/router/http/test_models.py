"""The models that are served."""

from __future__ import annotations

from ..conftest import System


def test_models_are_listed_and_found_by_name(system: System) -> None:
    _, listed, _ = system.router.request("GET", "/v1/models")
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 512)
    assert system.router.request("GET", "/v1/models/fake")[:2] == (200, model)
    for name in ("other", "a/path", "fake%2Fmore"):
        status, body, _ = system.router.request("GET", f"/v1/models/{name}")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "not_found", "model")
