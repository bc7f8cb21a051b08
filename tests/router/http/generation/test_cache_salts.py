"""Salts of prefix caches: who shares cached prefixes with whom. Ids of sessions: which header or field names them."""

from __future__ import annotations

import itertools

import pytest
from multidict import CIMultiDict

from baton.router.http.generation.cache_salts import HEADERS, MAX_ID, CacheSalts, session_id
from baton.router.http.server.access import Caller
from baton.router.waiting.fair_share import Tenant

NOBODY = Caller()
BY_KEY = [Caller(digest=b"1"), Caller(digest=b"2")]  # two keys of the default tenant
ACME = [Caller(digest=digest, tenant=Tenant("acme")) for digest in (b"3", b"4")]
OTHER = Caller(digest=b"5", tenant=Tenant("other"))


def test_a_tenant_shares_its_cache_and_no_other_has_the_same_salt() -> None:
    salts = CacheSalts("tenant", None)
    assert {salts.salt(caller, None) for caller in (NOBODY, *BY_KEY)} == {""}, "nothing changes with one tenant"
    assert salts.salt(NOBODY, "") == ""
    callers = [NOBODY, ACME[0], OTHER]
    given = [None, "a", "acme", salts.salt(ACME[0], None), "\x00acme", "é"]
    assert len({salts.salt(caller, each) for caller in callers for each in given}) == len(callers) * len(given)
    assert all(salts.salt(ACME[0], each) == salts.salt(ACME[1], each) for each in given)
    assert len(salts.salt(OTHER, "a")) == 32


def test_with_the_scope_key_each_key_has_a_cache_of_its_own() -> None:
    salts = CacheSalts("key", None)
    callers = [NOBODY, *BY_KEY, *ACME, OTHER]
    assert len({salts.salt(caller, given) for caller in callers for given in (None, "a")}) == 2 * len(callers)
    assert salts.salt(NOBODY, None) == ""


def test_routers_agree_if_they_have_the_same_secret() -> None:
    first, second, third, drawn = (CacheSalts("tenant", secret) for secret in ("s" * 100, "s" * 100, "t", None))
    assert first.salt(OTHER, "a") == second.salt(OTHER, "a")
    assert len({each.salt(OTHER, "a") for each in (first, third, drawn)}) == 3


def test_sessions_of_one_name_are_apart_by_owner() -> None:
    salts = CacheSalts("tenant", None)
    keys = [salts.session(caller, "s") for caller in (NOBODY, ACME[0], OTHER)]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert salts.session(ACME[1], "s") == keys[1] and salts.session(OTHER, "t") != keys[2]
    assert salts.session(OTHER, "\ud800"), "a header may hold any bytes"


@pytest.mark.parametrize(
    ("headers", "key", "expected"),
    [
        ({}, None, None),
        ({}, "", None),
        ({}, "k", "k"),
        *(({name.title(): " s "}, "k", "s") for name in HEADERS),
        ({"X-SMG-Routing-Key": "later", "X-Session-ID": "first"}, None, "first"),
        ({"X-Session-ID": "  "}, "k", "k"),
        ({"X-Session-ID": "s" * (MAX_ID + 1)}, "k", None),
        ({}, "k" * (MAX_ID + 1), None),
    ],
)
def test_the_first_header_counts_then_the_body(headers: dict[str, str], key: str | None, expected: str | None) -> None:
    assert session_id(CIMultiDict(headers), key) == expected
