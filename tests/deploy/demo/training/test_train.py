"""The demo model's trainer, end to end on CPU for a few steps, and the demo model as shipped."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from baton.deploy.demo.training.corpus import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    conversations,
    is_held_out,
    read_corpus,
    render_chat,
    standard_library,
)
from baton.deploy.demo.training.evaluate import bits_per_byte, encode_documents, generate
from baton.deploy.demo.training.train import TrainResult, parse_arguments, train
from baton.deploy.demo.training.windows import Model
from baton.kernels.operations import preferring

CPU = torch.device("cpu")
DEMO = Path(__file__).parents[4] / "deploy" / "demo"
HELD_OUT_FRACTION = 0.2
MAX_FILES = 24
EOS_IDS = [0, 5]

TRICKY_TEXTS = [
    "def f(x):\n\tif x == 1234:\n        return [1.5e-10, 'ü', \"日本\"]\n\n\n    # \U0001f600\r\n",
    "   leading, trailing   ",
    "\n\n \n\t\n",
    "\f\v\0 \x7f\u2028\u0301e\u0301",
    "",
]


@pytest.fixture(scope="module")
def config(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    like = Path(shutil.copytree(checkpoint("llama", tie_word_embeddings=True), tmp_path_factory.mktemp("like") / "of"))
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, like / name)
    flags = (
        f"--out {tmp_path_factory.mktemp('demo')} --like {like} --device cpu --steps 12 --max-files {MAX_FILES} "
        f"--held-out-fraction {HELD_OUT_FRACTION} --context-len 96 --early-context-len 32 "
        "--early-share 0.5 --batch-tokens 768 --warmup-steps 2 --eval-every 4"
    )
    return parse_arguments(flags.split())


@pytest.fixture(scope="module")
def result(config: Namespace) -> TrainResult:
    return train(config)


@pytest.mark.whole
def test_writes_a_model_directory(config: Namespace, result: TrainResult) -> None:
    names = {path.name for path in config.out.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((config.out / "generation_config.json").read_text())["eos_token_id"] == EOS_IDS


@pytest.mark.whole
def test_training_lowers_the_loss(result: TrainResult) -> None:
    assert len(result.losses) == 3  # 12 steps, evaluated every 4
    assert result.losses[-1] < result.losses[0] - 0.1, result.losses


@pytest.mark.whole
def test_transformers_computes_the_same_logits(config: Namespace, result: TrainResult) -> None:
    reference = LlamaForCausalLM.from_pretrained(config.out, dtype=torch.float32).eval()
    input_ids = torch.randint(0, 512, (2, config.context_len), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), preferring("reference"):
        expected = reference(input_ids).logits
        torch.testing.assert_close(Model(config.out, CPU)(input_ids), expected, atol=1e-4, rtol=1e-4)
        # The trainer's own weights are float32; the file holds them rounded to bfloat16.
        assert (result.model(input_ids) - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.whole
def test_tokenizer_round_trips(result: TrainResult) -> None:
    texts = TRICKY_TEXTS + [file.text for file in result.corpus.held_out]
    for text in texts:
        assert result.tokenizer.decode(result.tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [result.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


@pytest.mark.whole
def test_held_out_files_are_disjoint(result: TrainResult) -> None:
    train_files, held_out = result.corpus.train, result.corpus.held_out
    assert train_files and held_out
    assert not {file.name for file in train_files} & {file.name for file in held_out}
    assert not {file.text for file in train_files} & {file.text for file in held_out}
    assert all(is_held_out(file.name, HELD_OUT_FRACTION) for file in held_out)
    held_out_text = "\n".join(file.text for file in held_out)
    assert not any(chat in held_out_text for chat in conversations(train_files))


def test_the_split_does_not_depend_on_the_other_files() -> None:
    few, more = (read_corpus(standard_library() / "asyncio", 0.3, max_files=count) for count in (10, 20))
    assert few.held_out and len(more.held_out) > len(few.held_out)
    assert {file.name for file in few.held_out} <= {file.name for file in more.held_out}


@pytest.mark.whole
def test_chat_template_matches_the_training_text(config: Namespace, result: TrainResult) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.out)
    turns = [("system", "A module."), ("user", "Add."), ("assistant", "def add(a, b):\n    return a + b\n")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == END_OF_TEXT + render_chat(turns)
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == END_OF_TEXT + render_chat(turns[:2]) + "<|assistant|>"


@pytest.mark.whole
def test_bits_per_byte_does_not_depend_on_the_stride_within_one_window(result: TrainResult) -> None:
    documents = encode_documents(result.tokenizer, result.corpus.held_out)
    short = [(ids, num_bytes) for ids, num_bytes in documents if len(ids) <= 97][:3]
    short = short or [(documents[0][0][:60], 100)]
    whole = bits_per_byte(result.model, short, 96, stride=96)
    assert bits_per_byte(result.model, short, 96, stride=24) == pytest.approx(whole, rel=1e-5)


def test_the_text_must_fill_a_batch(config: Namespace) -> None:
    too_large = parse_arguments([f"--out={config.out}", "--device=cpu", "--max-files=5", "--batch-tokens=100000000"])
    with pytest.raises(ValueError, match="a batch needs"):
        train(too_large)


@pytest.fixture(scope="module")
def demo_files() -> Path:
    if not (DEMO / "model.safetensors").exists():
        pytest.fail("deploy/demo/model.safetensors is missing")
    return DEMO


def test_shipped_model_loads_alike(demo_files: Path) -> None:
    reference = LlamaForCausalLM.from_pretrained(demo_files, dtype=torch.float32).eval()
    text = "import os\n\ndef main():\n    for name in sorted(os.listdir('.')):\n        print(name, 123)\n"
    tokenizer = Tokenizer.from_file(str(demo_files / "tokenizer.json"))
    input_ids = tokenizer.encode(text).ids
    assert AutoTokenizer.from_pretrained(demo_files).encode(text) == input_ids
    with torch.no_grad(), preferring("reference"):
        expected = reference(torch.tensor([input_ids])).logits
        torch.testing.assert_close(Model(demo_files, CPU)(torch.tensor([input_ids])), expected, atol=1e-3, rtol=1e-3)
    assert tokenizer.decode(input_ids, skip_special_tokens=False) == text
    assert all(tokenizer.decode(tokenizer.encode(t).ids, skip_special_tokens=False) == t for t in TRICKY_TEXTS)


def test_shipped_model_writes_python(demo_files: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_files / "tokenizer.json"))
    prompt = tokenizer.encode("    def __init__(").ids
    text = tokenizer.decode(generate(Model(demo_files, CPU), torch.tensor([prompt]), 2)[0, len(prompt) :].tolist())
    assert text.startswith("self"), text


def test_the_standalone_draft_shares_the_tokenizer_and_loads_alone(demo_files: Path) -> None:
    own = demo_files / "standalone" / "tokenizer.json"
    assert own.readlink() == Path("../tokenizer.json"), "a link, so that the checkout holds one"
    assert PreTrainedTokenizerFast.from_pretrained(own.parent).encode("import os") == [522, 605]


def test_demo_folder_stays_small(demo_files: Path) -> None:
    assert sum(path.stat().st_size for path in demo_files.rglob("*") if path.suffix != ".pyc") < 40e6
