"""JSON schemas of clients, made ready for llguidance.

llguidance reads numbers as doubles, refuses some keywords whatever their value, and allows any white space between the
tokens of JSON. `prepared` returns a schema that llguidance enforces exactly: keywords that ask for nothing are left
out, and white space is bounded. A keyword that cannot be enforced is refused. If the schema is loose, the keyword is
left out, and the grammar allows more than the schema. An object that lists properties and says nothing of others has no
others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, cast

SUBSCHEMAS = ("not", "if", "then", "else", "contains", "propertyNames", "items", "additionalProperties")
LISTS_OF_SUBSCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
TABLES_OF_SUBSCHEMAS = ("properties", "patternProperties", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
OPTIONS = "x-guidance"  # key of a schema's root by which llguidance takes options
SPACES_PER_LEVEL = 4  # of an indented form
MAX_LEVELS = 8  # of a schema that refers to itself
FREE_LEVELS = 6  # of a value that may be anything

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_LEAST = frozenset({"minLength", "minItems", "minProperties"})
_MOST = frozenset({"maxLength", "maxItems", "maxProperties"})
_MAX_LEN = 2**31 - 1  # no output is longer
_MAX_WHOLE = 2**53  # whole numbers up to here are exact doubles
_MAX_INT64 = 2**63 - 1
_WORDS = frozenset({"$ref", "$schema", "$id", "id", "$anchor", "type", "required", "pattern"})  # kept as they are
_NOT_ENFORCED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_NOTES = frozenset(  # keywords that bind nothing, of JSON Schema and OpenAPI
    {
        "$comment",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    }
)
_FORMATS_OF_NOTE = frozenset(  # formats that describe a type and restrict no text
    {
        *("int", "int8", "int16", "int32", "int64", "integer", "long", "uint", "uint8", "uint16", "uint32", "uint64"),
        *("float", "double", "double-int", "decimal", "decimal128", "number", "single-byte", "char", "string", "text"),
        *("byte", "binary", "base64", "base64url", "file", "password", "commonmark", "markdown", "html", "textarea"),
    }
)
_FORMATS = frozenset(  # that llguidance enforces
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"),
    }
)
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas"})
_SPACE = re.compile(r"(?:[ \t\r\n|?*+()\[\]]|\\[ntrs]|\\x(?:20|09|0[aAdD])|\(\?:|\{[0-9]{1,3}(?:,[0-9]{0,3})?\})*")


class SchemaFault(Exception):
    """Reason why a schema is refused. `place` leads to the part at fault, such as `.properties.name`."""

    def __init__(self, words: str, place: str) -> None:
        super().__init__(words)
        self.words, self.place = words, place


def prepared(schema: Mapping[str, Any], *, is_loose: bool = False, whitespace: str | None = None) -> dict[str, Any]:
    """Return a schema for llguidance. Its fractions may be Decimals, so that they are compared exactly.

    `whitespace` is a regular expression of the white space between tokens; empty: none; None: what a compact or an
    indented form needs. Raises SchemaFault.
    """
    if OPTIONS in schema:
        raise SchemaFault("options of the compiler cannot be set", f".{OPTIONS}")
    whole = _Preparation(is_loose=is_loose, closes=not _is_composed(schema)).schema(schema, "")
    if not isinstance(whole, dict):
        raise SchemaFault("no value satisfies it", "")
    ready = cast("dict[str, Any]", whole)
    options: dict[str, Any] = {"lenient": is_loose, "coerce_one_of": is_loose}
    if whitespace == "":
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = whitespace_of(_levels(ready, ready, {})) if whitespace is None else whitespace
    return {**ready, OPTIONS: options}


def whitespace_of(num_levels: int) -> str:
    """Return the regular expression of the white space that JSON of so many nested values needs in one place: one
    space, or a line end and an indentation."""
    return rf"\x20|\r?\n(?:\x20{{0,{SPACES_PER_LEVEL * num_levels}}}|\t{{0,{num_levels}}})"


def checked_whitespace(pattern: str) -> str:
    """Return a client's regular expression of white space. Raises SchemaFault if it may match anything else."""
    try:
        is_whitespace = len(pattern) <= 256 and _SPACE.fullmatch(pattern) is not None and bool(re.compile(pattern))
    except (re.error, OverflowError):
        is_whitespace = False
    if not is_whitespace:
        raise SchemaFault("must be a regular expression of spaces, tabs and line ends, such as [ \\n]?", "")
    return pattern.replace("\\s", "[ \\t\\r\\n]")


def quoted(key: str) -> str:
    """Return the key of an object as a part of a path."""
    return key if re.fullmatch(r"[\w$-]{1,64}", key) else f'"{key[:64]}"'


