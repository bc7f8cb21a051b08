"""Nodes that speak the real messages over real sockets and compute nothing.

A `FakeCluster` holds the nodes of one model, each in its own thread. A script, which is a function from prompt ids to
output ids, decides what they generate. Through `Behaviour` a test makes them lose, double, reorder and fail messages.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from baton.metadata.bus.link import Link
from baton.metadata.bus.sockets import new_epoch
from baton.metadata.handoff.schema.schema import make_schema
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity, HandoffSchema, Load, ModelCard, NodeStats, PoolLayout, PoolLedger
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import Ended, GenerationRequest, TokenLogprobs, Unit, pack_ids, unpack_ids

Script = Callable[[list[int], int], list[int]]  # (prompt ids, choice) -> output ids, the stop token included


def make_tokenizer(kind: str = "byte") -> bytes:
    """Train a small tokenizer.json: byte-level BPE, or sentencepiece-like with byte fallback."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    corpus = [
        "def main(args): return the quick brown fox jumps over lazy dogs",
        "héllo wörld naïve café — “quotes”",
    ] * 20
    if kind == "byte":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(corpus, trainer)
        return tokenizer.to_str().encode()
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special[:3], show_progress=False, initial_alphabet=[])
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in corpus], trainer)
    import json

    description = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = description["model"]["vocab"]
    for token in special[3:]:
        vocab.setdefault(token, len(vocab))
    description["model"]["vocab"] = vocab
    return json.dumps(description).encode()


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_layout(page_size: int = 16, dtype: str = "float32") -> HandoffSchema:
    """Return a small schema without speculation."""
    pool = PoolLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype=dtype)  # type: ignore[arg-type]
    return make_schema(pool, None, page_size)


@dataclass
class Behaviour:
    """The faults and delays of the fake nodes."""

    step_tokens: int = 1  # tokens a Tokens message
    step_s: float = 0.0  # pause between them
    change_tokens: Callable[[FakeNode, list[m.Tokens]], list[m.Tokens]] | None = None  # of one unit's decode
    answer_prefill: Callable[[FakeNode, m.Prefill], bool] | None = None  # True: handled
    answer_reserve: Callable[[FakeNode, m.Reserve], bool] | None = None
    # what two nodes' names ("" for one that takes no part) make of an output: faulty nodes
    corrupt: Callable[[str, str, list[int]], list[int]] | None = None
    hold: threading.Event | None = None  # decode waits for it before the tokens after the first, but a canary's
    answer_compute: Callable[[FakeNode, m.Compute], bool] | None = None
    ack_cancels: bool = True
    resend: bool = True


@dataclass
class FakeCluster:
    """The nodes of one model."""

    router: str
    script: Script
    tokenizer: bytes = field(default_factory=make_tokenizer)
    model: str = "fake"
    page_size: int = 16
    num_pages: int = 512
    max_running: int = 64
    context_len: int = 512
    vocab_size: int = 420
    eos: tuple[int, ...] = (1,)
    template: str = TEMPLATE
    behaviour: Behaviour = field(default_factory=Behaviour)
    nodes: list[FakeNode] = field(default_factory=list)

    def generate_by(self, script: Script) -> None:
        """Change the output for short prompts. The output for canaries, whose prompts have several pages, must not
        change, because nodes may compute one in the background at any time."""
        before, canary_len = self.script, 2 * self.page_size
        self.script = lambda prompt, choice: (before if len(prompt) > canary_len else script)(prompt, choice)

    def card(self) -> ModelCard:
        return ModelCard(
            name=self.model,
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos,
            bos_token_id=0,
            tokenizer_digest=xxhash.xxh3_128_hexdigest(self.tokenizer),
            chat_template=self.template,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            defaults={},
        )

    def add(self, role: str, name: str | None = None, **changes: object) -> FakeNode:
        """Start a node. `changes` replace fields of its Hello."""
        node = FakeNode(self, role, name or f"{role}-{len(self.nodes)}", changes)
        self.nodes.append(node)
        node.start()
        return node

    def by_name(self, name: str) -> FakeNode:
        return next(node for node in self.nodes if node.name == name)

    def close(self) -> None:
        for node in self.nodes:
            node.stop()


