"""Extensions of schemathesis for test_openapi.py, which runs it in its own process.

Every string that names a model becomes the name of the served model, so that requests get further than 404. The check
`positive_data_acceptance` is replaced by one that forgives the refusals in ARGUED.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

# Refusals of bodies that are valid by the schema. JSON Schema cannot state these rules: they compare fields of a body,
# or depend on the model, whose vocabulary and context differ.
ARGUED = re.compile(
    "|".join(
        (
            "out of range; the vocabulary has",  # a token id
            "exceed the context of",  # prompt and max_tokens
            "leaves none to generate",  # the prompt's length
            "the model's context has",  # the prompt's length
            "the prompt has no tokens",  # what an empty text becomes depends on the tokenizer
            "is above max_tokens",  # min_tokens
            "is above this router's limit",  # timeout_s
            "only equal is served",  # best_of and n
            "needs stream to be true",  # stream_options and stream
            "0 needs echo to be true",  # max_tokens and echo
            "needs logprobs to be true",  # top_logprobs and logprobs
            "excludes add_generation_prompt",  # continue_final_message
            "continue_final_message: the ",  # the final message, and how the model's template writes it
            "^messages: the (final message|model's chat template)",  # the same
            "token ids and prompts are mixed",  # the document says what each item may be, not all together
            "the model's chat template refuses",  # the template is the model's
            "has its own field",  # chat_template_kwargs
            "^chat_template_kwargs: .* is no variable",
            "^chat_template_kwargs: documents must be",
            "^structured_outputs[.:]",  # exactly one; what is a grammar is for llguidance to say
            "^output_config[.]format[.]schema",
            "^text[.]format",
            "^response_format(: type|[.]json_schema[.]schema|: )",  # which fields a type has; and so for the schema
            "^ignore_eos: excludes",  # a grammar
            "only a message of",  # a field of messages with another role
            "a message of a tool needs it",  # tool_call_id
            "no call before it has the id",  # tool_call_id and the messages before
            "it must be a JSON object as text",  # arguments
            "is there twice",  # names of tools
            "there is no tool",  # tool_choice and tools
            "required call needs tools",  # tool_choice and tools
            "excludes a last message of the assistant",  # thinking and messages
            "no message before this one of a function has a call",  # a function's answer and the messages before
            "^tool_choice: type '[a-z]+' (excludes a name|needs the name)",
            "only the model calls tools",  # allowed_callers
            "it cannot hold tool_use",  # the last message of the assistant
            "cannot read thoughts of this model",
            "has no place for tools",  # the template is the model's
            "its reasoning_effort is",  # reasoning_effort and that of chat_template_kwargs
            "Expected `int[^`]*`, got `float`",  # 5.0 is an integer to JSON Schema, not to the decoder
        )
    )
)


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) <= 256:
        case.body["model"] = "fake"
    if case.operation.path == "/live":
        case.query = {**(case.query or {}), "once": "true"}  # else the answer has no end


@schemathesis.check
def valid_bodies_are_accepted(context: Any, response: Any, case: Any) -> bool | None:
    if response.status_code == 400 and ARGUED.search(response.json()["error"]["message"]):
        return None
    return positive_data_acceptance(context, response, case)
