"""Promise P1 over HTTP: real processes generate transformers' tokens, with any chunks, batches and transports."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, held, wait_until
from thinned import thinned
from ties import Reference
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
SMALL = ["--page-size", "4", "--chunk-tokens", "6"]


def random_prompts(vocab_size: int, lens: list[int]) -> list[list[int]]:
    rng = random.Random(len(lens))
    return [[rng.randrange(vocab_size) for _ in range(num)] for num in lens]


def generate_all(cluster: Cluster, prompts: list[Any], fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all requests at once. Return the answers, whose choices have `token_ids`."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = threads.map(
            lambda pair: cluster.complete(pair[0], return_token_ids=True, **pair[1]),
            zip(prompts, fields, strict=True),
        )
        return list(answers)


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(  # tests/decode_node/test_node_pair.py has all families, in one process
    ("family", "transport"),
    thinned([("llama", "local"), ("mistral", "zmq"), ("qwen2", "zmq"), ("qwen3", "local")], lambda i, *_: i == 2),
)
def test_greedy_output_equals_transformers(
    family: str, transport: str, checkpoint: Callable[..., Path], new_cluster: Callable[..., Cluster]
) -> None:
    model = checkpoint(family)
    cluster = new_cluster(model).start(node_flags=[*SMALL, "--transport", transport])
    reference = Reference(model)
    vocab_size = reference.model.config.vocab_size
    prompts = random_prompts(vocab_size, [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 31])
    fields = [{"temperature": 0, "max_tokens": 10, "ignore_eos": True}] * len(prompts)
    for _ in range(2):  # the second time from the prefix caches
        answers = generate_all(cluster, prompts, fields)
        for prompt, answer in zip(prompts, answers, strict=True):
            reference.assert_greedy(prompt, tokens(answer), reference.generate(prompt, 10))
    assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 28
    assert reference.num_ties <= 1, f"{reference.num_ties} of {reference.num_compared}"
    nodes = cluster.ledger()["nodes"]
    assert nodes["decode-0"]["stats"]["checksum_failures"] == 0 and nodes["decode-0"]["stats"]["bytes_moved"] > 0


def test_demo_model_equals_transformers_over_several_chunks(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(DEMO).start(node_flags=["--chunk-tokens", "100"])
    reference = Reference(DEMO)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = ["x", "import os\n\ndef main(", Path(random.__file__).read_text()[:3000], "class A:\n    def __init__(self"]
    fields = [{"temperature": 0, "max_tokens": 40, "ignore_eos": True}] * len(texts)
    for text, answer in zip(texts, generate_all(cluster, texts, fields), strict=True):
        prompt = tokenizer.encode(text).ids
        theirs = reference.generate(prompt, 40)
        reference.assert_greedy(prompt, tokens(answer), theirs)
        if tokens(answer) == theirs:
            assert answer["choices"][0]["text"] == tokenizer.decode(theirs)
    assert reference.num_ties <= 1


@pytest.mark.whole  # tests/decode_node/test_node_pair.py has it in one process
def test_preemption_and_batches_change_no_token(
    checkpoint: Callable[..., Path], new_cluster: Callable[..., Cluster]
) -> None:
    model = checkpoint("llama")
    prompts = random_prompts(50, [9, 14, 11, 7, 10, 13, 8, 12])
    fields = [
        {"temperature": i % 2, "seed": i, "max_tokens": 24, "ignore_eos": True, "frequency_penalty": 0.1 * (i % 3)}
        for i in range(len(prompts))
    ]
    roomy = new_cluster(model).start(node_flags=SMALL)
    alone = [tokens(roomy.complete(p, return_token_ids=True, **f)) for p, f in zip(prompts, fields, strict=True)]
    together = [tokens(answer) for answer in generate_all(roomy, prompts, fields)]
    roomy.close()
    tight = new_cluster(model).start(node_flags=[*SMALL, "--num-pages", "22"])
    preempted = [tokens(answer) for answer in generate_all(tight, prompts, fields)]
    assert tight.ledger()["nodes"]["decode-0"]["stats"]["preemptions"] > 0
    assert together == alone
    assert preempted == alone


@pytest.mark.whole  # tests/decode_node/test_node_pair.py has it in one process
def test_pools_too_small_for_the_load_never_deadlock(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster().start(prefill=2, decode=2, node_flags=[*SMALL, "--num-pages", "16", "--max-running", "5"])
    prompts = random_prompts(50, [40, 33, 5, 44, 20, 38, 9, 41, 30, 36, 3, 28])
    fields = [{"max_tokens": 12, "seed": i, "n": 1 + i % 4, "ignore_eos": True} for i in range(len(prompts))]
    answers = generate_all(cluster, prompts, fields)
    assert [len(answer["choices"]) for answer in answers] == [field["n"] for field in fields]
    assert all(len(choice["token_ids"]) == 12 for answer in answers for choice in answer["choices"])


def _books_after_canaries(cluster: Cluster) -> Any:
    """Return the nodes' books when every node has computed the canary's prompt and nothing is under way."""

    def is_at_rest() -> bool:
        ledger = cluster.ledger()
        computed = [books["stats"]["computed_tokens"] for books in ledger["nodes"].values()]
        return all(computed) and not held(ledger)

    wait_until(is_at_rest, "no canary is under way")
    return cluster.ledger()["nodes"]


@pytest.mark.whole  # tests/decode_node/test_node_pair.py has both in one process
def test_choices_cost_one_prefill_and_one_token_no_decode_node(cluster: Cluster) -> None:
    before = _books_after_canaries(cluster)
    prompt = random_prompts(50, [70])[0]
    answer = cluster.complete(
        prompt, n=4, max_tokens=6, temperature=1.3, seed=5, return_token_ids=True, ignore_eos=True
    )
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 4
    after = cluster.ledger()["nodes"]
    assert after["prefill-0"]["stats"]["computed_tokens"] - before["prefill-0"]["stats"]["computed_tokens"] == 70
    assert answer["usage"]["completion_tokens"] == 24
    pages = after["decode-0"]["stats"]["pages_moved"]
    assert len(cluster.complete(prompt, max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"]) == 1
    assert cluster.ledger()["nodes"]["decode-0"]["stats"]["pages_moved"] == pages
