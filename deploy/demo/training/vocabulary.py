"""The demo model's tokenizer: byte-level BPE for Python source.

Before any merge, text is split into single line ends, whole indentations, words with at most one leading space or sign,
single digits, and runs of signs. So an indentation is one token, a prompt may end after a line end or an indentation,
digits are never joined, and decoding returns every byte.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import SPECIAL_TOKENS

SPLIT_PATTERN = (
    r"\n"  # a line end, always alone: a prompt that ends with one is cut as it was in training
    r"|[^\n\p{L}\p{N}]?\p{L}+"  # a word, with one space or sign before it
    r"|\p{N}"  # one digit
    r"| ?[^\s\p{L}\p{N}]+"  # signs
    r"|[^\S\n]+"  # an indentation, or other white space inside a line
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
