"""Tools of responses as functions of a chat, and the names of their calls."""

from __future__ import annotations

import msgspec
import pytest

from baton.metadata.errors import RequestError
from baton.router.http.generation.tool_types import FunctionChoice, FunctionTool, ToolChoiceObject
from baton.router.http.responses.tools import (
    CalledTool,
    ResponseTools,
    choice_for_chat,
    custom_arguments,
    custom_input,
    name_for_chat,
)
from baton.router.http.responses.types import (
    CustomFormat,
    ResponseCustomTool,
    ResponseFunction,
    ResponseNamedTool,
    ToolNamespace,
)

GRAMMAR = CustomFormat(type="grammar", syntax="regex", definition="x+")


def test_what_the_model_sees() -> None:
    tools = ResponseTools(
        [
            ResponseFunction(name="f", description="F", parameters={"type": "object"}, strict=True),
            ResponseCustomTool(name="c", description="C", format=GRAMMAR),
            ToolNamespace(name="n__", tools=[ResponseFunction(name="g"), ResponseCustomTool(name="c")]),
        ]
    )
    f, c, *inner = [tool.function for tool in tools.for_chat]
    assert f == FunctionTool("f", "F", {"type": "object"}, True)
    assert c.description == "C\n\nThe input follows this grammar (regex):\nx+"
    assert c.parameters is not None and list(c.parameters["properties"]) == ["input"]
    assert [(tool.name, tool.description) for tool in inner] == [("n__g", None), ("n__c", None)]
    assert [tools.called(name) for name in ("f", "c", "n__g", "n__c", "other")] == [
        CalledTool("f"),
        CalledTool("c", is_custom=True),
        CalledTool("g", "n__"),
        CalledTool("c", "n__", is_custom=True),
        CalledTool("other"),
    ]
    assert tools.paths["tools[3].function"] == "tools[2].tools[1]"
    assert name_for_chat("g", "n__") == "n__g"


def test_a_tool_that_only_code_may_call_is_refused() -> None:
    inner = ResponseFunction(name="f", allowed_callers=["programmatic"])
    with pytest.raises(RequestError, match=r"tools\[0\].tools\[0\].allowed_callers: only the model"):
        ResponseTools([ToolNamespace(name="n", tools=[inner])])
    ResponseTools([ResponseFunction(name="f", allowed_callers=["programmatic", "direct"])])


@pytest.mark.parametrize("text", ["", 'a\n"é"', "{}"])
def test_the_input_comes_back_from_its_arguments(text: str) -> None:
    assert custom_input(msgspec.json.encode(custom_arguments(text)).decode()) == text


@pytest.mark.parametrize("arguments", ["{}", '{"patch": "x"}', '{"input": 1}'])
def test_other_arguments_are_the_input_themselves(arguments: str) -> None:
    assert custom_input(arguments) == arguments


def test_choices() -> None:
    for kind in ("function", "custom"):
        choice = ResponseNamedTool(name="f", type=kind)  # type: ignore[arg-type]
        assert choice_for_chat(choice) == ToolChoiceObject("function", FunctionChoice("f"))
    assert choice_for_chat("required") == "required" and choice_for_chat(None) is None
