"""Settings: each field of a configuration dataclass is a flag, a TOML key and, for secrets, an environment variable.

A field's annotation gives the type: `int | None`, `Literal[...]`, `bool` (--x and --no-x), or `tuple[str, ...]` (a flag
that may be given several times). Its metadata gives the help text (`metadata.config.setting`) and, for choices that a
registry has, `choices`. The class gives its default.
`resolve` decides which source wins.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ..metadata.deprecation import Replaced
from ..metadata.errors import ConfigError
from . import foreign_flags

Config = TypeVar("Config")

# Only secrets have an environment variable: in Kubernetes, a service named "baton" gives every pod beside it variables
# such as BATON_PORT, which must not change a setting.
_ENVIRONMENT = {
    "api_key": "BATON_API_KEY",
    "admin_key": "BATON_ADMIN_KEY",
    "cache_secret": "BATON_CACHE_SECRET",
}

# Flags of this table still work, and so do their configuration keys: an old one sets what the new one sets.
# If nothing takes its place, the setting itself is still there.
REPLACED: tuple[Replaced, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a configuration class as a flag and a TOML key."""

    name: str
    kind: type  # bool, int, float, str, or tuple (of str)
    choices: tuple[str, ...] | None
    default: Any
    text: str
    metavar: str | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str | None:
        """The environment variable that can set the field. Only secrets have one."""
        return _ENVIRONMENT.get(self.name)

    @property
    def wanted(self) -> str:
        """A description of the values that `check` accepts."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        return _WANTED[self.kind]

    def check(self, value: object) -> Any:
        """Return `value` in the field's type. Raises ValueError that describes the accepted values."""
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
    """Return the settings of a configuration dataclass, those of its base classes first."""
    hints = get_type_hints(config)
    return tuple(_setting(item, hints[item.name]) for item in fields(config))


def by_name(*configs: type, skip: Iterable[str] = ()) -> dict[str, Setting]:
    """Return the settings of several classes by name. If two have a name in common, the first one's setting counts."""
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
    choices = get_args(kinds[0]) if is_literal else item.metadata.get("choices")
    kind = str if is_literal else tuple if kinds[0] == tuple[str, ...] else kinds[0]
    assert kind in _WANTED, f"{item.name}: {hint} cannot be a flag"
    assert item.default is not MISSING, f"{item.name}: a setting needs a default"
    text = item.metadata.get("help", "")
    return Setting(item.name, kind, choices, item.default, text, item.metadata.get("metavar"))


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError and suggests the flag that was probably meant."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def refuse(self, unknown: str, commands: Sequence[str] = ()) -> NoReturn:
        """Raise ConfigError for an argument that this parser does not have. `commands`: those that have it."""
        name = unknown.split("=")[0]
        known = self._option_string_actions
        if not unknown.startswith("-"):
            hint = f"; did you mean --model {unknown}?" if "--model" in known else ""
        elif commands:
            hint = f"; it is a flag of {', '.join(f'`baton {command}`' for command in commands)}"
        else:
            hint = instead(name, known)
        self.error(f"unknown argument {unknown!r}{hint}")


def add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """Add the setting's flag, and its old flags, which the help does not show. If none is given, the parsed arguments
    have no such attribute."""
    text = setting.text.replace("%", "%%")
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    if setting.kind is tuple:
        options |= {"action": "append", "metavar": setting.metavar or "TEXT"}
    elif setting.kind is bool:
        text += f" (default: {'yes' if setting.default else 'no'})"
        options |= {"action": argparse.BooleanOptionalAction}
    else:
        text += "" if setting.default is None else f" (default: {setting.default})"
        metavar = setting.metavar or (None if setting.choices else {int: "N", float: "X", str: "TEXT"}[setting.kind])
        options |= {"type": setting.kind, "choices": setting.choices, "metavar": metavar}
    parser.add_argument(setting.flag, help=text, **options)
    for replaced in REPLACED:
        if replaced.new == setting.flag:
            parser.add_argument(replaced.old, help=argparse.SUPPRESS, **options)


def key_of(flag: str) -> str:
    """Return the configuration key of a flag."""
    return flag.removeprefix("--").replace("-", "_")


def replaced_flags(argv: Iterable[str]) -> list[Replaced]:
    """Return the rows of the old flags among the words of a command line."""
    flags = {word.split("=")[0].replace("--no-", "--", 1) for word in argv if word.startswith("--")}
    return [each for each in REPLACED if each.old in flags]


def replaced_key(key: str) -> Replaced | None:
    """Return the row of an old configuration key in the words of keys, None for any other key."""
    for old, new, since in REPLACED:
        if key_of(old) == key:
            return Replaced(key, None if new is None else key_of(new), since)
    return None


def resolve(
    config: type[Config], args: argparse.Namespace, table: Mapping[str, Any], environ: Mapping[str, str]
) -> Config:
    """Return the configuration in effect.

    A flag in `args` wins over the environment, the environment over the TOML table (already checked), the table over
    the default. Raises ConfigError for a wrong value.
    """
    values: dict[str, Any] = {}
    for setting in settings_of(config):
        if hasattr(args, setting.name):
            values[setting.name] = _checked(setting, getattr(args, setting.name))
        elif setting.variable is not None and environ.get(setting.variable):
            values[setting.name] = environ[setting.variable]
        elif setting.name in table:
            values[setting.name] = table[setting.name]
    return config(**values)


def _checked(setting: Setting, value: object) -> Any:
    try:
        return setting.check(value)
    except ValueError as error:
        raise ConfigError(f"{setting.flag} {value}: {error}") from None


def to_environ(config: Any) -> dict[str, str]:
    """Return the environment variables that carry the secrets of `config` to a child process."""
    found = {setting.variable: getattr(config, setting.name) for setting in settings_of(type(config))}
    return {variable: value for variable, value in found.items() if variable is not None and value is not None}


def to_argv(config: Any) -> list[str]:
    """Return the flags that turn the defaults into `config`, without its secrets (see `to_environ`)."""
    argv: list[str] = []
    for setting in settings_of(type(config)):
        value = getattr(config, setting.name)
        if setting.variable is not None or value == setting.default:
            continue
        if setting.kind is bool:
            argv.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif setting.kind is tuple:
            argv += [f"{setting.flag}={item}" for item in value]
        else:
            argv.append(f"{setting.flag}={value}")  # one argument, because the value may begin with a dash
    return argv


def instead(flag: str, known: Mapping[str, Any]) -> str:
    """Return what to do instead of giving a flag that is not `known`, behind a semicolon; an empty text if nothing is
    near."""
    clause = foreign_flags.hint(flag, known)
    return f"; {clause}" if clause is not None else nearest(flag, known)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the most similar of `names`, or an empty text if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.65)
    return f"; did you mean {close[0]!r}?" if close else ""
