"""The model card against the files of a model directory, in the forms that published checkpoints have them."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoints import CHAT_TEMPLATE, END
from transformers import AutoTokenizer

from baton.engine.checkpoint.model_card import read_card, read_tokenizer
from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ModelError, RequestError
from baton.metadata.wire.node_info import ModelCard
from baton.router.text.chat_template import ChatTemplate


@pytest.fixture
def model_dir(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory without weights, to change."""
    return Path(
        shutil.copytree(checkpoint("llama"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    )


def card_of(model_dir: Path, **tokenizer_config: Any) -> ModelCard:
    """Return the card. `tokenizer_config` changes fields of that file."""
    path = model_dir / "tokenizer_config.json"
    if tokenizer_config:
        path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))
    return read_card(model_dir, read_model_config(model_dir), "demo", 300)


def test_a_card_has_what_the_router_needs_of_the_model(model_dir: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [0, 7], "bos_token_id": 3}
    (model_dir / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"bos_token_id": 3}))
    assert card_of(model_dir) == ModelCard(
        name="demo",
        context_len=300,
        vocab_size=512,
        eos_token_ids=(0, 7),
        bos_token_id=3,
        tokenizer_digest=xxhash.xxh3_128_hexdigest((model_dir / "tokenizer.json").read_bytes()),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": END, "pad_token": END},
        defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20.0},
    )


def test_a_model_needs_its_tokenizer_alone(model_dir: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (model_dir / name).unlink()
    card = card_of(model_dir)
    assert card.chat_template is None and card.special_tokens == {} and card.defaults == {}
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json: save the model's fast tokenizer there"):
        card_of(model_dir)


def test_a_template_in_a_file_of_its_own_wins(model_dir: Path) -> None:
    template = "{{ messages[0].content }} é漢"
    (model_dir / "chat_template.jinja").write_bytes(template.encode())
    assert card_of(model_dir).chat_template == template


@pytest.mark.parametrize(
    ("stored", "template"),
    [
        ([{"name": "rag", "template": "b"}, {"name": "default", "template": "a"}], "a"),
        ([{"name": "rag", "template": "b"}], None),
        (["a", {"template": "a"}], None),
        ([], None),
        (None, None),
    ],
)
def test_of_several_templates_the_default_is_taken(stored: Any, template: str | None, model_dir: Path) -> None:
    assert card_of(model_dir, chat_template=stored).chat_template == template


DEFAULT = "  {% set a = 'd' %}\n  {{ a }}{{ messages[0].content }}\n\n"
TOOL_USE = "{%- macro a() %}t{% endmacro %}\n{% if true %}\n  {{ a() }}\n  {% endif %}{{ tools | length }}\n"


@pytest.mark.parametrize("are_files", [True, False])
def test_the_template_for_tools_writes_conversations_with_tools_as_transformers_does(
    are_files: bool, model_dir: Path
) -> None:
    if are_files:
        (model_dir / "chat_template.jinja").write_text(DEFAULT)
        folder = model_dir / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text(TOOL_USE)
        (folder / "rag.jinja").write_text("rag")
        source = card_of(model_dir, chat_template="not this").chat_template
    else:
        named = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "rag"}
        entries = [{"name": name, "template": text} for name, text in named.items()]
        source = card_of(model_dir, chat_template=entries).chat_template
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rendered = ChatTemplate(source or "", {}).render
    for given in (None, tools, []):
        expected: Any = tokenizer.apply_chat_template(messages, tools=given, tokenize=False)  # type: ignore[arg-type]
        assert rendered(messages, add_generation_prompt=False, options={}, tools=given) == expected


def test_a_template_for_tools_alone_refuses_other_conversations(model_dir: Path) -> None:
    source = card_of(model_dir, chat_template=[{"name": "tool_use", "template": "b"}]).chat_template or ""
    template = ChatTemplate(source, {})
    assert template.render([], add_generation_prompt=False, options={}, tools=[{}]) == "b"
    with pytest.raises(RequestError, match="a chat template for conversations with tools alone"):
        template.render([], add_generation_prompt=False, options={})


def test_a_processors_template_counts_if_there_is_no_other(model_dir: Path) -> None:
    (model_dir / "chat_template.json").write_text(json.dumps({"chat_template": "p"}))
    assert card_of(model_dir, chat_template=None).chat_template == "p"
    assert card_of(model_dir, chat_template="t").chat_template == "t"


