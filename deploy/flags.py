"""Flags from configuration dataclasses: a field is a flag, a TOML key and an attribute, and is written once.

A field's annotation gives the type (`int | None`, `Literal[...]`, `bool` as --x / --no-x, `tuple[str, ...]` as a flag
that is given once for each item), its metadata the help text (`metadata.config.setting`), the class its default.
Precedence: flag, environment, TOML table, default.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ..metadata.errors import ConfigError

Config = TypeVar("Config")

# Few on purpose: Kubernetes sets variables such as BATON_PORT in every pod beside a service called "baton".
ENVIRONMENT = {"api_key": "BATON_API_KEY", "admin_key": "BATON_ADMIN_KEY"}
SECRETS = frozenset(ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration field as flags and files see it."""

    name: str
    kind: type  # bool, int, float or str; tuple: any number of str
    choices: tuple[str, ...] | None
    default: Any
    text: str
    metavar: str | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        return _WANTED[self.kind]

    def check(self, value: object) -> Any:
        """`value` in the field's type. Raises ValueError that says what is wanted."""
        if self.kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
        elif self.kind is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
                return tuple(items)
        elif type(value) is self.kind and (self.choices is None or value in self.choices):
            return value
        raise ValueError(f"must be {self.wanted}")


_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    tuple: "a list of texts in quotes",
}


@cache
def settings_of(config: type) -> tuple[Setting, ...]:
    """The fields of a configuration dataclass, in order, base classes first."""
    hints = get_type_hints(config)
    return tuple(_setting(item, hints[item.name]) for item in fields(config))


def by_name(*configs: type, skip: Iterable[str] = ()) -> dict[str, Setting]:
    """The settings of several configurations together; the first that has a name gives its default and text."""
    settings: dict[str, Setting] = {}
    for config in configs:
        for setting in settings_of(config):
            if setting.name not in skip:
                settings.setdefault(setting.name, setting)
    return settings


def _setting(item: Any, hint: Any) -> Setting:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [part for part in parts if part is not NoneType]
    assert len(kinds) == 1, f"{item.name}: {hint} cannot be a flag"
    is_literal = get_origin(kinds[0]) is Literal
    choices = get_args(kinds[0]) if is_literal else None
    kind = str if is_literal else tuple if kinds[0] == tuple[str, ...] else kinds[0]
    assert kind in _WANTED, f"{item.name}: {hint} cannot be a flag"
    assert item.default is not MISSING, f"{item.name}: a setting needs a default"
    text = item.metadata.get("help", "")
    return Setting(item.name, kind, choices, item.default, text, item.metadata.get("metavar"))


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as ConfigError, with the nearest right flag."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def refuse(self, unknown: str) -> NoReturn:
        """Says that this parser has no such argument, and which is most like it."""
        self.error(f"unknown argument {unknown!r}{nearest(unknown.split('=')[0], self._option_string_actions)}")


def add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """The setting's flag; when it is not given the parsed arguments have no such attribute."""
    text = setting.text.replace("%", "%%")
    if setting.kind is tuple:
        parser.add_argument(
            setting.flag, action="append", default=argparse.SUPPRESS, help=text, metavar=setting.metavar or "TEXT"
        )
        return
    if setting.default is not None and setting.kind is not bool:
        text += f" (default: {setting.default})"
    if setting.kind is bool:
        text += f" (default: {'yes' if setting.default else 'no'})"
        parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    metavar = setting.metavar or (None if setting.choices else {int: "N", float: "X", str: "TEXT"}[setting.kind])
    parser.add_argument(
        setting.flag,
        type=setting.kind,
        choices=setting.choices,
        default=argparse.SUPPRESS,
        help=text,
        metavar=metavar,
    )


def resolve(
    config: type[Config], args: argparse.Namespace, table: Mapping[str, Any], environ: Mapping[str, str]
) -> Config:
    """The effective configuration: flags in `args` over `environ` over the (checked) TOML `table` over defaults."""
    values: dict[str, Any] = {}
    for setting in settings_of(config):
        variable = ENVIRONMENT.get(setting.name)
        if hasattr(args, setting.name):
            values[setting.name] = _checked(setting, getattr(args, setting.name))
        elif variable is not None and environ.get(variable):
            values[setting.name] = environ[variable]
        elif setting.name in table:
            values[setting.name] = table[setting.name]
    return config(**values)


def _checked(setting: Setting, value: object) -> Any:
    try:
        return setting.check(value)
    except ValueError as error:
        raise ConfigError(f"{setting.flag} {value}: {error}") from None


def to_argv(config: Any, skip: Iterable[str] = SECRETS) -> list[str]:
    """The flags that make `config` from the defaults. Secrets are left out: the environment carries them."""
    argv: list[str] = []
    for setting in settings_of(type(config)):
        value = getattr(config, setting.name)
        if setting.name in skip or value == setting.default:
            continue
        if setting.kind is bool:
            argv.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif setting.kind is tuple:
            argv += [f"{setting.flag}={item}" for item in value]
        else:
            argv.append(f"{setting.flag}={value}")  # one word, so that values may begin with a dash
    return argv


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
