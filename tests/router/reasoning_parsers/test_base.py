"""Budgets of thoughts, by the grammars of the parsers and llguidance with a tokenizer whose marks are tokens."""

from __future__ import annotations

import json

import llguidance
import pytest
import tokenizers

from baton.router.reasoning_parsers.base import ReasoningParser, ThoughtBudget
from baton.router.reasoning_parsers.harmony import HarmonyReasoningParser
from baton.router.reasoning_parsers.think_tags import DeepSeekR1ReasoningParser, Qwen3ReasoningParser

from ..sites import tokenizer_file

TAGS = ("<think>", "</think>")
EOS = "</s>"
INNER = tokenizers.Tokenizer.from_buffer(tokenizer_file())
INNER.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in HarmonyReasoningParser.markers])
INNER.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in TAGS])
IDS = {token.content: token_id for token_id, token in INNER.get_added_tokens_decoder().items()}
ENDS = [IDS[EOS], IDS["<|return|>"], IDS["<|call|>"]]
VOCABULARY = llguidance.LLTokenizer(INNER.to_str(), n_vocab=INNER.get_vocab_size(), eos_token=ENDS)
HM = ["h", "m", "?"]  # texts of a token each
ANALYSIS = ["<|channel|>", *"analysis", "<|message|>"]
AGAIN = ["<|end|>", "<|start|>", *"assistant"]
FINAL = ["<|channel|>", *"final", "<|message|>"]


def literal(text: str) -> str:
    return f"<[{IDS[text]}]>" if text in HarmonyReasoningParser.markers else json.dumps(text)


def takes(grammar: str, texts: list[str]) -> bool:
    """Return whether a grammar takes a whole text, given by its tokens."""
    ids = [INNER.token_to_id(text.replace(" ", "Ġ").replace("\n", "Ċ")) for text in texts]
    matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def alone(parser: type[ReasoningParser], prompt: str, num_tokens: int) -> str:
    """Return the grammar of thoughts within a budget, and then anything."""
    budget = ThoughtBudget(num_tokens, IDS, ENDS)
    thoughts = parser.grammar(prompt, literal=literal, budget=budget)
    return f"start: thoughts answer\n{thoughts}\n{parser.any_answer(budget)}"


CASES: list[tuple[type[ReasoningParser], str, list[str], list[str], list[str]]] = [
    # what stands before and behind the thoughts, and what else the model may write
    (Qwen3ReasoningParser, "assistant\n", ["<think>"], ["</think>"], HM * 3),
    (Qwen3ReasoningParser, "<think>\n", [], ["</think>"], ["</think>", *HM]),
    (DeepSeekR1ReasoningParser, "", [], ["</think>"], ["</think>", *HM]),
    (DeepSeekR1ReasoningParser, "", ["<think>"], ["</think>"], ["</think>"]),
    (HarmonyReasoningParser, "", ANALYSIS, AGAIN, [*FINAL, *HM, *HM]),
    (HarmonyReasoningParser, "", ANALYSIS, AGAIN, ["<|channel|>", *"commentary", *" to=f", "<|message|>", "{", "}"]),
]


@pytest.mark.parametrize("num_tokens", [0, 2, 5])
@pytest.mark.parametrize(("parser", "prompt", "before", "behind", "other"), CASES)
def test_thoughts_have_at_most_so_many_tokens(
    parser: type[ReasoningParser], prompt: str, before: list[str], behind: list[str], other: list[str], num_tokens: int
) -> None:
    """What follows them is free: special tokens, pieces of characters and closing marks too."""
    grammar = alone(parser, prompt, num_tokens)
    for count in range(8):
        for answer in ([], ["\n", "\n", "a", "Ġthe"], ["a", "</think>", "<|im_start|>", "Ã"]):
            answer = answer if parser is not HarmonyReasoningParser else FINAL + answer
            text = before + (HM * 3)[:count] + behind + answer
            assert takes(grammar, text) == (count <= num_tokens), (text, grammar)
    assert takes(grammar, other)
    for text in ([*before, EOS], [*before, "<|return|>"]):
        assert not takes(grammar, text), "an output does not end in thoughts"


def test_a_budget_holds_for_all_thoughts_of_an_output() -> None:
    """They do not begin again behind the budget's own."""
    qwen3 = alone(Qwen3ReasoningParser, "assistant\n", 2)
    assert not takes(qwen3, ["\n", "<think>"]) and not takes(qwen3, ["<think>", "</think>", "<think>"])
    harmony = alone(HarmonyReasoningParser, "", 2)
    assert takes(harmony, [*ANALYSIS, *AGAIN, *FINAL, "a", *AGAIN, *FINAL, "b"])
    assert not takes(harmony, [*ANALYSIS, *AGAIN, *ANALYSIS])
    assert not takes(harmony, [*FINAL, "a", *AGAIN, *ANALYSIS])


def test_the_final_message_of_harmony_follows_thoughts_within_a_budget() -> None:
    thoughts = HarmonyReasoningParser.grammar("", literal=literal, budget=ThoughtBudget(2, IDS, ENDS))
    grammar = f'start: thoughts {HarmonyReasoningParser.answer_mark(literal)} "yes"\n{thoughts}'
    for count in range(5):
        assert takes(grammar, [*ANALYSIS, *(HM * 2)[:count], *AGAIN, *FINAL, *"yes"]) == (count <= 2)
    assert takes(grammar, [*FINAL, *"yes"]) and not takes(grammar, [*FINAL, *"yea"]) and not takes(grammar, [*"yes"])


def test_only_marks_of_one_token_can_be_counted() -> None:
    budget = ThoughtBudget(5, {}, ENDS)
    for parser, prompt in ((Qwen3ReasoningParser, "assistant\n"), (DeepSeekR1ReasoningParser, "")):
        assert parser.grammar(prompt, literal=json.dumps, budget=budget) is None
    assert HarmonyReasoningParser.grammar("", literal=json.dumps, budget=budget) is None
    assert Qwen3ReasoningParser.grammar("</think>", literal=json.dumps, budget=budget) == 'thoughts: ""'
