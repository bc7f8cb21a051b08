"""The chat template of a model: conversations become prompts as transformers' apply_chat_template makes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from jinja2.nodes import Const, Getattr, Name

from ...metadata.errors import ProtocolError, RequestError
from ...metadata.wire.node_info import ModelCard
from .template_environment import RENDER_BOUNDS, RenderBounds, TemplateEnvironment
from .template_form import TemplateForm, probe

OWN_FIELDS = frozenset({"add_generation_prompt", "continue_final_message", "messages", "tools"})  # of a body
_NO_VARIABLES = frozenset(  # parameters of apply_chat_template that are no variables of a template
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
_PROBE_BOUNDS = RenderBounds(steps=20_000, seconds=0.02)
_PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": "probed",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
_THOUGHTS = frozenset({"reasoning_content", "thinking"})  # names of thoughts that every message has, beside `reasoning`


class ChatTemplate:
    """Chat template of a model. It runs in jinja2's sandbox, with the helper functions that templates expect."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ProtocolError if the template does not compile."""
        self.source = source
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
        except Exception as error:  # also what Python says of the code that jinja2 makes
            raise ProtocolError(f"the model's chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)
        words = {each.value for each in tree.find_all(Const)}
        self.knows_developer = "developer" in words  # as a role of messages
        read = words | {each.attr for each in tree.find_all(Getattr)}
        self.reads_reasoning = "reasoning" in read and not read & _THOUGHTS  # under this name alone
        self._variables = {each.name for each in tree.find_all(Name) if each.ctx == "load"}
        self.knows_tools = "tools" in self._variables
        self._forms = {has_tools: self._probed(has_tools=has_tools) for has_tools in {False, self.knows_tools}}

    @classmethod
    def of(cls, card: ModelCard) -> ChatTemplate | None:
        """Return the template of a model, None if it has none."""
        return cls(card.chat_template, card.special_tokens) if card.chat_template else None

    @cached_property
    def late_roles(self) -> frozenset[str]:
        """Which of system and developer are roles whose messages the template also writes behind other messages."""
        return frozenset(role for role in ("system", "developer") if self._writes_late(role))

    def knows(self, variable: str) -> bool:
        """Whether the template uses a variable of this name."""
        return variable in self._variables

    def form(self, *, has_tools: bool) -> TemplateForm:
        """Return the form in which the template reads messages, with or without tools."""
        return self._forms[has_tools and self.knows_tools]

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
        bounds: RenderBounds = RENDER_BOUNDS,
    ) -> str:
        """Return the prompt text of a conversation. `options` are further variables, and win over special tokens.

        Raises RequestError if an option is no variable, or if the template refuses the messages or exceeds `bounds`.
        """
        _check_options(options)
        variables = {
            "documents": None,
            **self._special_tokens,
            **options,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        self._environment.limit(bounds)
        try:
            return self._template.render(variables)
        except Exception as error:  # templates are foreign code and may raise anything
            words = str(error) if isinstance(error, TemplateError) else "they are not of the kind that it knows"
            raise RequestError(f"the model's chat template refuses these messages: {words}", param="messages") from None

    def _probed(self, *, has_tools: bool) -> TemplateForm:
        tools = [_PROBED_TOOL] if has_tools else None

        def render(messages: list[dict[str, Any]]) -> str | None:
            try:
                return self.render(messages, add_generation_prompt=True, options={}, tools=tools, bounds=_PROBE_BOUNDS)
            except RequestError:
                return None

        return probe(render)

    def _writes_late(self, role: str) -> bool:
        form, text = self.form(has_tools=False), "behind"
        conversation: list[Any] = [("system", "first"), ("user", "hello"), (role, text)]
        messages = [form.message(each, each, words) for each, words in conversation]
        try:
            return text in self.render(messages, add_generation_prompt=True, options={}, bounds=_PROBE_BOUNDS)
        except RequestError:
            return False


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise RequestError for a variable of chat_template_kwargs that is none, or that the body gives itself."""
    for name in sorted(options.keys() & (OWN_FIELDS | _NO_VARIABLES)):
        words = "has its own field" if name in OWN_FIELDS else "is no variable of a chat template; leave it out"
        raise RequestError(f"chat_template_kwargs: {name} {words}", param="chat_template_kwargs")
    documents = options.get("documents")
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(each, dict) for each in documents)  # pyright: ignore
    ):
        raise RequestError(
            "chat_template_kwargs: documents must be a list of objects, as {'title': ..., 'text': ...}",
            param="chat_template_kwargs",
        )
