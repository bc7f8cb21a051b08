"""Acceptance of one draft token at temperature 1: shared noise, the optimum, and a greedy draft, on the demo model.

    python tests/benchmarks/engine_times/bench_coupling.py [--windows 64] [--window 512] [--draws 4] [--json FILE]

The contexts are windows of held-out code. At every row, p is the target's distribution of the next token. q is the
drafter's distribution for the same position: its k-th proposal after the target's last row. The tokens between are
those of the text, so both see the same prefix. Every figure is a mean over the same rows:

    shared noise   argmax(log p + g) == argmax(log q + g), g = gumbel_noise_ref(seed, position): Baton's rule, counted
                   in `draws` draws per row, with as many seeds per window
    expected       the probability of that event, in closed form (`coupled`)
    optimum        1 - TV(p, q) = sum min(p, q): what rejection sampling of a draft drawn from q accepts
    greedy draft   p[argmax q]: the likeliest draft token, accepted with its target mass
    independent    sum p q: the event of the first line with two independent noises

The forwards run the models of deploy/demo/training over whole windows, which equals drafting step by step
(tests/deploy/demo/training/test_drafters.py), in float32 on the bfloat16 weights. The program ends with an error if
shared noise differs from the expected value by more than 4.5 standard errors, or if the drawn ids do not fit p (or q).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.deploy.demo.training.corpus import read_corpus, standard_library
from baton.deploy.demo.training.evaluate import encode_documents
from baton.deploy.demo.training.windows import Drafter, Model
from baton.kernels.operations import preferring
from baton.kernels.sampling.noise import gumbel_noise_ref

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import flags, report

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
DRAFTERS = ("standalone", "eagle", "eagle3", "mtp3", "frozen_kv_mtp")
NUM_STEPS = 3  # draft positions; mtp3 has three layers
FIRST_ROW = 64  # rows before it have too little context
MIN_WINDOW = FIRST_ROW + NUM_STEPS + 2  # tokens; then FIRST_ROW is its only anchor (`unroll`)
HELD_OUT_FRACTION = 0.02
BOUND = 4.5  # standard errors
MIN_EXPECTED = 25.0  # draws of an id below which its count is no normal variable


class Rows(NamedTuple):
    """The figures of each row, [num_rows] float32 each."""

    shared: Tensor  # share of the draws
    expected: Tensor
    optimum: Tensor
    greedy: Tensor
    independent: Tensor


class Draws:
    """Compares the drawn ids with their distribution: how often each came, and how likely the drawn ids were."""

    def __init__(self, vocab_size: int) -> None:
        self._observed, self._expected, self._variance = torch.zeros(3, vocab_size, dtype=torch.float64)
        self._excess = self._excess_variance = 0.0  # of log-probability, over minus the entropy

    def add(self, tokens: Tensor, logits: Tensor) -> None:
        """Add tokens [num_draws, num_rows] drawn from logits [num_rows, vocab_size]."""
        num_draws, log_p = len(tokens), logits.log_softmax(-1).clamp_min(-100.0)
        p = log_p.exp()
        self._observed += torch.bincount(tokens.flatten(), minlength=p.shape[1])
        self._expected += num_draws * p.sum(0, dtype=torch.float64)
        self._variance += num_draws * (p * (1 - p)).sum(0, dtype=torch.float64)
        mean, square = (p * log_p).sum(-1), (p * log_p.square()).sum(-1)
        self._excess += (log_p.gather(-1, tokens.T) - mean[:, None]).double().sum().item()
        self._excess_variance += num_draws * (square - mean.square()).double().sum().item()

    def z_scores(self) -> dict[str, float]:
        """Return the z scores of ids expected often enough (their root mean square should be 1), and of the log-
        probability. If no id is expected often enough, only the latter.
        """
        is_frequent = self._expected >= MIN_EXPECTED
        z = ((self._observed - self._expected) / self._variance.sqrt())[is_frequent]
        scores = {"num_ids": len(z), "log_p_z": self._excess / math.sqrt(self._excess_variance)}
        if len(z):
            scores |= {"rms_z": z.square().mean().sqrt().item(), "max_abs_z": z.abs().max().item()}
        return scores


def coupled(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """Probability that both argmax agree under one Gumbel noise: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).

    (i wins both when each g_j lies below g_i plus the smaller of log p_i/p_j and log q_i/q_j.) Sorted by q / p, the
    inner sum is p's mass up to i over p_i plus q's mass after i over q_i. p, q [num_rows, vocab_size]; log_ratio:
    log q/p, up to a constant a row. Returns [num_rows].
    """
    order = torch.from_numpy(np.argsort(log_ratio.numpy()))  # twice as fast as torch's
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_before = p.cumsum(-1)  # i included
    q_after = (1 - q.cumsum(-1)).clamp_min(0)
    return (p * q / (p_before * q + q_after * p)).nan_to_num(0.0).sum(-1)  # 0 / 0: an id that neither draws


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw ids [num_draws, num_rows]. logits [num_rows, vocab_size], noise [num_draws, num_rows, vocab_size]."""
    return torch.stack([(logits + each).argmax(-1) for each in noise])


