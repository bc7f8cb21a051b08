"""Settings from dataclasses: types, precedence, errors that suggest the right name, and both ways back."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.decode_node.config import DecodeConfig
from baton.deploy.config_file import print_tables
from baton.deploy.flags import Parser, add_flag, by_name, resolve, settings_of, to_argv, to_environ
from baton.deploy.up import UpConfig
from baton.metadata.config import setting
from baton.metadata.errors import ConfigError
from baton.prefill_node.config import PrefillConfig
from baton.router.config import RouterConfig

ALL = [UpConfig, RouterConfig, PrefillConfig, DecodeConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    name: str | None = setting(None, "a name")
    size: int = setting(16, "a size, 100 % of it")
    rate: float = setting(0.5, "a rate")
    mode: Literal["fast", "slow"] = setting("fast", "a mode")
    is_on: bool = setting(True, "a switch")
    api_key: str | None = setting(None, "a secret")
    guest: tuple[str, ...] = setting((), "a guest; may be given more than once")


def parse(*argv: str, table: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> Toy:
    parser = Parser(prog="toy")
    for item in settings_of(Toy):
        add_flag(parser, item)
    parser.format_help()  # a bare % in a help text would raise here
    return resolve(Toy, _parse(parser, list(argv)), table or {}, environ or {})


def _parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse(unknown[0])
    return args


def test_defaults_come_from_the_class() -> None:
    assert parse() == Toy()


def test_every_type_can_be_a_flag() -> None:
    assert parse("--name=x", "--size", "3", "--rate", "2", "--mode", "slow", "--no-is-on") == Toy(
        name="x", size=3, rate=2.0, mode="slow", is_on=False
    )


def test_a_list_flag_is_given_once_per_item_and_replaces_the_list_of_the_file() -> None:
    assert parse("--guest", "a", "--guest=-b").guest == ("a", "-b")
    known = by_name(Toy)["guest"]
    assert parse(table={"guest": known.check(["a", "b"])}).guest == ("a", "b")
    assert parse("--guest", "c", table={"guest": ("a", "b")}).guest == ("c",)
    assert known.check("one alone") == ("one alone",)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default() -> None:
    table, environ = {"api_key": "file", "size": 1}, {"BATON_API_KEY": "environment", "BATON_SIZE": "7"}
    assert parse("--api-key", "flag", table=table, environ=environ).api_key == "flag"
    assert parse(table=table, environ=environ).api_key == "environment"
    assert parse(table=table).api_key == "file"
    assert parse(table=table, environ=environ).size == 1, "only the listed variables count"
    assert parse("--size", "16", table=table).size == 16, "a flag counts also when it repeats the default"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--szie", "3"], ["--szie", "did you mean '--size'"]),
        (["--size", "many"], ["--size", "many"]),
        (["--mode", "middling"], ["--mode", "fast", "slow"]),
        (["--rate", "nan"], ["--rate", "nan", "a number"]),
        (["--rate", "inf"], ["--rate"]),
        (["--siz", "3"], ["--siz"]),  # no abbreviations: they break when a flag is added
        (["extra"], ["extra"]),
    ],
)
def test_a_wrong_flag_is_one_sentence(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


toys = st.builds(
    Toy,
    name=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    size=st.integers(-(2**63), 2**63 - 1),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    mode=st.sampled_from(["fast", "slow"]),
    is_on=st.booleans(),
    guest=st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "--"), max_size=3).map(
        tuple
    ),
)


@given(toy=toys)
def test_printed_settings_can_be_read_back(toy: Toy) -> None:
    table = tomllib.loads(print_tables({"toy": toy}))["toy"]
    known = by_name(Toy)
    assert Toy(**{key: known[key].check(value) for key, value in table.items()}) == toy


@given(toy=toys)
def test_flags_carry_a_configuration_to_a_child(toy: Toy) -> None:
    assume(toy.name != "--")  # argparse of Python 3.11 takes --name=-- for a flag without a value, and says so
    assert parse(*to_argv(toy)) == toy


def test_a_secret_is_neither_printed_nor_on_a_command_line() -> None:
    toy = Toy(api_key="hunter2")
    assert "hunter2" not in print_tables({"toy": toy})
    assert "api_key is set" in print_tables({"toy": toy})
    assert "hunter2" not in " ".join(to_argv(toy))


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("left_out", [("tp",), ("dp_attention", "disk_cache")], ids=" ".join)
def test_every_real_setting_has_a_help_text_and_survives_both_ways(config: type, left_out: tuple[str, ...]) -> None:
    """`left_out`: settings that stay as they are, because others refuse them."""
    for item in settings_of(config):
        assert item.text, f"{config.__name__}.{item.name} has no help text"
    changed = {item.name: _other(item) for item in settings_of(config) if item.name not in left_out}
    value = replace(config(), **changed)
    known = by_name(config)
    printed = tomllib.loads(print_tables({"x": value}))["x"]
    table = {key: known[key].check(item) for key, item in printed.items()}
    parser = Parser(prog="x")
    for item in settings_of(config):
        add_flag(parser, item)
    secret = to_environ(value)
    assert resolve(config, _parse(parser, []), table, secret) == value
    assert resolve(config, _parse(parser, to_argv(value)), {}, secret) == value


def _other(item: Any) -> Any:
    if item.choices:
        return item.choices[-1]
    if item.kind is tuple:
        some = {"allow_origin": ("http://one.example", "*"), "trusted_proxy": ("10.0.0.0/8", "::1")}
        return some.get(item.name, ("one.example", "*"))
    special = {"ops_address": "127.0.0.1:9", "expect": "decode=2", "tenant_header": "X-Tenant"}
    if item.name in special:
        return special[item.name]
    return {bool: not item.default, int: 7, float: 0.5, str: "tcp://127.0.0.1:1"}[item.kind]


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (PrefillConfig, "num_pages", 0),
        (PrefillConfig, "threads", 0),
        (DecodeConfig, "max_running", 0),
        (PrefillConfig, "chunk_tokens", -1),
        (DecodeConfig, "drain_timeout_s", -1.0),
        (DecodeConfig, "node_id", ""),
        (RouterConfig, "drain_timeout_s", -1.0),
        (UpConfig, "stop_timeout_s", -1.0),
        (UpConfig, "ready_timeout_s", -1.0),
    ],
)
def test_numbers_that_cannot_work_are_refused_by_name(config: type, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is "):
        config(**{field: value})
