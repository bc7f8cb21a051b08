"""A small target model, one drafter per algorithm, and requests with their expected answers.

The target's next token depends mostly, but not only, on the last token: drafters made for it are often right, and wrong
KV still changes the answer. No answer contains a near tie of scores (support/oracles/matrix.py), so every comparison is
exact.

`python tests/chaos/models.py DIR` writes all of them to DIR, for parallel runs or for a machine without transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), *map(str, (Path(__file__).parents[1] / "support").glob("*"))]

import drafters  # noqa: E402
import llguidance  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from grammars import EOS  # noqa: E402
from matrix import Ask, Plain  # noqa: E402
from node_pair import params  # noqa: E402
from streams import Known  # noqa: E402

from baton.router.text.grammar import Grammar, GrammarSource, converted  # noqa: E402

WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
CONTEXT = 0.5  # factor of the attention and MLP output of each layer; 0: only the last token counts
ALGORITHMS = ("none", "ngram", "eagle", "eagle3", "mtp3", "standalone", "frozen-kv-mtp")
BOUND: dict[str, dict[str, Any]] = {  # structured_outputs of requests by name
    "bound": {"regex": "([a-f]{1,3}( [0-9]{1,2})?[.,] ){40,60}"},
    "list": {"json": {"type": "array", "items": {"enum": ["red", 12, {"on": True}]}, "minItems": 20, "maxItems": 40}},
}
ASKS = (
    Ask("greedy", 40, params(180)),
    Ask("sampled", 90, params(120, temperature=0.9, top_p=0.95)),
    Ask("choices", 30, params(90, temperature=1.0, frequency_penalty=0.4, repetition_penalty=1.2), n=2),
    Ask("stopped", 60, params(140, temperature=1.1, min_tokens=20), stop_at=70),
    Ask("long prompt", 250, params(60, temperature=0.7)),
    Ask("few tokens", 9, params(12)),
    Ask("one token", 25, params(1)),
    Ask("never drafted", 25, params(110, temperature=0.8, presence_penalty=0.5, draft_steps=0)),
)
NEXT_TURN = Ask("next turn", 20, params(60, temperature=0.6), behind="greedy")


def bound_asks(target: Path) -> list[Ask]:
    """Return the requests that a grammar binds, greedy and sampled. The model's end is theirs, too."""
    tokenizer = llguidance.LLTokenizer(str(target / "tokenizer.json"), n_vocab=512, eos_token=EOS)
    sources = {
        "bound": GrammarSource("regex", BOUND["bound"]["regex"]),
        "list": GrammarSource("json", json.dumps(BOUND["list"]["json"])),
    }
    grammars = {name: converted(source, tokenizer) for name, source in sources.items()}
    texts = {name: each.text for name, each in grammars.items() if isinstance(each, Grammar)}
    return [
        Ask("bound", 35, params(150, grammar=texts["bound"], stop_ids=(EOS,))),
        Ask("list", 50, params(160, temperature=1.0, grammar=texts["list"], stop_ids=(EOS,))),
    ]


def make_target(directory: Path, *, has_tails: bool = False) -> Path:
    """Return the target's directory. Writes the target if it is not there. `has_tails`: its second layer sees a window,
    and so has tail pages."""
    target = directory / "target"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        family, window = ("qwen2", WINDOW) if has_tails else ("llama", {})
        drafters.make_bigram(make_checkpoint(directory / "random", family, **window), target, CONTEXT)
    return target


def make_targets(directory: Path) -> tuple[Path, Path]:
    """Return the directories of a target without tail pages and of one with them, as `make_target`. Each has its
    drafters and answers beside it."""
    return make_target(directory / "kept"), make_target(directory / "tails", has_tails=True)


def flags(algorithm: str, target: Path) -> list[str]:
    """Return the node flags of an algorithm with a fixed number of steps. Writes the drafter if it is not there."""
    if algorithm == "none":
        return ["--speculative", "none"]
    if algorithm == "ngram":
        return ["--speculative", "ngram", "--draft-steps", "3", "--no-draft-adaptive"]
    name = "mtp3-deepseek" if algorithm == "mtp3" else algorithm
    directory = target.parent / f"drafter-{name}"
    if not directory.exists():
        if algorithm == "mtp3":  # random weights: they are right now and then
            drafters.settings(name, target, target.parent)
            (target.parent / name).rename(directory)
        elif algorithm == "standalone":
            drafters.perturbed(target, directory, 0.3)
        else:
            drafters.make_right(name, target, directory)
    steps = "3" if algorithm == "mtp3" else "4"
    kind = "mtp" if algorithm == "mtp3" else algorithm
    return ["--speculative", kind, "--draft-model", str(directory), "--draft-steps", steps, "--no-draft-adaptive"]


def known_answers(target: Path) -> dict[str, Known]:
    """Return the expected answers by name, from a file if it exists.

    One pair of nodes in this process computes them one after the other, without speculation.
    """
    path = target.parent / "answers.json"
    if not path.exists():
        path.write_text(
            json.dumps([_answer(case) for case in Plain.of(target, (*ASKS, *bound_asks(target), NEXT_TURN)).cases])
        )
    return {each["name"]: _known(each) for each in json.loads(path.read_text())}


def _answer(case: Any) -> dict[str, Any]:
    asked = case.params
    body = {
        "prompt": case.prompt,
        "n": case.ask.n,
        "seed": asked.seed,
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "min_tokens": asked.min_tokens,
        "frequency_penalty": asked.frequency_penalty,
        "presence_penalty": asked.presence_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "stop_token_ids": list(asked.stop_ids),
        "draft_steps": asked.draft_steps,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if case.ask.name in BOUND:
        body |= {"ignore_eos": False, "stop_token_ids": [], "structured_outputs": BOUND[case.ask.name]}
    ends = [(result.ended.reason, result.ended.stop_id) for result in case.expected]
    return {"name": case.ask.name, "body": body, "ids": [result.ids for result in case.expected], "ends": ends}


def _known(each: Mapping[str, Any]) -> Known:
    ids = tuple(tuple(choice) for choice in each["ids"])
    return Known(each["name"], each["body"] | {"model": "chaos"}, ids, tuple((end, stop) for end, stop in each["ends"]))


if __name__ == "__main__":
    for made in make_targets(Path(sys.argv[1])):
        for algorithm in ALGORITHMS:
            flags(algorithm, made)
        known_answers(made)