def test_special_tokens_come_as_text_or_written_out(model_dir: Path) -> None:
    tokens = card_of(
        model_dir,
        bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=7,
        unk_token={"lstrip": False},
        cls_token="[CLS]",
        image_token="<image>",
        add_bos_token=True,
        extra_special_tokens={"audio_token": "<audio>"},
    ).special_tokens
    assert tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "[CLS]",
        "image_token": "<image>",
        "audio_token": "<audio>",
    }


def test_only_numbers_are_defaults_of_sampling(model_dir: Path) -> None:
    generation = {"temperature": 1, "top_p": "0.9", "min_p": None, "repetition_penalty": 1.1, "max_length": 20}
    (model_dir / "generation_config.json").write_text(json.dumps(generation))
    assert card_of(model_dir).defaults == {"temperature": 1.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("temperature", -1, "Expected `float` >= 0.0"),
        ("temperature", float("nan"), "Expected `float` >= 0.0"),
        ("temperature", 1e300, "Expected `float` <= 100.0"),
        ("top_p", 7, "Expected `float` <= 1.0"),
        ("top_k", 2**31, "Expected `int` <= 2147483647"),
        ("top_k", float("inf"), "Expected `int`, got `float`"),
        ("repetition_penalty", 0, "Expected `float` > 0.0"),
    ],
)
def test_a_default_that_no_node_would_take_is_refused(name: str, value: float, bound: str, model_dir: Path) -> None:
    """Each request that does not set the field itself would have it."""
    (model_dir / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelError) as refused:
        card_of(model_dir)
    assert f"generation_config.json: {name} = {value} cannot be served ({bound})" in str(refused.value)


def test_top_k_may_be_off_in_each_form(model_dir: Path) -> None:
    for top_k in (-1, 0):
        (model_dir / "generation_config.json").write_text(json.dumps({"top_k": top_k}))
        assert card_of(model_dir).defaults == {"top_k": top_k}


def test_an_end_outside_the_vocabulary_is_refused(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 512]}))
    with pytest.raises(ModelError, match=r"eos_token_id 512 is outside the vocabulary \(size 512\)"):
        card_of(model_dir)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chat_template": 5}, "chat_template: Expected `str | null`, got `int`"),
        ({"chat_template": [{"name": "default", "template": 5}]}, "chat_template: Expected `str | null`, got `int`"),
        ({"chat_template": "a" * (2**20 + 1)}, "chat_template: Expected `str` of length <= 1048576"),
        ({"bos_token": "a" * 4097}, "special_tokens[...]: Expected `str` of length <= 4096"),
    ],
    ids=["type", "type in a list", "length", "token"],
)
def test_a_card_that_no_router_could_read_is_refused(fields: dict[str, Any], words: str, model_dir: Path) -> None:
    """The router would drop it, and the node would look for a router forever."""
    with pytest.raises(ModelError, match="the router cannot take the model's " + re.escape(words)):
        card_of(model_dir, **fields)


def test_a_name_that_is_too_long_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="give the model a shorter name with --model-name"):
        read_card(model_dir, read_model_config(model_dir), "a" * 129, 300)


def test_a_template_that_is_not_utf_8_is_named(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja is not UTF-8"):
        card_of(model_dir)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"{", b"", b"\xff\xfe\x00", b"[1, 2]", b"null", b"[" * 100_000], ids=lambda b: b[:6]
)
def test_a_damaged_file_is_named(name: str, content: bytes, model_dir: Path) -> None:
    config = read_model_config(model_dir)
    (model_dir / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        read_card(model_dir, config, "demo", 300)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "1.0"', b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_tokenizer_that_the_router_could_not_read_is_refused(content: bytes, model_dir: Path) -> None:
    """The node would join, and no request could be served."""
    (model_dir / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read \(.+\); copy the checkpoint again"):
        card_of(model_dir)


def test_the_tokenizer_travels_whole_under_the_digest_of_the_card(model_dir: Path) -> None:
    file = read_tokenizer(model_dir)
    assert zlib.decompress(file.data) == (model_dir / "tokenizer.json").read_bytes()
    assert file.digest == card_of(model_dir).tokenizer_digest
    with (model_dir / "tokenizer.json").open("ab") as tokenizer:
        tokenizer.write(b"\n")
    assert read_tokenizer(model_dir).digest == card_of(model_dir).tokenizer_digest != file.digest
