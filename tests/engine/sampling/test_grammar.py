"""Matchers and their masks, against what llguidance allows one token at a time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from grammars import BUDGET, CLOSE, EOS, OBJECT, THOUGHTS, WORDS, allowed, thoughts
from node_pair import params

from baton.engine.sampling import grammar as grammar_file
from baton.engine.sampling.grammar import DraftChain, Grammars, Matcher, Originals
from baton.engine.sampling.state import SamplingState
from baton.metadata.wire.request import SamplingParams

VOCAB = 512
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def grammars(model: Path) -> Grammars:
    return Grammars(model, VOCAB, [EOS])


def state(asked: SamplingParams, ids: Sequence[int] = ()) -> SamplingState:
    return SamplingState(asked, PROMPT, ids, vocab_size=VOCAB)


def matcher(grammars: Grammars, asked: SamplingParams, ids: Sequence[int] = ()) -> Matcher:
    return grammars.matcher(state(asked, ids))


def tokens(model: Path, text: str) -> list[int]:
    return llguidance.LLTokenizer(str(model / "tokenizer.json"), n_vocab=VOCAB, eos_token=EOS).tokenize_str(text)


def next_mask(grammars: Grammars, follower: Matcher) -> list[int]:
    """Return the ids that may come next."""
    masks = np.full((1, grammars.num_words), -1, np.int32)
    grammars.fill(masks, [DraftChain(follower, 0)])
    return ids_of(masks[0])


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


TEXTS = [(OBJECT, '{"id": 17, "tag": "red"}'), (WORDS, "abe 12 7")]


@pytest.mark.parametrize("min_tokens", [0, 4, 100])
@pytest.mark.parametrize(("grammar", "text"), TEXTS)
def test_a_chain_has_the_masks_of_its_tokens_one_at_a_time(
    grammar: str, text: str, min_tokens: int, model: Path, grammars: Grammars
) -> None:
    """Up to a draft that is not allowed, and from any place in the text. The matcher stays where it was."""
    asked = params(50, grammar=grammar, min_tokens=min_tokens, stop_ids=(EOS,))
    ids = tokens(model, text)
    truth = allowed(model, asked, [*ids, EOS], VOCAB).numpy()
    for done in (0, 2, len(ids)):
        follower = matcher(grammars, asked, ids[:done])
        for drafts in (ids[done:], [*ids[done : done + 2], 511, 4]):
            masks = np.full((2 + len(drafts) + 1, grammars.num_words), -1, np.int32)
            for _ in range(2):
                grammars.fill(masks, [DraftChain(follower, 2, drafts)])
                num_right = next((i for i, (a, b) in enumerate(zip(drafts, ids[done:], strict=False)) if a != b), None)
                last = done + (len(drafts) if num_right is None else num_right)
                last = min(last, len(ids))
                np.testing.assert_array_equal(masks[2 : 3 + last - done], truth[done : last + 1])
                assert (masks[:2] == -1).all()


@pytest.mark.parametrize("num_generated", [0, 1, 2, 3])
def test_stops_are_banned_up_to_min_tokens_exactly(num_generated: int, grammars: Grammars) -> None:
    """The token number `min_tokens` + 1 is the first that may end the text, wherever in a draft it stands."""
    asked = params(50, grammar=WORDS, min_tokens=3, stop_ids=(EOS, 385, VOCAB))  # a token that the model lacks, too
    follower = Matcher(None, state(asked))
    for _ in range(num_generated):
        follower.accept([7])
    for ahead in range(5):
        mask = np.full(grammars.num_words, -1, np.int32)
        follower.ban_stops(mask, ahead)
        is_banned = num_generated + ahead < 3
        assert (EOS not in ids_of(mask), 385 not in ids_of(mask)) == (is_banned, is_banned), ahead
        assert len(ids_of(mask)) == VOCAB - 2 * is_banned


def test_a_tree_bans_stops_by_depth(model: Path, grammars: Grammars) -> None:
    """Nodes at each depth of a tree have the masks that a chain has there, with `min_tokens` within the tree."""
    ids = tokens(model, "abe 12 7")[:4]
    for min_tokens in (1, 2, 3, 4):
        follower = matcher(grammars, params(50, grammar=WORDS, min_tokens=min_tokens, stop_ids=(EOS,)))
        chain, tree = (np.full((len(ids) + 1, grammars.num_words), -1, np.int32) for _ in range(2))
        grammars.fill(chain, [DraftChain(follower, 0, ids)])
        grammars.fill_tree(tree, DraftChain(follower, 0, ids), range(len(ids)))
        np.testing.assert_array_equal(tree, chain)


@pytest.fixture(scope="module")
def thinker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer and one more token, the last one, which a grammar must name by its id."""
    inner = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert inner.add_tokens([tokenizers.AddedToken("</think>", special=False)]) == 1
    path = tmp_path_factory.mktemp("thinker")
    inner.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("num_thoughts", [0, 3, BUDGET])
