"""The TOML configuration file: one table for each command, with the same names as the flags."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..metadata.errors import ConfigError
from .flags import ENVIRONMENT, SECRETS, Setting, nearest, settings_of


def read_tables(path: str, known: Mapping[str, Mapping[str, Setting]]) -> dict[str, dict[str, Any]]:
    """The tables of the file, every key checked; `known` holds the settings by table name and key.

    Raises ConfigError naming the file, the key, its value and the nearest right name.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    for name, table in document.items():
        if name not in known:
            tables = ", ".join(f"[{table}]" for table in known)
            raise ConfigError(f"{path}: unknown table or key {name!r}{nearest(name, known)} (tables are {tables})")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} = {table!r} must be a table, [{name}]")
    return {name: _checked(path, name, table, known[name]) for name, table in document.items()}


def _checked(path: str, name: str, table: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in settings:
            raise ConfigError(f"{path}: [{name}] has no setting {key!r} (value {value!r}){nearest(key, settings)}")
        try:
            values[key] = settings[key].check(value)
        except ValueError as error:
            raise ConfigError(f"{path}: [{name}] {key} = {value!r}: {error}") from None
    return values


def print_tables(configs: Mapping[str, Any]) -> str:
    """The configurations (by table name) as a TOML document that `read_tables` reads back.

    What is unset and what is secret is a comment: TOML has no null, and a printed key would end up in some log.
    """
    return "\n".join(_table(name, config) for name, config in configs.items())


def _table(name: str, config: Any) -> str:
    lines = [_line(setting, getattr(config, setting.name)) for setting in settings_of(type(config))]
    return "\n".join([f"[{name}]", *lines, ""])


def _line(setting: Setting, value: Any) -> str:
    if value is None:
        return f"# {setting.name} is not set: {setting.text}"
    if setting.name in SECRETS:
        return f"# {setting.name} is set and not printed: give it again, best by {ENVIRONMENT[setting.name]}"
    if isinstance(value, str):
        value = _text(value)
    elif isinstance(value, tuple):
        value = f"[{', '.join(map(_text, value))}]"
    elif isinstance(value, bool):
        value = str(value).lower()
    return f"{setting.name} = {value}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
