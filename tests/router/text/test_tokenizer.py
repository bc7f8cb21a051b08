"""Tokenizer files from nodes, and chat templates."""

from __future__ import annotations

import zlib

import pytest
import xxhash
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.metadata.errors import ProtocolError, RequestError
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import TextTokenizer


def test_a_compressed_tokenizer_is_read_and_damage_is_refused(tokenizer_file: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(tokenizer_file)
    packed = zlib.compress(tokenizer_file)
    assert TextTokenizer.from_compressed(packed, digest).is_byte_level
    for damaged in (b"", b"junk", packed[:-20], zlib.compress(b"{}"), zlib.compress(tokenizer_file + b" ")):
        with pytest.raises(ProtocolError, match="tokenizer"):
            TextTokenizer.from_compressed(damaged, digest)
    nonsense = b'{"model": 5}'
    with pytest.raises(ProtocolError, match=r"tokenizer\.json"):
        TextTokenizer.from_compressed(zlib.compress(nonsense), xxhash.xxh3_128_hexdigest(nonsense))


def test_grammars_name_the_tokens_by_id_that_llguidance_calls_special(tokenizer_file: bytes) -> None:
    inner = Tokenizer.from_buffer(tokenizer_file)
    inner.add_tokens([AddedToken(text, special=False) for text in ("<think>", "[CALL]", "< |", "|>")])
    inner.add_special_tokens([AddedToken("[END]", special=True)])
    named = TextTokenizer(inner.to_str().encode()).grammar_ids
    vocabulary = LLTokenizer(inner.to_str())
    special = {token_id for token_id in range(inner.get_vocab_size()) if vocabulary.is_special_token(token_id)}
    assert special == {*named.values(), inner.token_to_id("ÿ")}, "its mark of a special token is the byte 255"
    assert {"<think>", "[END]"} < named.keys() and "[CALL]" not in named


async def test_encoding_and_decoding_give_the_text_back(tokenizer: TextTokenizer) -> None:
    text = "naïve café " * 100
    ids = await tokenizer.encode(text, add_special_tokens=True)
    assert ids == tokenizer.inner.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_the_end_of_a_text_keeps_the_special_tokens_that_are_added(
    tokenizer_file: bytes, add_special_tokens: bool
) -> None:
    inner = Tokenizer.from_buffer(tokenizer_file)
    special = [("<s>", 0), ("</s>", 1)]
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer = TextTokenizer(inner.to_str().encode())
    text = "<|im_start|>user naïve café, twice</s> or more"
    whole = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
    for num_kept in range(3, len(whole) + 3):
        inner.enable_truncation(num_kept, direction="left")
        expected = inner.encode(text, add_special_tokens=add_special_tokens).ids
        assert await tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens) == expected
        assert (expected == whole) == (num_kept >= len(whole))
    for num_kept in (1, 2):  # the special tokens alone fill these
        ids = await tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens)
        assert ids == ([0, 1] if add_special_tokens else whole)[-num_kept:]


def render(source: str, **options: object) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    return template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True, options=options)


def test_chat_templates_have_the_usual_helpers() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert render("{{ 'é' | tojson }}") == '"é"'
    assert render("{{ eos_token }}{{ flavour }}", flavour="x") == "</s>x"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert (
        render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}")
        == "hi"
    )
    assert render("{%- if tools %}no{% endif %}{% if add_generation_prompt %}yes{% endif %}") == "yes"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_an_error_in_a_template_is_an_error_of_the_messages(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ProtocolError, match="compile"):
        ChatTemplate("{% for %}", {})


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("source", "knows_tools"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}", True),
        ("no tools here{% set tools = 1 %}", False),
        ("{# tools #}{{ messages[0].tools }}", False),
    ],
)
def test_a_template_knows_its_variables(source: str, knows_tools: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.knows_tools == template.knows("tools") == knows_tools
    assert not template.knows("reasoning_effort")
    given = template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, options={}, tools=[TOOL])
    assert ('"name": "f"' in given) == knows_tools


def test_tools_are_no_option_of_the_template() -> None:
    template = ChatTemplate("{{ tools }}", {})
    assert template.render([], add_generation_prompt=True, options={"tools": 5}) == "None"


def test_a_template_names_its_parsers() -> None:
    template = ChatTemplate("<tool_call>{{ call.arguments }}</tool_call>{# <think></think> #}", {})
    assert (template.tool_parser, template.reasoning_parser) == ("hermes", "qwen3")
    assert ChatTemplate("{{ messages }}", {}).tool_parser is None
