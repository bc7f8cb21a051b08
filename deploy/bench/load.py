"""The load: conversations with their times, prompts and lengths, drawn before the first request is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from ...metadata.errors import ConfigError
from ..simulation.traffic import Arrival, arrival_times

BLOCK_TOKENS = 512  # that one of the hash ids of a trace stands for
MOST_PROMPT_TOKENS = 100_000_000  # of a load, because all its prompts are in memory
Pieces = list[int] | list[str]  # a prompt as token ids or as words

_WORDS = """
about after again air all also always animal answer away back because before below between book both boy carry change
city close country cut day did different earth eat end enough even every example eye face family father few find first
food form found four from give good great group grow hand hard head help here high home house idea important kind know
land large last late learn leave letter life light line little live long made man many mean might mile more most mother
move much must name near need never next night number often oil old once only open other over own page paper part people
picture place plant point question quick read right river run school sea second sentence set show side small some sound
spell state still stop story study such take talk than that their them then there these they thing think this those
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces to make prompts from: token ids, or English words, whose tokens the server has counted."""

    pieces: Sequence[int] | Sequence[str] = tuple(_WORDS.split())
    tokens_per_piece: float = 1.0
    overhead: float = 0.0  # tokens of a prompt besides its pieces: a first token, a chat template

    @property
    def is_ids(self) -> bool:
        return not isinstance(self.pieces[0], str)

    def draw(self, random: Random, num_tokens: float) -> Pieces:
        """Return pieces with about this many tokens, at least one piece."""
        return random.choices(self.pieces, k=self.count(num_tokens))  # pyright: ignore[reportReturnType]

    def count(self, num_tokens: float) -> int:
        """Return how many pieces have about this many tokens, at least 1."""
        return max(1, round(num_tokens / self.tokens_per_piece))


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The lengths, shared beginnings and turns of a load's synthetic requests. A length is (least, most)."""

    prompt_len: tuple[int, int] = (512, 512)
    num_tokens: tuple[int, int] = (128, 128)
    prefix_len: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    turn_len: tuple[int, int] = (64, 64)

    @property
    def later_len(self) -> int:
        """The tokens that all further turns of a conversation add at most, without the answers."""
        return (self.num_turns - 1) * self.turn_len[1]

    def longest(self, arrival: Arrival) -> int:
        """Return the tokens of the last request of a conversation: the history and the last answer."""
        return arrival.prompt_len + self.num_turns * arrival.num_tokens + self.later_len


class Planned(NamedTuple):
    """A conversation, mostly of one turn."""

    at_s: float
    prompt: Pieces | str
    num_tokens: int  # of each answer
    later: tuple[Pieces, ...] = ()  # what the further turns add


def read_length(flag: str, text: str) -> tuple[int, int]:
    """Read `1024` or `512-2048`. Raises ConfigError."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ConfigError(f"{flag} {text}: use a number of tokens from 1 on, or a range such as 512-2048")
    return int(low), int(high or low)


def synthetic(times: Sequence[float], shape: RequestShape, seed: int) -> list[Arrival]:
    """Return requests at these times with lengths of a shape."""
    random = Random(f"{seed}/lengths")
    return [Arrival(at_s, random.randint(*shape.prompt_len), random.randint(*shape.num_tokens)) for at_s in times]


def plan(arrivals: Sequence[Arrival], shape: RequestShape, vocabulary: Vocabulary, seed: str) -> list[Planned]:
    """Return the conversations of these arrivals. Prompts of another `seed` share nothing with these. Raises
    ConfigError if they are too many tokens."""
    num_tokens = sum(each.prompt_len + shape.later_len for each in arrivals)
    if num_tokens > MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"the prompts have {num_tokens:,} tokens together, and a load has at most {MOST_PROMPT_TOKENS:,}: lower "
            "--seconds, --rate, --prompt-len or --turns"
        )
    random = Random(f"{seed}/prompts")
    prefixes = [
        vocabulary.draw(Random(f"{seed}/prefix/{index}"), shape.prefix_len - vocabulary.overhead)
        for index in range(shape.num_prefixes if shape.prefix_len else 0)
    ]
    blocks: dict[int, Pieces] = {}
    planned: list[Planned] = []
    for arrival in arrivals:
        if arrival.text is not None:
            prompt = arrival.text
        elif arrival.hash_ids:
            prompt = _blocks(arrival, vocabulary, blocks, seed)
        else:
            prefix = random.choice(prefixes) if prefixes else []
            rest = arrival.prompt_len - (shape.prefix_len or vocabulary.overhead)
            prompt = [*prefix, *vocabulary.draw(random, rest)]
        turns = (vocabulary.draw(random, random.randint(*shape.turn_len)) for _ in range(shape.num_turns - 1))
        planned.append(Planned(arrival.at_s, prompt, arrival.num_tokens, tuple(turns)))  # pyright: ignore[reportArgumentType]
    return planned


def _blocks(arrival: Arrival, vocabulary: Vocabulary, blocks: dict[int, Pieces], seed: str) -> Pieces:
    """Return a prompt of the blocks that a trace names. A block always has the same pieces."""
    for hash_id in arrival.hash_ids:
        if hash_id not in blocks:
            blocks[hash_id] = vocabulary.draw(Random(f"{seed}/block/{hash_id}"), BLOCK_TOKENS)
    pieces = [piece for hash_id in arrival.hash_ids for piece in blocks[hash_id]]
    missing = arrival.prompt_len - BLOCK_TOKENS * len(arrival.hash_ids)
    if missing > 0:
        pieces += vocabulary.draw(Random(f"{seed}/rest/{arrival.at_s}"), missing)
    return pieces[: vocabulary.count(arrival.prompt_len - vocabulary.overhead)]  # pyright: ignore[reportReturnType]


def times_of(rate: float, seconds: float, seed: int, burstiness: float | None) -> list[float]:
    """Return arrival times. Raises ConfigError if there is none."""
    times = arrival_times(rate, seconds, seed, burstiness)
    if not times:
        raise ConfigError(f"no request arrives within {seconds:g} seconds at {rate:g} per second: raise --seconds")
    return times
