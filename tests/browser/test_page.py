"""The page in front of a real router and real nodes: what a person sees and does, with every kind of key."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served
from speaker import make_speaker

from .conftest import Visit

pytestmark = pytest.mark.whole

ANSWER = "A <b>quick</b> brown fox jumps over the lazy dog & <img src=x onerror=alert(1)> sleeps."
SAID = f"<think>I think about foxes.</think>{ANSWER}"
CALLED = 'Let me look.<tool_call>{"name": "look", "arguments": {"at": "<i>foxes</i>"}}\n</tool_call>'
TEMPLATE = "{{ tools | tojson if tools }}{% for message in messages %}{{ message['content'] }}{% endfor %}>"


class Running:
    """A router and nodes that a thread steps, so that they serve while a test looks at the page."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.pause_s = 0.0  # between two steps
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def alone(self, act: Callable[[], Any]) -> Any:
        """Do something while no node is stepped."""
        with self._lock:
            return act()

    def stop(self) -> None:
        """Stop stepping, and all nodes and the router."""
        self._stop.set()
        self._thread.join(10)
        self.served.__exit__()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.alone(self.served.step)
            self._stop.wait(self.pause_s)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks, and then says markup."""
    return make_speaker(tmp_path_factory.mktemp("model") / "fox", SAID, TEMPLATE)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Running]]:
    """Start a router with one prefill and two decode nodes."""
    running: list[Running] = []

    def begin(num_decode: int = 2, served_model: Path = model, nodes: Any = None, **router: Any) -> Running:
        settings = {"reasoning_parser": "qwen3", **router}
        running.append(Running(Served(served_model, router=settings, **(nodes or {})).up(num_decode=num_decode)))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def ask(tab: Any, text: str = "hello") -> None:
    """Send a message in the chat."""
    if not tab.locator("#chat").is_visible():
        tab.get_by_role("button", name="Chat", exact=True).click()
    tab.get_by_label("Message", exact=True).fill(text)
    tab.keyboard.press("Enter")


def give_key(tab: Any, key: str) -> None:
    """Enter a key in the dialog that asks for it."""
    tab.get_by_label("API key or admin key").fill(key)
    tab.get_by_role("button", name="Use this key").click()


def check_no_key_is_kept(tab: Any, key: str) -> None:
    """Check that a key is in no address, cookie or storage."""
    kept = tab.evaluate(
        "JSON.stringify([location.href, document.cookie, {...localStorage}, {...sessionStorage}, history.state, "
        "performance.getEntriesByType('resource').map((entry) => entry.name)])"
    )
    assert key not in kept
    assert tab.context.cookies() == []


def test_on_loopback_a_message_travels_and_its_timeline_is_told(start: Callable[..., Running], visit: Visit) -> None:
    tab = visit(start().served.url)
    for name in ("prefill-0", "decode-0", "decode-1"):
        tab.get_by_role("button", name=name).wait_for()
    tab.get_by_role("button", name="Send a request").click()
    ask(tab)
    tab.get_by_role("button", name="Where its time went").wait_for()
    assert tab.locator(".turn.assistant .text").inner_text() == ANSWER
    assert tab.locator(".turn.assistant .thoughts > div").inner_text() == "I think about foxes."
    assert "tokens/s" in tab.locator("#chat-figures").inner_text()
    tab.get_by_role("button", name="Where its time went").click()
    tab.locator("#request-body").get_by_text("computing the prompt").wait_for()
    for reason in ("the only prefill node", "of 2 decode nodes"):
        tab.locator("#request-body").get_by_text(reason).wait_for()
    tab.keyboard.press("Escape")
    tab.get_by_role("link", name="Requests").click()
    tab.get_by_role("row", name="chatcmpl-").get_by_text("done").wait_for()
    tab.get_by_label("Outcome").select_option("failed")
    tab.get_by_text("0 requests found").wait_for()


def test_drafted_tokens_are_coloured_if_asked_for(start: Callable[..., Running], model: Path, visit: Visit) -> None:
    """The drafter is the model itself, so that all of its drafts are accepted."""
    drafter = {"speculative": "standalone", "draft_model": str(model), "draft_steps": 2}
    tab = visit(start(num_decode=1, nodes=drafter).served.url)
    tab.get_by_role("button", name="Chat", exact=True).click()
    tab.get_by_label("Colour drafted tokens").check()
    ask(tab)
    tab.get_by_role("button", name="Where its time went").wait_for()
    assert tab.locator(".turn.assistant .text").inner_text() == ANSWER
    drafted = "".join(tab.locator(".turn.assistant .drafted").all_inner_texts())
    assert 0.3 * len(SAID) < len(drafted) < len(SAID)
    assert "drafted and accepted" in tab.locator("#chat-figures").inner_text()


def test_a_call_of_a_tool_is_shown_apart_and_its_result_is_sent_back(
    start: Callable[..., Running], tmp_path: Path, visit: Visit
) -> None:
    calling = make_speaker(tmp_path / "caller", CALLED, TEMPLATE)
    tab = visit(start(num_decode=1, served_model=calling, tool_parser="hermes").served.url)
    tab.get_by_role("button", name="Chat", exact=True).click()
    tab.get_by_text("Settings").click()
    tools = tab.get_by_label("Tools")
    tools.fill('[{"type": "function", ')
    ask(tab)
    tab.get_by_text("The tools are not JSON").wait_for()
    tools.fill('[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]')
    tab.get_by_text("Settings").click()
    ask(tab)
    tab.get_by_placeholder("Write what look returns.").wait_for()
    assert tab.locator(".turn.assistant .text").inner_text() == "Let me look."
    assert json.loads(tab.locator(".call pre").inner_text()) == {"at": "<i>foxes</i>"}
    with tab.expect_request("**/v1/chat/completions") as sent:
        ask(tab, "three foxes")
    *_, call, result = sent.value.post_data_json["messages"]
    assert (result["role"], result["content"]) == ("tool", "three foxes")
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_the_text_of_a_running_request_is_read_only_when_it_is_asked_for_and_an_answer_can_be_stopped(
    start: Callable[..., Running], visit: Visit
) -> None:
    running = start()
    running.pause_s = 0.3
    tab = visit(running.served.url)
    paths: list[str] = []
    tab.on("request", lambda request: paths.append(request.url))
    ask(tab)
    tab.locator(".turn.assistant .text").get_by_text("A <b>").wait_for()
    tab.get_by_role("link", name="Requests").click()
    tab.locator("tr.is-live button").click()
    show = tab.get_by_role("button", name="Show its text so far")
    show.wait_for()
    assert not any(path.endswith("/text") for path in paths)
    show.click()
    tab.get_by_label("Text so far").get_by_text("I think about foxes").wait_for()
    tab.keyboard.press("Escape")
    tab.get_by_role("button", name="Stop", exact=True).click()
    tab.get_by_text("You stopped the answer.").wait_for()
    running.pause_s = 0.0
    tab.get_by_role("row", name="chatcmpl-").get_by_text("cancelled").wait_for()


def test_a_chat_that_is_cleared_during_an_answer_begins_anew(start: Callable[..., Running], visit: Visit) -> None:
    running = start()
    running.pause_s = 0.3
    tab = visit(running.served.url)
    ask(tab)
    tab.locator(".turn.assistant .text").get_by_text("A <b>").wait_for()
    tab.get_by_role("button", name="Clear", exact=True).click()
    tab.get_by_role("button", name="Stop", exact=True).wait_for(state="hidden")
    running.pause_s = 0.0
    with tab.expect_request("**/v1/chat/completions") as sent:
        ask(tab, "again")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "again"}]


def test_a_node_that_dies_and_one_that_drains_are_shown_with_the_reason(
    start: Callable[..., Running], visit: Visit
) -> None:
    running = start()
    tab = visit(running.served.url)
    tab.get_by_role("button", name="decode-1").click()
    tab.get_by_role("button", name="Drain", exact=True).click()
    tab.get_by_role("button", name="Cancel").click()  # nothing has happened
    tab.get_by_role("button", name="Drain", exact=True).click()
    tab.locator("#confirm-do").click()
    tab.locator("#node-dialog").get_by_text("is draining, since an operator asked for it").wait_for()
    tab.get_by_role("button", name="Put back").click()
    tab.locator("#confirm-do").click()
    tab.locator("#node-dialog").get_by_text("It takes work.").wait_for()
    tab.keyboard.press("Escape")
    running.alone(lambda: running.served.kill("decode-0"))
    card = tab.locator(".node", has=tab.get_by_role("button", name="decode-0"))
    card.get_by_text("gone", exact=True).wait_for()
    tab.locator("#troubles").get_by_text("decode-0 is gone").wait_for()


def test_a_flush_asks_first_and_empties_the_caches(start: Callable[..., Running], visit: Visit) -> None:
    running = start()
    tab = visit(running.served.url)
    tab.get_by_role("button", name="Flush prefix caches").click()
    with tab.expect_response("**/admin/flush") as answered:
        tab.locator("#confirm-do").click()
    assert answered.value.status == 200
    tab.locator("#confirm-dialog").wait_for(state="hidden")


def test_a_router_that_starts_anew_is_found_again(start: Callable[..., Running], visit: Visit) -> None:
    running = start()
    served = running.served
    tab = visit(served.url)
    tab.get_by_text("Live", exact=True).wait_for()
    served._settings |= {"port": int(served.url.rpartition(":")[2]), "node_address": served._router.node_address}
    served.stop_router()
    tab.get_by_text("Connection lost").wait_for()
    served._start_router()
    tab.get_by_text("Live", exact=True).wait_for()
    tab.locator("#chat-settings select[name=model] option").wait_for(state="attached")  # the nodes have joined again
    ask(tab)
    tab.get_by_role("button", name="Where its time went").wait_for(timeout=60_000)


def test_an_api_key_shows_counts_and_the_chat_and_says_what_the_admin_key_would_show(
    start: Callable[..., Running], visit: Visit
) -> None:
    tab = visit(start(api_key="the-api-key", admin_key="the-admin-key").served.url, may_fail=(401,))
    give_key(tab, "wrong")
    tab.get_by_role("alert").get_by_text("The router does not accept this key").wait_for()
    give_key(tab, "the-api-key")
    tab.get_by_text("The admin key also shows the nodes").wait_for()
    assert not tab.get_by_role("button", name="decode-0").is_visible()
    assert not tab.get_by_role("button", name="Flush prefix caches").is_visible()
    ask(tab)
    tab.locator(".turn.assistant .text").get_by_text("brown fox").wait_for()
    tab.get_by_role("button", name="API key", exact=True).click()
    give_key(tab, "the-admin-key")
    tab.get_by_role("button", name="decode-0").wait_for()
    tab.get_by_role("button", name="Flush prefix caches").wait_for()
    check_no_key_is_kept(tab, "the-api-key")
    check_no_key_is_kept(tab, "the-admin-key")


def test_all_is_reached_by_the_keyboard(start: Callable[..., Running], visit: Visit) -> None:
    tab = visit(start().served.url)
    tab.get_by_role("button", name="decode-1").wait_for()
    reached: list[str] = []
    for _ in range(16):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement === document.body"):
            break  # all of the page has been visited
        reached.append(tab.evaluate("document.activeElement.textContent.trim() || document.activeElement.tagName"))
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached
    wanted = ["Skip to the content", "System", "Requests", "Charts", "API key", "Chat"]
    wanted += ["prefill-0", "decode-0", "decode-1"]
    assert [name for name in reached if name in wanted] == wanted
    tab.get_by_role("button", name="decode-1").press("Enter")
    tab.locator("#node-dialog[open]").wait_for()
    tab.keyboard.press("Escape")
    tab.locator("#node-dialog").wait_for(state="hidden")
    assert tab.evaluate("document.activeElement.textContent") == "decode-1"
    tab.get_by_role("button", name="Chat", exact=True).press("Enter")
    assert tab.evaluate("document.activeElement.id") == "chat-text"
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.id") == "chat-button"
