"""The TOML configuration file: one table per command, whose keys are the flags of that command."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..metadata.errors import ConfigError
from . import foreign_flags
from .flags import Setting, nearest, replaced_key, settings_of

_SECRET = re.compile("key|secret|password|token(?!s)", re.IGNORECASE)  # `tokens` are counted


def read_tables(path: str, known: Mapping[str, Mapping[str, Setting]]) -> dict[str, dict[str, Any]]:
    """Read and check the tables of a file. `known`: the settings by table name and key.

    Raises ConfigError that names the file, the key, its value unless it may be a secret, and the key that was probably
    meant.
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
            raise ConfigError(f"{path}: {name} must be one table, [{name}]")
    return {name: _checked(path, name, table, known[name]) for name, table in document.items()}


def _checked(path: str, name: str, table: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for given, value in table.items():
        key, replaced = given, replaced_key(given)
        if replaced is not None:
            print(f"baton: warning: {path}: [{name}] {replaced.words}", file=sys.stderr)
            key = replaced.new or given
        if key in values:
            raise ConfigError(f"{path}: [{name}] sets {key} twice, once by its old name; keep {key}")
        if key not in settings:
            flags = {setting.flag for setting in settings.values()}
            clause = foreign_flags.hint(f"--{key.replace('_', '-')}", flags)
            hint = f"; {clause}" if clause is not None else nearest(key, settings)
            shown = "" if _is_secret(key) else f" (value {value!r})"
            raise ConfigError(f"{path}: [{name}] has no setting {key!r}{shown}{hint}")
        try:
            values[key] = settings[key].check(value)
        except ValueError as error:
            shown = "" if settings[key].variable is not None else f" = {value!r}"
            raise ConfigError(f"{path}: [{name}] {given}{shown}: {error}") from None
    return values


def _is_secret(key: str) -> bool:
    """Return whether an unknown key may have been meant for a secret, whose value must not end up in a log."""
    return _SECRET.search(key) is not None


def print_tables(configs: Mapping[str, Any]) -> str:
    """Return the configurations (by table name) as a TOML document that `read_tables` can read.

    Settings without a value are comments, because TOML has no null. So are secrets, which must not end up in a log.
    """
    return "\n".join(_table(name, config) for name, config in configs.items())


def _table(name: str, config: Any) -> str:
    lines = [_line(setting, getattr(config, setting.name)) for setting in settings_of(type(config))]
    return "\n".join([f"[{name}]", *lines, ""])


def _line(setting: Setting, value: Any) -> str:
    if value is None:
        return f"# {setting.name} is not set: {setting.text}"
    if setting.variable is not None:
        return f"# {setting.name} is set and not printed: set it again with the variable {setting.variable}"
    if isinstance(value, str):
        value = _text(value)
    elif isinstance(value, tuple):
        value = f"[{', '.join(map(_text, value))}]"
    elif isinstance(value, bool):
        value = str(value).lower()
    return f"{setting.name} = {value}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
