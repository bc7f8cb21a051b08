"""The chat template of a model: conversations become prompts as transformers' apply_chat_template makes them.

Templates differ in what they read. Some read a list of parts, others only a text. Some write the arguments of a call as
JSON, others expect them as text. Some drop a call beside an empty text, others write `None` for a null one. So the
router renders a few made-up messages when it reads a template, and looks which form shows the whole message.

A template is the operator's, but a conversation is a client's, and the router serves nobody else while it renders. So
each step of a loop and each call is counted, and rendering ends when it has taken too many steps or too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import chain, repeat
from time import monotonic, thread_time
from types import BuiltinMethodType
from typing import Any, Literal, NamedTuple, cast

from jinja2 import TemplateError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Const, For, Getattr, Macro, Name, Node, Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...metadata.errors import ProtocolError, RequestError
from ...metadata.wire.node_info import ModelCard

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
MAX_WIDTH = 1 << 16  # of text that a template pads, indents or repeats
MAX_BITS = 1 << 12  # of a number that a template computes
_STEPS_PER_LOOK = 16  # steps between two looks at the clock
_PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": "probed",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
_THOUGHTS = frozenset({"reasoning_content", "thinking"})  # names of thoughts that every message has, beside `reasoning`


class RenderBounds(NamedTuple):
    """The most that one rendering may take."""

    steps: int
    seconds: float  # of the thread's CPU time


RENDER_BOUNDS = RenderBounds(steps=5_000_000, seconds=0.3)
_PROBE_BOUNDS = RenderBounds(steps=20_000, seconds=0.02)


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


Kind = Literal["system", "developer", "user", "assistant", "calls", "tool"]  # "calls": of the assistant, with calls
Null = Literal["absent", "null", "empty"]  # how a message without text is given: without the key, as None, as ""
Render = Callable[[list[dict[str, Any]]], str | None]  # None: the template refuses the messages

KINDS: tuple[Kind, ...] = ("calls", "system", "developer", "user", "assistant", "tool")
_NULLS: tuple[Null, ...] = ("absent", "null", "empty")  # transformers leaves null fields out
_FIRST, _SECOND, _BESIDE = "kelpword", "mossword", "fernword"  # texts that no template has
_KEY, _VALUE = "mosskey", "fernvalue"
_CALL_ID = "call0fern"  # nine letters and digits, as Mistral's templates demand
_WRITTEN_OUT = re.compile(r"""['"]text\\?['"]\s*:""")  # a part as Python or JSON writes it


@dataclass(frozen=True, slots=True)
class ContentForm:
    """How a template reads the content of one kind of message."""

    takes_text: bool = True
    takes_parts: bool = False
    null: Null = "empty"
    takes_empty: bool = True  # an empty text loses nothing of the message

    def content(self, texts: list[str] | str | None) -> Content:
        """Return the content of a message: a text or texts of parts."""
        if isinstance(texts, list) and not self.takes_parts:
            texts = "\n".join(texts)
        if texts is None or (texts == "" and not self.takes_empty):
            return None if self.null != "empty" else ""
        if isinstance(texts, str) and not self.takes_text:
            texts = [texts]
        return texts if isinstance(texts, str) else [{"type": "text", "text": text} for text in texts]


Content = str | list[dict[str, str]] | None


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """How a template reads messages. The default is what most templates read."""

    contents: dict[Kind, ContentForm] = field(default_factory=dict[Kind, ContentForm])
    text_arguments: bool = False  # the arguments of a call are read as JSON text, not as an object

    def of(self, kind: Kind) -> ContentForm:
        """Return how the content of a kind of message is read."""
        return self.contents.get(kind, _PLAIN)

    def message(self, kind: Kind, role: str, texts: list[str] | str | None) -> dict[str, Any]:
        """Return a message of this role and content: a text, the texts of parts, or none."""
        form = self.of(kind)
        if texts and texts.__class__ is str and form.takes_text:  # nearly always
            return {"role": role, "content": texts}
        content = form.content(texts)
        if content is None and form.null == "absent":
            return {"role": role}
        return {"role": role, "content": content}


_PLAIN = ContentForm()


def probe(render: Render) -> TemplateForm:
    """Return the form of the template that `render` renders. Kinds of messages that it refuses keep the default."""
    form = _with_calls(render)
    contents = dict(form.contents)
    for kind in KINDS:
        contents[kind] = _content_form(render, form, kind)
    return replace(form, contents=contents)


def _with_calls(render: Render) -> TemplateForm:
    """Return the form that shows a call without text: with the fewest words `None`, as far as possible with absent
    content and an object."""
    found: list[tuple[int, TemplateForm]] = []
    is_read = shows_empty = False
    for text_arguments in (False, True):
        for null in _NULLS:
            form = TemplateForm({"calls": ContentForm(null=null)}, text_arguments)
            conversation = _conversation(form, "calls", None)
            text = render(conversation)
            if text is None:  # some templates know no results of tools
                text = render(conversation[:-1])
            is_read |= text is not None
            if text is None or _KEY not in text or _VALUE not in text:  # Kimi-K2 names the call by its id alone
                continue
            if text_arguments or f"'{_KEY}'" not in text:  # an object that Python writes is no JSON
                found.append((text.count("None"), form))
                shows_empty |= null == "empty"
        if found:
            break
    if not found:  # if the template reads the messages, it has no place for calls
        return TemplateForm({"calls": ContentForm(null="absent" if is_read else "empty")})
    best = min(found, key=lambda each: each[0])[1]
    return replace(best, contents={"calls": replace(best.contents["calls"], takes_empty=shows_empty)})