class _Preparation:
    def __init__(self, *, is_loose: bool, closes: bool) -> None:
        self._is_loose = is_loose
        self._closes = closes  # objects that list properties have no others

    def schema(self, given: object, place: str) -> object:
        """Return a schema without what asks for nothing."""
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        if "not" in fields and _is_anything(fields["not"]):
            return False
        ready: dict[str, Any] = {}
        for key, value in fields.items():
            if value is None and key != "const":
                continue
            try:
                self._keyword(key, value, fields, place, ready)
            except SchemaFault:
                if not self._is_loose:
                    raise
        if self._closes and _lists_properties(ready):
            ready["additionalProperties"] = False
        return ready

    def _keyword(self, key: str, value: Any, fields: Mapping[str, Any], place: str, ready: dict[str, Any]) -> None:
        """Add a keyword to the schema that is ready, unless it asks for nothing."""
        path = f"{place}.{quoted(key)}"
        if key in _NOTES or key.startswith("x-"):
            return
        if key in _WORDS:
            ready[key] = value
        elif key in ("enum", "const"):
            ready[key] = _value(value, path)
        elif key in _BOUNDS:
            ready[key] = value if isinstance(value, bool) else _bound(key, value, fields, path)
        elif key in _LEAST or key in _MOST:
            length = _length(key, value, path)
            if length is not None:
                ready[key] = length
        elif key == "format":
            name = str(value)
            if name not in _FORMATS_OF_NOTE and "string" in _types(fields):
                if name not in _FORMATS:
                    raise SchemaFault(f"format {name[:64]!r} cannot be enforced; leave it out", place)
                ready[key] = name
        elif key in _NOT_ENFORCED:
            if key == "unevaluatedProperties" and _is_nothing(value) and not fields.keys() & _APPLICATORS:
                ready.setdefault("additionalProperties", False)
            elif not _asks_nothing(key, value, fields):
                raise SchemaFault(f'"{key}" cannot be enforced; leave it out', place)
        elif key in (*TABLES_OF_SUBSCHEMAS, *DEFINITIONS) and isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            ready[key] = {name: self.schema(each, f"{path}.{quoted(name)}") for name, each in table.items()}
        elif key in LISTS_OF_SUBSCHEMAS and isinstance(value, list):
            several = cast("list[Any]", value)
            ready[key] = [self.schema(each, f"{path}[{index}]") for index, each in enumerate(several)]
        elif key in SUBSCHEMAS or isinstance(value, dict):  # of any other name: references may lead there
            ready[key] = self.schema(cast("object", value), path)


def _is_composed(value: object) -> bool:
    """Return whether somewhere an object's properties may come from several schemas, which must not exclude each
    other's."""
    if isinstance(value, list):
        return any(map(_is_composed, cast("list[object]", value)))
    if not isinstance(value, dict):
        return False
    fields = cast("dict[str, object]", value)
    if "allOf" in fields or ("properties" in fields and fields.keys() & _APPLICATORS):
        return True
    return any(map(_is_composed, fields.values()))


def _lists_properties(fields: Mapping[str, Any]) -> bool:
    """Return whether an object's schema names its properties, all required ones among them, and says nothing of
    others."""
    properties, required = fields.get("properties"), fields.get("required", [])
    if not properties or not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if fields.keys() & {"additionalProperties", "patternProperties", "minProperties", "maxProperties"}:
        return False
    names = cast("dict[str, Any]", properties)
    return all(isinstance(each, str) and each in names for each in cast("list[Any]", required))


