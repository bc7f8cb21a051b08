"""Prompts of request bodies become token ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.metadata.errors import RequestError
from baton.router.http.generation.prompts import EncodedPrompt, chat_text, encoded_prompt, prompts_of
from baton.router.http.generation.tool_types import CalledFunction, ToolCall
from baton.router.http.generation.types import MAX_PROMPTS, ChatMessage, CompletionRequest, TextPart
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import TextTokenizer

from ...fake_nodes import TEMPLATE

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


async def test_a_text_beyond_the_context_is_cut(tokenizer: TextTokenizer) -> None:
    text = "hello there " * 2000
    kept = await encoded_prompt(text, GROUP, tokenizer, "prompt", add_special_tokens=False, num_kept=5)
    assert kept == EncodedPrompt(tokenizer.inner.encode(text).ids[-5:], None)


async def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    tokenizer: Any = SimpleNamespace(longest_token=2)  # without a method to encode
    with pytest.raises(RequestError, match="at least 65 tokens"):
        await encoded_prompt("a" * 130, GROUP, tokenizer, "prompt", add_special_tokens=False)


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


def group_with(source: str) -> Any:
    return SimpleNamespace(**vars(GROUP) | {"template": ChatTemplate(source, {})})


def continued(source: str, *messages: ChatMessage) -> str:
    return chat_text(group_with(source), list(messages), add_generation_prompt=False, continue_final=True, options={})


@pytest.mark.parametrize("text", ["end", "|", "<", "s", ":", "", " ", "a \n", "<|im_end|>", "12345"])
def test_a_prompt_ends_with_the_text_that_is_continued(text: str) -> None:
    user, final = ChatMessage("user", "a"), ChatMessage("assistant", text)
    assert continued(TEMPLATE, user, final) == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{text}"
    trimmed = continued(TEMPLATE.replace("message.content", "message.content | trim"), user, final)
    assert trimmed == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{text.strip()}".rstrip()


CONTENT = "{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("source", "final", "words"),
    [
        (CONTENT, ChatMessage("assistant", None), "has no content"),
        (CONTENT, ChatMessage("assistant", []), "has no content"),
        (
            CONTENT,
            ChatMessage("assistant", "a", tool_calls=[ToolCall("1", CalledFunction("f", "{}"))]),
            "ends with tool calls",
        ),
        ("{{ messages[0].content }}", ChatMessage("assistant", "a"), "leaves the final message out"),
        ("{{ messages[-1].content.split('>')[-1] }}", ChatMessage("assistant", "a>b"), "in another way"),
        ("{{ messages[-1].content | upper }}", ChatMessage("assistant", "a"), "in another way"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(source: str, final: ChatMessage, words: str) -> None:
    with pytest.raises(RequestError, match="continue_final_message: .*" + words):
        continued(source, ChatMessage("user", "q"), final)


def test_a_model_without_a_template_takes_no_conversation() -> None:
    group: Any = SimpleNamespace(template=None, key=GROUP.key)
    with pytest.raises(RequestError, match="no chat template"):
        chat_text(group, [ChatMessage("user", "a")], add_generation_prompt=True, options={})


def test_the_end_of_parts_and_of_a_late_system_message_is_continued() -> None:
    parts = CONTENT.replace("{{ m.content }}", "{% for p in m.content %}[{{ p.text }}]{% endfor %}")
    final = ChatMessage("assistant", [TextPart("text", "a"), TextPart("text", "b ")])
    assert continued(parts, ChatMessage("user", "q"), final) == "[q];[a][b "
    assert continued(CONTENT, final) == "a\nb "
    assert continued(STRICT, ChatMessage("user", "q"), ChatMessage("system", "s ")) == "user:q\n\ns "


def test_late_system_messages_join_parts_as_a_part() -> None:
    source = STRICT.replace("{{ m.content }}", "{% for p in m.content %}[{{ p.text }}]{% endfor %}")
    user = ChatMessage("user", [TextPart("text", "a"), TextPart("text", "b")])
    late = ChatMessage("system", [TextPart("text", "c"), TextPart("text", "d")])
    text = chat_text(group_with(source), [user, late], add_generation_prompt=False, options={})
    assert text == "user:[a][b][\n\nc\nd];"


def test_thoughts_have_each_name_that_is_read() -> None:
    message = ChatMessage("assistant", "x", reasoning_content="", reasoning="no")
    for name, expected in (("reasoning_content", ""), ("thinking", ""), ("reasoning", "")):
        source = "{% for m in messages %}{{ m." + name + " | tojson }}{% endfor %}"
        text = chat_text(group_with(source), [message], add_generation_prompt=False, options={})
        assert text == f'"{expected}"', name
