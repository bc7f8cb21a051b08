"""The jinja2 environment of chat templates: the one that transformers gives them, with bounds.

A template is the operator's, but a conversation is a client's, and the router serves nobody else while it renders. So
each step of a loop and each call is counted, and rendering ends when it has taken too many steps or too long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain, repeat
from time import monotonic, thread_time
from types import BuiltinMethodType
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, For, Macro, Node, Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_WIDTH = 1 << 16  # of text that a template pads, indents or repeats
MAX_BITS = 1 << 12  # of a number that a template computes
_STEPS_PER_LOOK = 16  # steps between two looks at the clock


class RenderBounds(NamedTuple):
    """The most that one rendering may take."""

    steps: int
    seconds: float  # of the thread's CPU time


RENDER_BOUNDS = RenderBounds(steps=5_000_000, seconds=0.3)


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