def compare(target_logits: Tensor, draft_logits: Tensor, is_shared: Tensor) -> Rows:
    """Compute the figures of rows. Logits are [num_rows, vocab_size]; is_shared is [num_draws, num_rows] bool."""
    p, q = target_logits.softmax(-1), draft_logits.softmax(-1)
    return Rows(
        shared=is_shared.float().mean(0),
        expected=coupled(p, q, draft_logits - target_logits),
        optimum=torch.minimum(p, q).sum(-1),
        greedy=p.gather(-1, draft_logits.argmax(-1, keepdim=True)).squeeze(-1),
        independent=(p * q).sum(-1),
    )


def read_windows(model: Path, source: Path, num_windows: int, window_len: int) -> Tensor:
    """Return [num_windows, window_len] token ids of held-out files. Windows do not overlap and are spread evenly."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    documents = encode_documents(tokenizer, read_corpus(source, HELD_OUT_FRACTION).held_out)
    windows = [
        ids[start : start + window_len]
        for ids, _ in documents
        for start in range(0, len(ids) - window_len + 1, window_len)
    ]
    if num_windows > len(windows):
        raise SystemExit(f"the held-out files hold {len(windows)} windows of {window_len} tokens, not {num_windows}")
    return torch.tensor([windows[index * len(windows) // num_windows] for index in range(num_windows)])


class Measurement:
    """Measures all drafters, window after window."""

    def __init__(self, model: Path) -> None:
        self._target = Model(model, torch.device("cpu"))
        self._drafters = {name: Drafter(model / name, self._target) for name in DRAFTERS}
        vocab_size = self._target.config.vocab_size
        self.draws = {name: Draws(vocab_size) for name in ("target", *DRAFTERS)}
        self.rows: dict[tuple[str, int], list[Rows]] = {(name, k): [] for name in DRAFTERS for k in range(NUM_STEPS)}

    @torch.no_grad()
    @preferring("reference")
    def add(self, input_ids: Tensor, seeds: range) -> None:
        """Add one window, [window_len]. The token at index i is drawn with the noise of (seed, i), for each seed."""
        positions, vocab_size = torch.arange(len(input_ids)), self._target.config.vocab_size
        noise = torch.stack(
            [gumbel_noise_ref(torch.full_like(positions, seed), positions, vocab_size) for seed in seeds]
        )
        target_rows = self._target.rows(input_ids[None])
        logits = self._target.logits(target_rows.states.final)  # [window_len, vocab_size]: row i draws token i + 1
        drawn = draw(logits[:-1], noise[:, 1:])  # [num_draws, window_len - 1]
        own = slice(FIRST_ROW + 1, len(input_ids) - 1)
        self.draws["target"].add(drawn[:, own], logits[own])
        for name, drafter in self._drafters.items():
            steps = drafter.unroll(target_rows, input_ids[None], NUM_STEPS)
            for k, (scores, _) in enumerate(steps):  # anchor r proposes token r + 2 + k
                draft_logits = drafter.of_all(scores)[0, FIRST_ROW:]
                at = slice(FIRST_ROW + 1 + k, FIRST_ROW + 1 + k + len(draft_logits))  # the target's rows
                proposals = draw(draft_logits, noise[:, at.start + 1 : at.stop + 1])
                self.rows[name, k].append(compare(logits[at], draft_logits, proposals == drawn[:, at]))
                if k == 0:
                    self.draws[name].add(proposals, draft_logits)


def summarize(windows: list[Rows], num_draws: int) -> dict[str, float]:
    """Return means over all rows, with standard errors: `noise_se` for these contexts, `text_se` over windows too."""
    columns = {name: torch.stack([getattr(rows, name) for rows in windows]).double() for name in Rows._fields}
    figures = {name: values.mean().item() for name, values in columns.items()}
    expected, shared = columns["expected"], columns["shared"]
    figures["noise_se"] = math.sqrt((expected * (1 - expected)).sum().item() / num_draws) / expected.numel()
    figures["text_se"] = (shared.mean(1).std() / math.sqrt(len(windows))).item()
    figures["z"] = (figures["shared"] - figures["expected"]) / figures["noise_se"]
    return figures


def check(figures: list[dict[str, Any]], draws: dict[str, Draws]) -> dict[str, dict[str, float]]:
    """Return the z scores of each model's draws. Ends the program if one exceeds BOUND."""
    wrong = [f"{row['drafter']} at {row['k']}: {row['z']:.1f}" for row in figures if abs(row["z"]) > BOUND]
    result = {name: each.z_scores() for name, each in draws.items()}
    for name, row in result.items():
        largest = max(row.get("max_abs_z", 0.0), abs(row["log_p_z"]))
        wrong += [f"draws of {name}: {largest:.1f}"] if largest > BOUND else []
    if wrong:
        raise SystemExit("more standard errors than chance allows: " + "; ".join(wrong))
    return result


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    windows = read_windows(options.model, options.source, options.windows, options.window)
    measurement = Measurement(options.model)
    for index, input_ids in enumerate(windows):
        measurement.add(input_ids, range(index * options.draws, (index + 1) * options.draws))
    figures = [
        {"drafter": name, "k": k + 1} | summarize(rows, options.draws) for (name, k), rows in measurement.rows.items()
    ]
    marginals = check(figures, measurement.draws)
    about = {
        "positions": sum(len(rows.shared) for rows in measurement.rows[DRAFTERS[0], 0]),
        "draws": options.draws,
        "windows": len(windows),
        "window": options.window,
        "threads": options.threads,
        "marginals": marginals,
        "seconds": round(time.perf_counter() - started),
    }
    report(options, "coupling", figures, unit="share of positions", about=about)
    for name, row in marginals.items():
        ids = "no id came often enough to be compared"
        if row["num_ids"]:
            ids = f"z of {row['num_ids']} ids rms {row['rms_z']:.2f}, largest {row['max_abs_z']:.1f}"
        print(f"draws of {name}: {ids}; z of their log-probability {row['log_p_z']:.1f}")


def _options() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="with the drafters' directories below")
    parser.add_argument("--source", type=Path, default=standard_library(), help="of 3.11.7, the library trained on")
    parser.add_argument("--windows", type=_at_least(2), default=64)  # one window has no spread
    parser.add_argument("--window", type=_at_least(MIN_WINDOW), default=512, help="tokens")
    parser.add_argument("--draws", type=_at_least(1), default=4, help="at each position")
    parser.add_argument("--threads", type=_at_least(1), default=1)
    return parser.parse_args()


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small: give {least} or more")
        return int(text)

    return number


if __name__ == "__main__":
    main()
