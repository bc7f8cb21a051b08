"""The demo model's tokenizer: byte-level BPE for Python source, in Hugging Face files.

Before any merge, text is split into single line ends, whole indentations, words with at most one leading space or sign,
single digits, and runs of signs. So an indentation is one token, a prompt may end after a line end or an indentation,
digits are never joined, and decoding returns every byte.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import ASSISTANT, END_OF_TEXT, PAD, SPECIAL_TOKENS

SPLIT_PATTERN = (
    r"\n"  # a line end, always alone: a prompt that ends with one is cut as it was in training
    r"|[^\n\p{L}\p{N}]?\p{L}+"  # a word, with one space or sign before it
    r"|\p{N}"  # one digit
    r"| ?[^\s\p{L}\p{N}]+"  # signs
    r"|[^\S\n]+"  # an indentation, or other white space inside a line
)

CHAT_TEMPLATE = (  # tools, calls and results are plain text: the model has not seen any
    "{{- '" + END_OF_TEXT + "' -}}"
    "{%- if tools -%}"
    "{{- '<|system|>' -}}"
    "{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\n\n' -}}{%- endif -%}"
    "{{- '# Tools\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\n' + tool['function'] | tojson -}}{%- endfor -%}"
    '{{- \'\n</tools>\nA call of a tool:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|end|>\' -}}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|user|><tool_response>\n' + message['content'] + '\n</tool_response><|end|>' -}}"
    "{%- elif message['role'] != 'system' or not tools or not loop.first -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- if message['content'] or not loop.first -%}{{- '\n' -}}{%- endif -%}"
    "{{- '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson -}}"
    "{{- ', \"arguments\": ' + call['function']['arguments'] | tojson + '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ASSISTANT + "' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` entries; the special tokens have ids 0, 1, 2, ..."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template included."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (END_OF_TEXT, PAD)],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
