"""The page with no node, one node and many, with hostile names, and after thousands of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Visit
from .stand_in import StandIn, finished, node, request, snapshot

pytestmark = pytest.mark.whole

MARKUP = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
PAIR = [node("prefill-0", "prefill"), node("decode-0", "decode")]


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait until a condition holds that no element of a page shows."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold"
        time.sleep(0.02)


def num_wide(tab: Any) -> int:
    """Return how many pixels the content is wider than the window."""
    return tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def test_without_a_node_the_page_says_how_to_start_one(visit: Visit) -> None:
    with StandIn(snapshot([], [], models=[])) as stand_in:
        tab = visit(stand_in.url)
        tab.get_by_text("No prefill node has joined yet").wait_for()
        tab.get_by_text("No decode node has joined yet").wait_for()
        assert not tab.get_by_text("Send a request").is_visible()  # nobody could answer it


def test_one_verdict_says_in_words_whether_the_system_does_well(visit: Visit) -> None:
    now = snapshot(PAIR, [])
    with StandIn(now) as stand_in:
        verdict = visit(stand_in.url).locator("#verdict")
        verdict.get_by_text("Healthy: 2 of 2 nodes take work, nothing waits.").wait_for()
        now["waits"] = [{"where": "queue", "why": "no decode node takes more", "count": 3, "oldest_s": 4.0}]
        verdict.get_by_text(
            "Busy: 2 of 2 nodes take work, and 3 requests wait in queue, the oldest for 4.00 s"
        ).wait_for()
        now["nodes"] = [PAIR[0], node("decode-0", "decode", state="gone", why="its connection closed", counters=None)]
        verdict.get_by_text(
            "Problem: 1 of 2 nodes takes work. decode-0 is gone, because its connection closed"
        ).wait_for()
        now["router"] |= {"reason": "decode: 0 of 1 nodes are ready"}
        verdict.get_by_text("Problem: decode: 0 of 1 nodes are ready.").wait_for()


def test_rates_of_arrows_are_the_sums_of_what_nodes_show(visit: Visit) -> None:
    nodes = [node("prefill-0", "prefill"), node("decode-0", "decode"), node("decode-1", "decode")]
    counters = ("computed_tokens", "generated_tokens", "generated_tokens")
    requests = [request(f"r{index}", decode=f"decode-{index % 2}") for index in range(7)]
    with StandIn(snapshot(nodes, requests)) as stand_in:

        def each() -> None:
            for index, name in enumerate(counters):
                nodes[index]["counters"][name] += 10 * (index + 1)

        stand_in.each = each
        tab = visit(stand_in.url)
        tab.locator("#rate-tokens:not(:empty)").wait_for()
        shown = ".speed strong, #rate-prompt, #rate-tokens"
        read = "(shown) => [...document.querySelectorAll(shown)].map((element) => parseFloat(element.textContent))"
        prompt, tokens, computed, *generated = tab.evaluate(read, shown)
        assert prompt == computed > 0
        assert len(generated) == 2 and abs(tokens - sum(generated)) <= 2, (tokens, generated)


def test_bars_dots_and_words_of_a_node_agree_at_any_instant(visit: Visit) -> None:
    """The number of requests changes with every snapshot, and is read as often as the browser draws."""
    nodes = [node("prefill-0", "prefill"), *(node(f"decode-{index}", "decode") for index in range(2))]
    now = snapshot(nodes, [])
    with StandIn(now, interval_s=0.05) as stand_in:

        def each() -> None:
            count = (len(now["requests"]) + 3) % 8
            now["requests"] = [request(f"r{index}", decode=f"decode-{index % 2}") for index in range(count)]
            now["num_requests"] = now["counts"]["running"] = count
            for index in (1, 2):
                nodes[index]["pages"] = {**nodes[index]["pages"], "request": 50 * count}

        stand_in.each = each
        tab = visit(stand_in.url)
        tab.get_by_text("slots 3 of 32").first.wait_for()
        cards = tab.evaluate(READ_CARDS)
        assert len({here for here, *_ in cards}) > 2
        for here, *shown in cards:
            assert shown == [here, here, here, 32], (here, shown)


READ_CARDS = """() => new Promise((done) => {
  const read = [];
  const number = (text, at) => Number(text.match(/\\d+/g)[at]);
  const look = () => {
    for (const card of document.querySelectorAll(".role.decode .node")) {
      const slots = card.querySelector(".load-words span").textContent, [bar] = card.querySelectorAll(".load-bar i");
      const dots = card.querySelector(".resting").getBoundingClientRect().width / 11;
      const share = bar.getBoundingClientRect().width / bar.parentElement.getBoundingClientRect().width;
      read.push([number(card.querySelector(".lane b").textContent, 0), Math.round(dots), Math.round(32 * share),
        number(slots, 0), number(slots, 1)]);
    }
    if (read.length < 120) requestAnimationFrame(look);
    else done(read);
  };
  look();
})"""


def test_a_clock_that_is_set_back_changes_no_rate(visit: Visit) -> None:
    snapshots = [snapshot([], [], at=at) for at in (100.0, 70.0)]
    for index, each in enumerate(snapshots):
        each["router"]["uptime_s"], each["totals"]["output_tokens"] = 10.0 + 2 * index, 40 * index
    read = """async (snapshots) => {
        const history = new (await import("./page/history.js")).History();
        snapshots.forEach((snapshot) => history.add(snapshot));
        return history.rate((snapshot) => snapshot.totals.output_tokens);
    }"""
    with StandIn(snapshot(PAIR, [])) as stand_in:
        assert visit(stand_in.url).evaluate(read, snapshots) == 20.0


def test_a_single_decode_node_computes_prompts_itself(visit: Visit) -> None:
    with StandIn(snapshot([node("decode-0", "decode")], [])) as stand_in:
        tab = visit(stand_in.url)
        tab.get_by_text("the decode nodes compute the prompts themselves").wait_for()
        tab.get_by_role("button", name="decode-0").wait_for()


@pytest.mark.parametrize("width", [1280, 360])
def test_sixty_four_nodes_fit_without_sideways_scrolling(visit: Visit, width: int) -> None:
    roles = [("prefill", index) for index in range(16)] + [("decode", index) for index in range(48)]
    nodes = [node(f"{role}-{index}", role) for role, index in roles]
    requests = [request(f"r{index}", decode=f"decode-{index % 48}") for index in range(200)]
    with StandIn(snapshot(nodes, requests)) as stand_in:
        tab = visit(stand_in.url, viewport={"width": width, "height": 800})
        tab.get_by_role("button", name="decode-47").wait_for()
        assert tab.locator(".node").count() == 64
        assert num_wide(tab) <= 0


def test_ranks_of_a_group_are_one_node_with_a_bar_for_each(visit: Visit) -> None:
    ranks = [node(f"big-{rank}", "decode", group="big", rank=rank, num_ranks=4) for rank in range(4)]
    with StandIn(snapshot([node("prefill-0", "prefill"), *ranks], [])) as stand_in:
        tab = visit(stand_in.url)
        card = tab.locator(".node", has=tab.get_by_role("button", name="big", exact=True))
        card.get_by_text("rank 3: memory 72 of 512 pages").wait_for()
        assert card.get_by_text("39 cached, freed when needed").count() == 4
        assert card.locator(".pages-bar").count() == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_view_fits_and_text_stands_out_in_light_and_dark(visit: Visit, scheme: str, width: int) -> None:
    now = snapshot(PAIR, [request("r1", why="a " + "long" * 100)])
    with StandIn(now) as stand_in:
        size = {"width": width, "height": 740}
        tab = visit(stand_in.url, color_scheme=scheme, reduced_motion="reduce", viewport=size)
        for view in ("Requests", "Charts", "System"):
            tab.get_by_role("link", name=view, exact=True).click()
            tab.wait_for_timeout(400)
            assert num_wide(tab) <= 0, view
        tab.get_by_role("button", name="Chat", exact=True).click()
        assert num_wide(tab) <= 0
        assert tab.evaluate("document.getAnimations().length") == 0
        assert contrast(tab, "--ink", "--ground") > 7
        for name in ("--quiet", "--prefill", "--decode", "--pages", "--good", "--bad"):
            assert contrast(tab, name, "--ground") > 4.5, name
            assert contrast(tab, name, "--surface") > 4.5, name


def contrast(tab: Any, ink: str, ground: str) -> float:
    """Return the contrast of two colours of the theme, as WCAG defines it."""
    first, second = (tab.evaluate(LUMINANCE, name) for name in (ink, ground))
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


LUMINANCE = """(name) => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
  const part = (at) => { const value = parseInt(hex.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(0) + 0.7152 * part(2) + 0.0722 * part(4);
}"""


def test_markup_in_names_reasons_and_errors_stays_text(visit: Visit) -> None:
    nodes = [node(MARKUP, "prefill", state="faulty", why=MARKUP, model=MARKUP), node("decode-0", "decode")]
    now = snapshot(nodes, [request(MARKUP, stage=MARKUP, why=MARKUP)], models=[MARKUP])
    now["waits"] = [{"where": MARKUP, "why": MARKUP, "count": 1, "oldest_s": 1.0}]
    now["router"] |= {"reason": MARKUP, "version": MARKUP}
    with StandIn(now) as stand_in:
        stand_in.lines = [finished("r1", model=MARKUP, client_id=MARKUP, longest=MARKUP)]
        tab = visit(stand_in.url)
        tab.get_by_role("button", name=MARKUP).first.click()
        tab.get_by_role("button", name="Close").first.click()
        tab.get_by_role("link", name="Requests").click()
        tab.get_by_role("row", name="r1").wait_for()
        tab.get_by_role("button", name="Chat", exact=True).click()
        assert tab.evaluate("window.hacked === undefined")
        assert tab.evaluate("document.querySelectorAll('main img, main script, dialog img, dialog script').length") == 0


def test_short_parts_before_decode_are_drawn_a_second_time_enlarged(visit: Visit) -> None:
    pull = {"num_pages": 3, "num_bytes": 442_000, "moving_s": 0.0002, "had_pages": 5}
    parts = [
        {"name": "dispatch", "start_s": 0.0, "seconds": 0.01},
        {"name": "prefill", "start_s": 0.01, "seconds": 0.02},
        {"name": "pull", "start_s": 0.03, "seconds": 0.01, "way": "through shared memory", **pull},
        {"name": "decode", "start_s": 0.04, "seconds": 3.96},
    ]
    with StandIn(snapshot(PAIR, [])) as stand_in:
        stand_in.lines = [finished("r1")]
        stand_in.trace = {**finished("r1"), "total_s": 4.0, "ttft_s": 0.03}
        stand_in.trace["choices"] = [{"index": 0, "num_tokens": 20, "parts": parts}]
        tab = visit(stand_in.url)
        tab.get_by_role("link", name="Requests").click()
        tab.locator("#request-rows button").click()
        moved = "3 pages, 442 kB through shared memory, 0.2 ms under way without the checks"
        tab.get_by_text(f"{moved}; 5 pages were in its cache already").wait_for()
        assert tab.locator(".spans .axis .end").all_inner_texts() == ["4.00 s", "40 ms"]
        drawn = "(bars) => bars.map((bar) => `${bar.className} ${bar.style.width}`)"
        small = ["waits 0.25%", "prefills 0.5%", "hands 0.25%"]
        wide = ["waits 25%", "prefills 50%", "hands 25%"]
        assert tab.locator(".spans .track i").evaluate_all(drawn) == [*small, "decodes 99%", *wide]


def test_a_hidden_tab_closes_its_stream_and_opens_it_when_it_is_shown(visit: Visit) -> None:
    with StandIn(snapshot(PAIR, [])) as stand_in:
        tab = visit(stand_in.url)
        tab.get_by_text("Live", exact=True).wait_for()
        assert stand_in.num_streams == 1
        for is_hidden, num_streams in ((True, 0), (False, 1)):
            tab.evaluate(
                "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
                " document.dispatchEvent(new Event('visibilitychange')); }",
                is_hidden,
            )
            wait_for(lambda count=num_streams: stand_in.num_streams == count)
        tab.get_by_text("Live", exact=True).wait_for()


def test_memory_stays_flat_over_ten_thousand_requests(visit: Visit) -> None:
    """Requests run, end and are listed, a thousand per second. The tab keeps what the router keeps."""
    now = snapshot(PAIR, [])
    with StandIn(now, interval_s=0.1) as stand_in:

        def each() -> None:
            done = now["totals"]["requests"]["done"] + 100
            now["totals"] = {**now["totals"], "requests": {**now["totals"]["requests"], "done": done}}
            now["requests"] = [request(f"r{number}") for number in range(done, done + 200)]
            stand_in.lines = [finished(f"r{number}") for number in range(done - 1, max(-1, done - 1025), -1)]

        stand_in.each = each
        tab = visit(stand_in.url)
        tab.get_by_role("link", name="Requests").click()
        session = tab.context.new_cdp_session(tab)

        def heap_after(num_done: int) -> tuple[int, int]:
            wait_for(lambda: now["totals"]["requests"]["done"] >= num_done, 60.0)
            tab.get_by_text("running, 1,024 finished").wait_for()
            return min(read() for _ in range(6)), session.send("Memory.getDOMCounters")["nodes"]

        def read() -> int:
            """Return the bytes in use. The least of several readings is that without a list that was just read."""
            session.send("HeapProfiler.collectGarbage")
            tab.evaluate("new Promise(requestAnimationFrame)")
            return session.send("Runtime.getHeapUsage")["usedSize"]

        before, nodes_before = heap_after(5_000)
        after, nodes_after = heap_after(15_000)
        assert after - before < 1_500_000, (before, after)
        # rows of two snapshots may be here at once, 22 nodes each; ten thousand rows would be 220,000 nodes
        assert nodes_after - nodes_before < 10_000, (nodes_before, nodes_after)
        assert tab.locator("#request-rows tr").count() == 100