@pytest.mark.parametrize("close", [CLOSE, VOCAB])
def test_a_budget_of_tokens_survives_drafts(num_thoughts: int, close: int, thinker: Path) -> None:
    """Drafts beyond the budget are not allowed. Neither chains nor trees change the count, whichever of their drafts
    the sequence then gets."""
    grammars = Grammars(thinker, VOCAB + 1, [EOS])
    asked = params(50, grammar=THOUGHTS if close == CLOSE else thoughts(close, f"<[{close}]>"), stop_ids=(EOS,))
    text = [*range(20, 20 + num_thoughts), close, 300, close, 7, EOS]
    wrong = list(range(40, 40 + BUDGET + 2))  # thoughts that go on

    def is_allowed(ids: list[int]) -> bool:
        first = ids[: ids.index(close)] if close in ids else ids
        return len(first) <= BUDGET and EOS not in (*first, *ids[:-1])

    grown = matcher(grammars, asked)
    for done in range(len(text)):
        for drafts in (text[done:-1], text[done : done + 2] + wrong):
            num_right = sum(is_allowed([*text[:done], *drafts[: i + 1]]) for i in range(len(drafts)))
            truth = allowed(thinker, asked, [*text[:done], *drafts[:num_right], EOS], VOCAB + 1).numpy()[done:]
            for follower in (grown, matcher(grammars, asked, text[:done])):
                chain = DraftChain(follower, 0, drafts)
                masks, branch = (np.full((len(drafts) + 1, grammars.num_words), -1, np.int32) for _ in range(2))
                if drafts:
                    grammars.fill_tree(branch, chain, range(len(drafts)))
                    np.testing.assert_array_equal(branch[: num_right + 1], truth)
                grammars.fill(masks, [chain])
                np.testing.assert_array_equal(masks[: num_right + 1], truth)
            assert (len(ids_of(truth[0])) == 1) == (done == num_thoughts == BUDGET)
        grown.accept(text[done : done + 1])
    assert not grown.is_broken


def test_a_tree_has_the_masks_of_each_branch(model: Path, grammars: Grammars) -> None:
    asked = params(50, grammar=OBJECT, stop_ids=(EOS,))
    red, green = tokens(model, '{"id": 1, "tag": "red"}'), tokens(model, '{"id": 23')
    follower = matcher(grammars, asked)
    #  0 - 1 - 2 - 4 (red)      2 and 3 are children of 1; 5 follows 3, which is not allowed
    #        - 3 - 5
    drafts, parents = [red[0], red[1], 511, red[2], red[2]], [0, 1, 1, 2, 3]
    masks = np.full((1 + len(drafts), grammars.num_words), -1, np.int32)
    grammars.fill_tree(masks, DraftChain(follower, 0, drafts), parents)
    truth = allowed(model, asked, red[:4], VOCAB).numpy()
    for node, depth in ((0, 0), (1, 1), (2, 2), (4, 3)):
        np.testing.assert_array_equal(masks[node], truth[depth])
    assert (masks[[3, 5]] == -1).all() and green
    assert next_mask(grammars, follower) == ids_of(truth[0]), "the matcher stays where it was"


def test_a_matcher_goes_on_from_any_text(model: Path, grammars: Grammars) -> None:
    """As after a move or a preemption, and as accepted runs bring it."""
    asked, ids = params(50, grammar=OBJECT), tokens(model, '{"id": 17, "tag": "green", "on": true}')
    grown = matcher(grammars, asked)
    for start in range(0, len(ids), 3):
        assert next_mask(grammars, grown) == next_mask(grammars, matcher(grammars, asked, ids[:start]))
        grown.accept(ids[start : start + 3])
    assert next_mask(grammars, grown) == [EOS]
    grown.accept([EOS, 17, 18])
    assert not grown.is_broken, "what a round brings behind the end is left out"


def test_the_end_of_a_grammar_counts_more_than_min_tokens(model: Path, grammars: Grammars) -> None:
    asked = params(50, grammar=WORDS, min_tokens=30, stop_ids=(EOS, 3))
    ids = tokens(model, "ab")
    assert EOS not in next_mask(grammars, matcher(grammars, asked, ids)), "others are left"
    assert EOS in next_mask(grammars, matcher(grammars, params(50, grammar=WORDS), ids))
    done = matcher(grammars, asked, tokens(model, "abcd 1 2 3 444"))
    assert next_mask(grammars, done) == [EOS]


def test_the_first_tokens_of_several_requests(grammars: Grammars) -> None:
    """One without a grammar may have every token. A broken grammar is named, and leaves the others alone."""
    states = [state(params(9)), state(params(9, grammar=WORDS)), state(params(9, grammar="{not a grammar"))]
    masks, broken = grammars.next(states)
    assert broken == [False, False, True]
    assert (masks[0] == -1).all() and 0 < len(ids_of(masks[1])) < VOCAB


