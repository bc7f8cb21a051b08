"""The models that are served."""

from __future__ import annotations

import anthropic

from ...conftest import System


def test_models_are_listed_and_found_by_name(system: System) -> None:
    _, listed, _ = system.router.request("GET", "/v1/models")
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 512)
    assert system.router.request("GET", "/v1/models/fake")[:2] == (200, model)
    for name in ("other", "a/path", "fake%2Fmore"):
        status, body, _ = system.router.request("GET", f"/v1/models/{name}")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "not_found", "model")


def test_anthropics_client_lists_models(system: System) -> None:
    with anthropic.Anthropic(base_url=system.router.url, api_key="none", max_retries=0) as client:
        page = client.models.list()
        assert [model.id for model in page] == ["fake"] == [page.first_id] and page.has_more is False
        model = client.models.retrieve("fake")
        assert (model.type, model.display_name, model.lifecycle) == ("model", "fake", "active")