class FakeNode(threading.Thread):
    """One fake node. `log` has every message that it received, except heartbeats."""

    poll_ms = 2  # longest wait for a message

    def __init__(self, cluster: FakeCluster, role: str, name: str, changes: dict[str, object]) -> None:
        super().__init__(name=name, daemon=True)
        self.cluster = cluster
        self.role = role
        self.epoch = new_epoch()
        self.log: list[m.ToNode] = []
        self.refusal: str | None = None
        self.notice = ""
        self.handoffs: queue.Queue[tuple[m.Prefill, int, list[int]]] = queue.Queue()
        self.reserved: dict[tuple[str, int, int], m.Reserve | m.Compute] = {}
        self.running: list[tuple[float, list[m.Tokens]]] = []
        self.sent: dict[Unit, list[m.Tokens]] = {}
        self.cancelled: set[tuple[str, int, int | None]] = set()
        self._changes = changes
        self._posted: queue.Queue[tuple[float, m.ToRouter]] = queue.Queue()
        self._is_told_to_stop = threading.Event()
        self.is_silent = False
        self.link = Link(cluster.router, name, self.epoch, None)

    # --- what tests ask

    def got(self, kind: type) -> list:
        return [message for message in self.log if isinstance(message, kind)]

    def wait_for(self, kind: type, count: int = 1, timeout: float = 30.0) -> list:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if len(self.got(kind)) >= count:
                return self.got(kind)
            time.sleep(0.005)
        raise AssertionError(f"{self.name} got {len(self.got(kind))} {kind.__name__}, not {count}")

    def post(self, message: m.ToRouter, after_s: float = 0.0) -> None:
        """Send a message from any thread, through the node's own thread, to which the socket belongs."""
        self._posted.put((time.monotonic() + after_s, message))

    def stop(self) -> None:
        """Close the connection without a message, as SIGKILL would."""
        self._is_told_to_stop.set()
        if self.is_alive():
            self.join(5)

    # --- the node

    def hello(self) -> m.Hello:
        cluster = self.cluster
        hello = m.Hello(
            role=self.role,  # type: ignore[arg-type]
            node_id=self.name,
            epoch=self.epoch,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            layout=make_layout(cluster.page_size),
            target_fingerprint="f" * 16,
            draft_fingerprint=None,
            model=cluster.card(),
            capacity=Capacity(
                num_pages=cluster.num_pages, page_size=cluster.page_size, max_running=cluster.max_running
            ),
            data_address="tcp://127.0.0.1:1",
            protocol=PROTOCOL_MAX,
        )
        import msgspec

        return msgspec.structs.replace(hello, **self._changes) if self._changes else hello

    def load(self) -> Load:
        used = sum(self._pages(reserve.request) for reserve in self.reserved.values())
        return Load(free_pages=self.hello().capacity.num_pages - used, running=len(self.reserved), waiting=0)

    def run(self) -> None:
        self.link.send(self.hello())
        beat_at = 0.0
        while not self._is_told_to_stop.is_set():
            now = time.monotonic()
            if now - beat_at > 0.1 and not self.is_silent:
                beat_at = now
                self.link.send(m.Heartbeat(0, "idle", 0.0, 10.0, self.load(), NodeStats(steps=7)))
            for message in self.link.receive():
                if not isinstance(message, m.RouterHeartbeat):
                    self.log.append(message)
                self.take(message)
            for _ in range(self._posted.qsize()):
                due, posted = self._posted.get()
                if due <= now:
                    self.link.send(posted)
                else:
                    self._posted.put((due, posted))
            self._admit()
            self._step()
            if not self.running:
                self.link.socket.poll(self.poll_ms)
        self.link.close()

    def take(self, message: m.ToNode) -> None:
        behaviour = self.cluster.behaviour
        match message:
            case m.Welcome():
                self.notice = message.notice
                self.reserved.clear()  # as a real node: each Welcome starts from nothing
                self.running.clear()
                if message.need_tokenizer:
                    data = self.cluster.tokenizer
                    self.link.send(m.TokenizerFile(self.cluster.card().tokenizer_digest, zlib.compress(data)))
            case m.Refusal():
                self.refusal = message.reason
            case m.HelloAgain():
                self.link.send(self.hello())
            case m.Reserve():
                if behaviour.answer_reserve is None or not behaviour.answer_reserve(self, message):
                    self.reserve(message)
            case m.Compute():
                if behaviour.answer_compute is None or not behaviour.answer_compute(self, message):
                    self.compute(message)
            case m.Prefill():
                if behaviour.answer_prefill is None or not behaviour.answer_prefill(self, message):
                    self.prefill(message)
            case m.Cancel():
                self._cancel(message)
            case m.Resend() if behaviour.resend:
                for tokens in self.sent.get(message.unit, []):
                    self.link.send(tokens)
            case m.Inspect() | m.Flush():
                pool = PoolLedger(self.load().free_pages, 1, 0, 0, 0, 0)
                units = tuple(Unit(rid, choice, attempt) for rid, choice, attempt in self.reserved)
                self.link.send(m.LedgerReport(message.query, pool, units, (), self.load(), NodeStats()))
            case _:
                pass

    def compute(self, message: m.Compute) -> None:
        """Compute the prompt without a prefill node."""
        self.reserve(message)
        prompt, num_received = unpack_ids(message.request.prompt_ids), len(unpack_ids(message.request.received_ids))
        for choice in message.choices:
            if (message.rid, choice, message.attempt) in self.reserved:
                output = self.output(message.request, prompt, choice, None, self)
                unit = Unit(message.rid, choice, message.attempt)
                places = range(num_received, len(output))
                steps = [self.tokens(unit, message.request, output, place, 1) for place in places]
                self.sent[unit] = list(steps)
                self.running.append((0.0, steps))
        if message.request.prompt_logprobs:
            self.prefill_done(message)

    def reserve(self, message: m.Reserve | m.Compute) -> None:
        granted: list[int] = []
        for choice in message.choices:
            if self._pages(message.request) <= self.load().free_pages and len(self.reserved) < self.cluster.max_running:
                self.reserved[(message.rid, choice, message.attempt)] = message
                granted.append(choice)
        self.link.send(m.Reserved(message.rid, message.attempt, tuple(granted), self.load()))

    def prefill(self, message: m.Prefill) -> None:
        request = message.request
        prompt, received = unpack_ids(request.prompt_ids), unpack_ids(request.received_ids)
        for choice in message.choices:
            decode = message.decode
            node = next((node for node in self.cluster.nodes if decode and node.epoch == decode.epoch), None)
            output = self.output(request, prompt, choice, self, node)
            tokens = self.tokens(Unit(message.rid, choice, message.attempt), request, output, len(received), 1)
            self.link.send(tokens)
            if node is None:
                continue
            if tokens.ended:  # revoked as finished
                node.reserved.pop((message.rid, choice, message.attempt), None)
            else:
                node.handoffs.put((message, choice, output))
        self.prefill_done(message)

    def prefill_done(self, message: m.Prefill | m.Compute) -> None:
        prompt = unpack_ids(message.request.prompt_ids)
        prompt_logprobs = tuple(_logprobs(token) for token in prompt[1:]) if message.request.prompt_logprobs else ()
        self.link.send(
            m.PrefillDone(message.rid, message.attempt, 0.001, 0.002, 3, self.load(), prompt_logprobs=prompt_logprobs)
        )

    def output(
        self,
        request: GenerationRequest,
        prompt: list[int],
        choice: int,
        prefill: FakeNode | None = None,
        decode: FakeNode | None = None,
    ) -> list[int]:
        """Return the whole output, cut at a stop id or max_tokens."""
        output = self.cluster.script(prompt, choice)
        corrupt = self.cluster.behaviour.corrupt
        if corrupt is not None:
            output = corrupt(prefill.name if prefill else "", decode.name if decode else "", list(output))
        for place, token in enumerate(output):
            if token in request.params.stop_ids and place + 1 >= request.params.min_tokens:
                return output[: place + 1][: request.params.max_tokens]
        assert len(output) >= request.params.max_tokens, "the script is too short for max_tokens"
        return output[: request.params.max_tokens]

    def tokens(self, unit: Unit, request: GenerationRequest, output: list[int], first: int, count: int) -> m.Tokens:
        ids = output[first : first + count]
        ended: dict[int, Ended] = {}
        if first + count >= len(output):
            is_stop = output[-1] in request.params.stop_ids
            num_prompt = len(unpack_ids(request.prompt_ids))
            ended[0] = Ended(
                "stop" if is_stop else "length", output[-1] if is_stop else None, num_prompt, len(output), 3
            )
        logprobs = {0: tuple(map(_logprobs, ids))} if request.params.num_logprobs is not None else {}
        return m.Tokens((unit,), pack_ids([first]), pack_ids([len(ids)]), pack_ids(ids), logprobs=logprobs, ended=ended)

    def _admit(self) -> None:
        while not self.handoffs.empty():
            message, choice, output = self.handoffs.get()
            unit = Unit(message.rid, choice, message.attempt)
            if (message.rid, choice, message.attempt) not in self.reserved:
                continue
            self.link.send(m.Admitted(unit, 0.001, 2, 1024, 0))
            first = len(unpack_ids(message.request.received_ids))
            step = self.cluster.behaviour.step_tokens
            steps = [
                self.tokens(unit, message.request, output, place, step) for place in range(first, len(output), step)
            ]
            if self.cluster.behaviour.change_tokens is not None and not unit.rid.startswith("canary"):
                steps = self.cluster.behaviour.change_tokens(self, steps)
            self.sent[unit] = [self.tokens(unit, message.request, output, place, 1) for place in range(len(output))]
            self.running.append((0.0, steps))

    def _step(self) -> None:
        behaviour = self.cluster.behaviour
        is_held = behaviour.hold is not None and not behaviour.hold.is_set()
        now = time.monotonic()
        kept: list[tuple[float, list[m.Tokens]]] = []
        for due, steps in self.running:
            unit = steps[0].units[0]
            if now < due or (is_held and not unit.rid.startswith("canary")):
                kept.append((due, steps))
                continue
            key = (unit.rid, unit.choice, unit.attempt)
            if key not in self.reserved:
                continue
            tokens = steps.pop(0)
            self.link.send(tokens)
            if steps:
                kept.append((now + behaviour.step_s, steps))
            else:
                self.reserved.pop(key, None)
                self.link.send(m.CapacityFreed(self.load()))
        self.running = kept
        if kept and behaviour.step_s:
            time.sleep(min(behaviour.step_s, 0.001))

    def _cancel(self, message: m.Cancel) -> None:
        for key in list(self.reserved):
            is_named = message.choices is None or key[1] in message.choices
            if key[0] == message.rid and key[2] == message.attempt and is_named:
                del self.reserved[key]
        if self.cluster.behaviour.ack_cancels:
            self.link.send(m.Cancelled(message.rid, message.attempt))

    def _pages(self, request: GenerationRequest) -> int:
        num_tokens = (len(request.prompt_ids) + len(request.received_ids)) // 4 + 2
        return -(-num_tokens // self.cluster.page_size)


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, (token, (token + 1) % 400), (-0.5, -2.0))
