"""Names of pages: what they depend on."""

from __future__ import annotations

import pytest

from baton.metadata.cache.names import NAME_BYTES, PageNames, PromptNames, short_names

IDS = list(range(400))


def names(
    ids: list[int], salt: str = "", *, key: bytes = b"k" * 32, page_size: int = 4, lookahead: int = 0
) -> list[int]:
    return list(PromptNames(PageNames(key, page_size, lookahead), ids, salt))


def test_a_name_depends_on_the_key_the_salt_and_all_tokens_up_to_its_page() -> None:
    assert len(set(names(IDS))) == 99
    assert names(IDS[:41]) == names(IDS)[:10]
    assert names([*IDS[:8], 9, *IDS[9:]])[:3] != names(IDS)[:3]
    assert names([*IDS[:8], 9, *IDS[9:]])[:2] == names(IDS)[:2]
    for others in (names([9, *IDS[1:]]), names(IDS, "tenant"), names(IDS, key=b"another")):
        assert set(others).isdisjoint(names(IDS))


def test_the_page_of_the_last_token_has_no_name() -> None:
    assert [len(names(IDS[:num])) for num in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_page_is_named_by_the_next_tokens_too_and_has_no_name_without_them(lookahead: int) -> None:
    assert [len(names(IDS[:num], lookahead=lookahead)) for num in (3 + lookahead, 4 + lookahead)] == [0, 1]
    changed = IDS.copy()
    changed[3 + lookahead] = 1000
    assert names(changed, lookahead=lookahead)[0] != names(IDS, lookahead=lookahead)[0]
    changed = IDS.copy()
    changed[4 + lookahead] = 1000
    assert names(changed, lookahead=lookahead)[0] == names(IDS, lookahead=lookahead)[0]


def test_names_made_one_by_one_equal_those_of_a_prompt() -> None:
    """A node makes them from the keys of its prefix cache, a router from a prompt."""
    maker = PageNames(b"k" * 32, 4, 1)
    name, made = maker.before_first("s"), list[bytes]()
    for page in range(99):
        tokens = b"".join(token.to_bytes(4, "little") for token in IDS[4 * page : 4 * page + 5])
        assert len(tokens) == maker.num_key_bytes
        name = maker.after(name, tokens)
        made.append(name)
    assert {len(each) for each in made} == {NAME_BYTES}
    prompt = PromptNames(maker, IDS, "s")
    assert prompt[98] == list(prompt)[98]
    assert list(short_names(b"".join(made))) == list(prompt)
    tails = [maker.of_tail(each) for each in made]
    assert [prompt.tail(page) for page in (98, 0)] == [short_names(tails[page])[0] for page in (98, 0)]
    with pytest.raises(IndexError):
        prompt[99]