@pytest.mark.timing
def test_a_grammar_that_takes_too_much_work_breaks_its_matcher_alone(model: Path, grammars: Grammars) -> None:
    many = " ".join("x?" for _ in range(1500))
    hostile = llguidance.LLMatcher.grammar_from_lark(f'start: "ab" {many}\nx: "a" | "ab" | x x')
    follower, other = matcher(grammars, params(9, grammar=hostile)), matcher(grammars, params(9, grammar=WORDS))
    assert not follower.is_broken
    follower.accept(tokens(model, "ab"))
    masks, started = np.full((2, grammars.num_words), -1, np.int32), time.monotonic()
    grammars.fill(masks, [DraftChain(follower, 0), DraftChain(other, 1)])
    assert time.monotonic() - started < 2.0
    assert follower.is_broken and not other.is_broken and len(ids_of(masks[1])) < VOCAB
    follower.accept([1])
    assert follower.is_broken


def test_what_llguidance_does_not_take_breaks_every_matcher_and_the_log_says_so(
    tmp_path: Path, grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "Unknown"}}))
    strange = Grammars(tmp_path, VOCAB, [EOS])
    assert matcher(strange, params(9, grammar=WORDS), [1, 2]).is_broken
    assert all(matcher(grammars, params(9, grammar="{not a grammar")).is_broken for _ in range(3))
    assert grammars._compiled["{not a grammar"].num_coming == 1, "it is not tried again"
    known = "no request can have a grammar: llguidance cannot use the tokenizer: ", "llguidance does not take a grammar"
    told = [record.getMessage() for record in caplog.records]
    for message, begin in zip(told, known, strict=True):
        assert message.startswith(begin) and message.removeprefix(begin) not in ("", "None", "%s")


def test_a_grammar_that_is_too_much_work_from_the_start_is_broken_before_it_has_a_mask(grammars: Grammars) -> None:
    """The bound is the one that the router refuses grammars by, well below that of llguidance."""
    for num_letters, is_broken in ((50, False), (400, True)):
        text = llguidance.LLMatcher.grammar_from_lark(f"start: {'x? ' * num_letters}\nx: /[a-z ]/")
        assert matcher(grammars, params(9, grammar=text)).is_broken == is_broken


def test_only_tokens_of_the_tokenizer_are_allowed_and_the_models_own_ends(model: Path) -> None:
    """A model may have more logits than its tokenizer has tokens, and other ends than tokenizer.json names."""
    wide = Grammars(model, VOCAB + 64, [9, 11])
    done = matcher(wide, params(50, grammar=WORDS), tokens(model, "abcd 1 2 3 444"))
    assert next_mask(wide, done) == [9, 11]


def test_only_so_many_grammars_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_file, "MAX_COMPILED", 3)  # originals: two of one grammar, and one of another
    monkeypatch.setattr(grammar_file, "MOST_ORIGINALS", 2)
    texts = [llguidance.LLMatcher.grammar_from_regex(each) for each in ("a", "b", "c")]
    for text in (*texts[:2], texts[0], texts[2]):
        assert not matcher(grammars, params(9, grammar=text)).is_broken
    assert list(grammars._compiled) == [texts[0], texts[2]], "the one that was used longest ago is gone"


def test_sequences_of_one_grammar_are_copies_of_several_originals(
    model: Path, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one original fill their masks one after the other. All have the same masks."""
    monkeypatch.setattr(grammar_file, "MOST_ORIGINALS", 3)
    for _ in range(2):
        grammars.prepare(OBJECT)
    ids = tokens(model, '{"id": 1')
    followers = [matcher(grammars, params(40, grammar=OBJECT), ids) for _ in range(7)]
    assert grammars._compiled[OBJECT].num_coming == 3
    masks = np.full((7, grammars.num_words), -1, np.int32)
    grammars.fill(masks, [DraftChain(each, row) for row, each in enumerate(followers)])
    assert len({mask.tobytes() for mask in masks}) == 1 and ids_of(masks[0])


def test_a_grammar_of_one_sequence_is_compiled_once(grammars: Grammars) -> None:
    grammars.prepare(WORDS)
    matcher(grammars, params(9, grammar=WORDS))
    assert grammars._compiled[WORDS].num_coming == 1


def test_copies_are_of_each_original_in_turn_and_one_more_is_compiled_for_each_copy_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_file, "MOST_ORIGINALS", 8)

    class Original:
        def __init__(self, number: int) -> None:
            self.number = number

        def deep_copy(self) -> int:
            return self.number

    numbers = itertools.count()
    originals: Any = Originals(lambda: Original(next(numbers)))  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        originals.prepare()
        originals._coming[-1].result()
    assert [originals.copy() for _ in range(3)] == [0, 1, 2] and originals.num_coming == 3
    originals.copy()
    assert originals.num_coming == 4