def _asks_nothing(key: str, value: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a keyword that cannot be enforced allows everything."""
    match key:
        case "uniqueItems":
            return value is False or fields.get("maxItems") in (0, 1)
        case "not":
            return _is_nothing(value)
        case "if":
            return all(_is_anything(fields.get(each, True)) for each in ("then", "else"))
        case "then" | "else":
            return "if" not in fields or _is_anything(value)
        case "contains":
            return fields.get("minContains") == 0 and "maxContains" not in fields
        case "minContains" | "maxContains":
            return "contains" not in fields or (key == "minContains" and value == 0)
        case "propertyNames":
            return _is_anything(value) or _bare(value) == {"type": "string"}
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(
                each == [] or _is_anything(each) for each in cast("dict[str, Any]", value).values()
            )
        case "unevaluatedItems" | "unevaluatedProperties":
            return _is_anything(value)
        case _:
            return False


def _bare(schema: Any) -> Any:
    """Return a schema without its notes."""
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    return {key: value for key, value in fields.items() if key not in _NOTES and not key.startswith("x-")}


def _is_anything(schema: Any) -> bool:
    return schema is True or _bare(schema) == {}


def _is_nothing(schema: Any) -> bool:
    bare = _bare(schema)
    return bare is False or (isinstance(bare, dict) and bare.keys() == {"not"} and _is_anything(bare["not"]))


def _types(fields: Mapping[str, Any]) -> Iterable[str]:
    """Return the types that the keyword `type` of a schema allows; without it, all that matter here."""
    kind = fields.get("type", "string")
    return cast("list[str]", kind) if isinstance(kind, list) else (str(kind),)


def _value(value: Any, path: str) -> Any:
    """Return a value that an answer may be. Raises SchemaFault for a number that llguidance would change."""
    if isinstance(value, dict):
        return {key: _value(each, f"{path}.{quoted(key)}") for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_value(each, f"{path}[{index}]") for index, each in enumerate(cast("list[Any]", value))]
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return value
    if not _is_exact(value):
        raise _inexact(value, path, "write it as a string")
    return _plain(value)


def _bound(key: str, value: Any, fields: Mapping[str, Any], path: str) -> Any:
    """Return a bound of numbers. Raises SchemaFault for one that llguidance would change."""
    if not isinstance(value, int | float | Decimal):
        return value
    size, whole = abs(Decimal(value)), fields.get("type") == "integer"
    if size > _MAX_WHOLE or (size == _MAX_WHOLE and key.startswith("exclusive")):
        is_last = key == "maximum" and whole and value == _MAX_INT64  # to which llguidance saturates
        if key.startswith("exclusive") or (not is_last and (size > _MAX_INT64 or not _is_exact(value))):
            raise _inexact(value, path, "leave the bound out")
    elif not _is_exact(value):
        raise _inexact(value, path, "leave the bound out")
    return _plain(value)


def _is_exact(value: float | Decimal) -> bool:
    """Return whether llguidance writes a number as it is: whole ones of 64 bits by their double, others by the shortest
    text of it."""
    number = Decimal(value) if isinstance(value, int) else Decimal(str(value))
    near = float(number)
    if number == number.to_integral_value() and abs(number) <= _MAX_INT64:
        return int(near) == number and abs(near) < 2**63
    return Decimal(repr(near)) == number and near != -(2.0**63)


def _inexact(value: object, path: str, hint: str) -> SchemaFault:
    return SchemaFault(f"{str(value)[:40]} has more digits than can be enforced exactly; {hint}", path)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and abs(value) < _MAX_WHOLE else float(value)
    return value


def _length(key: str, value: Any, path: str) -> Any:
    """Return a bound of a length as a whole number; None if every answer keeps it."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return value
    if value <= _MAX_LEN:
        return int(value) if value == int(value) else float(value)
    if key in _MOST:
        return None
    raise SchemaFault(f"{str(value)[:40]} is more than an answer can have", path)


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """Return what a reference like #/$defs/NAME points to; None if it points nowhere."""
    if not reference.startswith("#/"):
        return None
    found = cast("object", root)
    for part in reference[2:].split("/"):
        found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
    return found


def _levels(schema: object, root: Mapping[str, Any], known: dict[str, int]) -> int:
    """Return how many values may lie within each other. `known`: of references that have been followed."""
    if not isinstance(schema, dict):
        return 0 if schema is False else FREE_LEVELS
    fields = cast("dict[str, Any]", schema)
    levels = [_levels(each, root, known) for key in ("allOf", "anyOf", "oneOf") for each in _list(fields.get(key))]
    reference = fields.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = MAX_LEVELS  # if it leads back to itself
            known[reference] = _levels(referred(reference, root), root, known)
        levels.append(known[reference])
    inner = [_levels(each, root, known) for each in _inner(fields)]
    if inner:
        levels.append(1 + max(inner))
    elif _holds_anything(fields):
        levels.append(FREE_LEVELS)
    return min(MAX_LEVELS, max(levels, default=0))


def _holds_anything(fields: Mapping[str, Any]) -> bool:
    """Return whether a schema without inner ones allows objects or lists of anything."""
    if fields.keys() & {"enum", "const", "$ref", "allOf", "anyOf", "oneOf"}:
        return False
    return "type" not in fields or not {"object", "array"}.isdisjoint(map(str, _types(fields)))


def _inner(fields: Mapping[str, Any]) -> list[object]:
    """Return the schemas of the values within a value."""
    tables = [fields.get(key) for key in ("properties", "patternProperties")]
    inner = [each for table in tables if isinstance(table, dict) for each in cast("dict[str, object]", table).values()]
    for key in ("items", "prefixItems", "additionalProperties"):
        value = fields.get(key)
        inner += [cast("object", value)] if isinstance(value, dict) else _list(value)
    return inner


def _list(value: Any) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
