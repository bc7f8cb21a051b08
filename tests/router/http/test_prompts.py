"""Prompts of request bodies become token ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.metadata.errors import RequestError
from baton.router.http.openai_types import MAX_PROMPTS, ChatMessage, CompletionRequest, TextPart
from baton.router.http.prompts import EncodedPrompt, chat_text, encode, encoded_prompt, prompts_of
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import TextTokenizer

from ..fake_nodes import TEMPLATE

GROUP: Any = SimpleNamespace(
    card=SimpleNamespace(vocab_size=420),
    context_len=64,
    key=SimpleNamespace(model="fake"),
    template=ChatTemplate(TEMPLATE, {}),
)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_of_a_body(given: Any, prompts: list[Any]) -> None:
    assert prompts_of(CompletionRequest(model="m", prompt=given)) == prompts


@pytest.mark.parametrize(("given", "words"), [([1, "a"], "mixed"), (["a"] * (MAX_PROMPTS + 1), "at most")])
def test_prompts_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        prompts_of(CompletionRequest(model="m", prompt=given))
    assert caught.value.param == "prompt"


async def test_ids_are_checked_against_the_model(tokenizer: TextTokenizer) -> None:
    async def ids(prompt: Any) -> list[int]:
        return (await encoded_prompt(prompt, GROUP, tokenizer, "prompt", add_special_tokens=False)).ids

    assert await ids([5, 6]) == [5, 6]
    assert await ids("hello") == tokenizer.inner.encode("hello").ids
    for wrong, words in (([], "no tokens"), ("", "no tokens"), ([420], "out of range"), ([1] * 64, "leaves none")):
        with pytest.raises(RequestError, match=words):
            await ids(wrong)


async def test_only_the_last_tokens_of_a_prompt_are_kept(tokenizer: TextTokenizer) -> None:
    async def kept(prompt: Any, num_kept: int | None) -> EncodedPrompt:
        return await encoded_prompt(prompt, GROUP, tokenizer, "prompt", add_special_tokens=False, num_kept=num_kept)

    ids = tokenizer.inner.encode("hello there").ids
    assert await kept("hello there", 2) == EncodedPrompt(ids[-2:], None)
    assert await kept("hello there", len(ids)) == EncodedPrompt(ids, "hello there")
    assert await kept("hello there", None) == EncodedPrompt(ids, "hello there")
    assert await kept([5, 6, 7], 2) == EncodedPrompt([6, 7], None)
    assert (await kept([1] * 64 + [2], 63)).ids == [1] * 62 + [2]  # the whole prompt would be too long
    assert (await kept([420, 5], 1)).ids == [5]
    with pytest.raises(RequestError, match="leaves none"):
        await kept([1] * 70, 64)


async def test_a_text_that_is_cut_keeps_the_special_token_that_is_added(tokenizer_file: bytes) -> None:
    inner = Tokenizer.from_buffer(tokenizer_file)
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = TextTokenizer(inner.to_str().encode())
    ids = tokenizer.inner.encode("hello there").ids
    for add_special_tokens, expected in ((True, [0, *ids[-2:]]), (False, ids[-3:])):
        kept = await encoded_prompt(
            "hello there", GROUP, tokenizer, "prompt", add_special_tokens=add_special_tokens, num_kept=3
        )
        assert kept == EncodedPrompt(expected, None)


async def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    tokenizer: Any = SimpleNamespace(longest_token=2)  # without a method to encode
    with pytest.raises(RequestError, match="at least 65 tokens"):
        await encode(tokenizer, "a" * 130, GROUP, "prompt", add_special_tokens=False)


def test_a_conversation_becomes_text() -> None:
    messages = [
        ChatMessage(role="user", content=[TextPart("text", "a"), TextPart("text", "b")]),
        ChatMessage(role="assistant", content=" well,"),
    ]
    text = chat_text(GROUP, messages, add_generation_prompt=True, options={})
    assert text.startswith("<|im_start|>user\na\nb<|im_end|>")
    assert text.endswith("<|im_start|>assistant\n")
    text = chat_text(GROUP, messages, add_generation_prompt=False, continue_final=True, options={})
    assert text.endswith("well,")


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "system"),
        ("You help a developer.{% for m in messages %}{{ m.role }}{% endfor %}", "system"),
        ("{% for m in messages %}{{ m.role if m.role != 'developer' else 'dev' }}{% endfor %}", "dev"),
        ("{% for m in messages %}{{ m.role if m.role in ('user', 'developer') }}{% endfor %}", "developer"),
    ],
)
def test_a_developer_becomes_the_system_if_the_template_knows_no_developer(source: str, role: str) -> None:
    group: Any = SimpleNamespace(**vars(GROUP) | {"template": ChatTemplate(source, {})})
    message = ChatMessage(role="developer", content="be kind")
    text = chat_text(group, [message], add_generation_prompt=False, options={})
    assert text.removeprefix("You help a developer.") == role


STRICT = (  # as of several families: only the first message may be the system's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
FORGETFUL = STRICT.replace("{{ raise_exception('late') }}", "{% continue %}")
LATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (STRICT, "system:a\n\nb;user:c\n\nd;assistant:e;user:f;"),
        (FORGETFUL, "system:a\n\nb;user:c\n\nd;assistant:e;user:f;"),
        (LATE, "system:a;system:b;user:c;system:d;assistant:e;system:f;"),
    ],
    ids=["refused", "left out", "written"],
)
def test_a_systems_message_behind_others_is_read(source: str, text: str) -> None:
    group: Any = SimpleNamespace(**vars(GROUP) | {"template": ChatTemplate(source, {})})
    roles: Any = ("system", "developer", "user", "system", "assistant", "developer")
    messages = [ChatMessage(role=role, content=text) for role, text in zip(roles, "abcdef", strict=True)]
    assert chat_text(group, messages, add_generation_prompt=False, options={}) == text


def test_a_conversation_that_cannot_be_continued_or_has_no_template() -> None:
    for group, words in (
        (SimpleNamespace(template=None, key=GROUP.key), "no chat template"),
        (GROUP, "not in the prompt"),
    ):
        with pytest.raises(RequestError, match=words):
            empty = [ChatMessage(role="user", content="")]
            chat_text(group, empty, add_generation_prompt=False, continue_final=True, options={})  # type: ignore[arg-type]
