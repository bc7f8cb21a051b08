"""Assistant messages with tool calls, as the published chat templates of each family write them.

gemma4        google/gemma-4-E2B-it
harmony       openai/gpt-oss-20b (the head as the model writes it)
hermes        NousResearch/Hermes-2-Pro, Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-8B
llama3_json   meta-llama/Llama-3.1-8B-Instruct (one call; several are divided by "; ", as the model writes them)
mistral       mistralai/Mistral-7B-Instruct-v0.3 (a list), Mistral-Small-3.2 (names and marks)
pythonic      meta-llama/Llama-4-Scout-17B-16E-Instruct
qwen3_coder   Qwen/Qwen3-Coder-30B-A3B-Instruct
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]  # name and arguments


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # what tojson does in Hugging Face's environment of templates


def gemma4(content: str, calls: Calls) -> str:
    def shown(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case bool():
                return "true" if value else "false"
            case dict():
                return "{" + ",".join(f"{key}:{shown(each)}" for key, each in value.items()) + "}"
            case list():
                return f"[{','.join(map(shown, value))}]"
            case _:
                return str(value)

    return content + "".join(f"<|tool_call>call:{name}{shown(arguments)}<tool_call|>" for name, arguments in calls)


def harmony(content: str, calls: Calls) -> str:
    return content + "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def hermes(content: str, calls: Calls) -> str:
    text = content
    for index, (name, arguments) in enumerate(calls):
        text += "\n" if index or content else ""
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
    return text


def llama3_json(content: str, calls: Calls) -> str:
    assert not content, "the template has no place for content beside a call"
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)


def mistral_list(content: str, calls: Calls) -> str:
    listed = [{"name": name, "arguments": arguments, "id": "abcdef123"} for name, arguments in calls]
    return f"{content}[TOOL_CALLS]{_json(listed)}"


def mistral(content: str, calls: Calls) -> str:
    return content + "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{_json(arguments)}" for name, arguments in calls
    )


def pythonic(content: str, calls: Calls) -> str:
    assert not content, "the template has no place for content beside calls"
    texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"<|python_start|>[{', '.join(texts)}]<|python_end|>"


def qwen3_coder(content: str, calls: Calls) -> str:
    text = content
    for index, (name, arguments) in enumerate(calls):
        text += "\n" if index or content else ""
        text += f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            shown = _json(value) if isinstance(value, dict | list) else str(value)
            text += f"<parameter={key}>\n{shown}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


RENDERINGS: dict[str, tuple[str, Callable[[str, Calls], str]]] = {  # -> name of the parser, rendering
    "gemma4": ("gemma4", gemma4),
    "harmony": ("harmony", harmony),
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama3_json),
    "mistral": ("mistral", mistral),
    "mistral_list": ("mistral", mistral_list),
    "pythonic": ("pythonic", pythonic),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
}