def _content_form(render: Render, calls: TemplateForm, kind: Kind) -> ContentForm:
    """Return how the content of a kind is read, beside calls in the form that is known."""

    def rendered(texts: list[str] | str | None, form: ContentForm) -> str:
        return render(_conversation(replace(calls, contents={**calls.contents, kind: form}), kind, texts)) or ""

    known = calls.of(kind)
    as_text = rendered(_FIRST, known)
    as_parts = rendered([_FIRST, _SECOND], replace(known, takes_parts=True))
    takes_parts = _in_order(as_parts, _FIRST, _SECOND) and not _WRITTEN_OUT.search(as_parts)
    form = replace(known, takes_parts=takes_parts, takes_text=_FIRST in as_text or not takes_parts)
    if kind == "calls" or _FIRST not in as_text:
        return form
    least = as_text.count("None")
    absent = replace(form, null="absent")
    text = rendered(None, absent)
    return absent if _BESIDE in text and text.count("None") <= least else replace(form, null="empty")


def _conversation(form: TemplateForm, kind: Kind, texts: list[str] | str | None) -> list[dict[str, Any]]:
    """Return a conversation that holds one message of a kind with this content, and the text _BESIDE in another."""
    message = form.message(kind, "assistant" if kind == "calls" else kind, texts)
    if kind == "calls":
        message["tool_calls"] = [_call(form)]
    if kind == "tool":
        message["tool_call_id"] = _CALL_ID
    user, assistant = {"role": "user", "content": _BESIDE}, {"role": "assistant", "content": _BESIDE}
    calls = {**form.message("calls", "assistant", None), "tool_calls": [_call(form)]}
    result = {"role": "tool", "tool_call_id": _CALL_ID, "content": _BESIDE}
    around: dict[Kind, list[dict[str, Any]]] = {
        "system": [message, user],
        "developer": [message, user],
        "user": [message, assistant, user],
        "assistant": [user, message, user],
        "calls": [user, message, result],
        "tool": [user, calls, message],
    }
    return around[kind]


def _call(form: TemplateForm) -> dict[str, Any]:
    arguments = {_KEY: _VALUE}
    function = {"name": "kelpcall", "arguments": json.dumps(arguments) if form.text_arguments else arguments}
    return {"id": _CALL_ID, "type": "function", "function": function}


def _in_order(text: str, first: str, second: str) -> bool:
    return first in text and second in text.partition(first)[2]


class TooMuchWork(TemplateError):
    """Rendering has exceeded its bounds."""


class _CountingGenerator(CodeGenerator):
    """Compiler of templates that call `environment.step` at the start of each step of a loop and of each macro."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: set[int] = set()  # ids of the lists of nodes that are counted

    def visit_For(self, node: For, frame: Frame) -> None:  # noqa: N802
        self._bodies.add(id(node.body))
        super().visit_For(node, frame)

    def macro_body(self, node: Macro | CallBlock, frame: Frame) -> Any:
        self._bodies.add(id(node.body))
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        if id(nodes) in self._bodies:
            self.writeline("environment.step()")
        super().blockvisit(nodes, frame)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Environment of one chat template. Only one rendering runs at a time."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        filters = cast("dict[str, Any]", self.filters)  # pyright: ignore[reportUnknownMemberType]
        names = cast("dict[str, Any]", self.globals)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _to_json
        for name in ("center", "indent"):
            filters[name] = _narrow(filters[name])
        names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.limit(RENDER_BOUNDS)

    def limit(self, bounds: RenderBounds) -> None:
        """Begin a rendering with these bounds. Then `step` counts a step, and raises TooMuchWork at their end."""
        self.step = chain.from_iterable(_steps(bounds)).__next__  # runs in C but for every 16th step

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.step()
        if args and type(args[0]) is int and args[0] > MAX_WIDTH and type(__obj) is BuiltinMethodType:
            raise TooMuchWork(f"the template asks for text of {args[0]} characters; the most is {MAX_WIDTH}")
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"{__obj!r} is not safely callable")
        return __context.call(__obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        else:
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)


def _steps(bounds: RenderBounds) -> Iterator[Iterable[None]]:
    """Yield all steps of a rendering, with a look at the clock now and then. Raises TooMuchWork behind the last one."""
    now, cpu = monotonic(), thread_time()
    for _ in range(0, bounds.steps, _STEPS_PER_LOOK):  # CPU time, which is dear to ask for, is no more than time
        if monotonic() - now > bounds.seconds and thread_time() - cpu > bounds.seconds:
            break
        yield repeat(None, _STEPS_PER_LOOK)
    raise TooMuchWork(
        f"they take it more than {bounds.steps} steps or {bounds.seconds * 1000:g} ms; send fewer messages"
    )


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training. Here its body is only rendered, in a scope of its own
    as with transformers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _narrow(pad: Any) -> Any:
    """Return a filter that refuses a width above MAX_WIDTH as its first argument."""

    def narrow(value: Any, width: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(width, int) and width > MAX_WIDTH:
            raise TooMuchWork(f"the template asks for text of {width} characters; the most is {MAX_WIDTH}")
        return pad(value, *args, **kwargs) if width is None else pad(value, width, *args, **kwargs)

    return narrow


def _check_product(left: Any, right: Any) -> None:
    """Raise TooMuchWork for a text or list that is repeated too often, and for too large a number."""
    for one, other in ((left, right), (right, left)):
        if isinstance(other, int) and hasattr(one, "__len__") and other * len(one) > MAX_WIDTH:
            raise TooMuchWork(f"the template repeats {len(one)} items {other} times; the most is {MAX_WIDTH} in all")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise TooMuchWork(f"the template computes a number of more than {MAX_BITS} bits")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise TooMuchWork(f"the template computes a number of more than {MAX_BITS} bits")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - without a zone, as transformers has it
