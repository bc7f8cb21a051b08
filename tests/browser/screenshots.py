"""Write the screenshots of docs/: start `baton up` with the demo model, let some requests run, and take pictures.

    python tests/browser/screenshots.py [--into docs]

It needs Chromium on PATH and playwright (pip install -e '.[browser]').
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from conftest import FLAGS
from playwright.sync_api import Page, sync_playwright

NUM_CLIENTS = 5
SIZE = {"width": 1280, "height": 830}
WARM_S = 15  # the first steps are slower
WATCH_S = 45  # so that the charts have something to show
TOPICS = (
    "import os\nimport sys\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n        ",
    "def walk(tree):\n    for node in tree:\n        if isinstance(node, list):\n            yield from walk(node)\n",
)
CHAT = {"temperature": "0.3", "seed": "1", "max_tokens": "160"}
CHAT_TEXT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
# Whether an answer streams, much of it is here, and the message is still in view.
STREAMS = """() => {
  const log = document.querySelector("#transcript"), stop = document.querySelector("#chat-stop");
  return !stop.hidden && log.scrollTop === 0 && log.innerText.length > 300;
}"""
# Whether pages are drawn between the nodes, and decode nodes have requests.
PAGES_MOVE = """() => {
  const canvas = document.querySelector("#dots"), link = document.querySelector("#link-pages").getBoundingClientRect();
  const place = canvas.getBoundingClientRect(), scale = canvas.width / place.width;
  const area = [link.x + 40 - place.x, link.y - place.y, link.width - 80, link.height].map((side) => side * scale);
  const numAt = [...document.querySelectorAll(".role.decode .lane b")].map((number) => Number(number.textContent));
  return Math.min(...numAt) > 0 && canvas.getContext("2d").getImageData(...area).data.some((value) => value > 0);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[2] / "docs")
    into = parser.parse_args().into
    flags = ["--port", "0", "--decode", "2", "--num-pages", "512", "--no-draft-adaptive"]
    command = [sys.executable, "-P", "-m", "baton.deploy.cli", "up", *flags]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = read_url(up)
        wait_ready(url)
        for seed in range(NUM_CLIENTS):
            threading.Thread(target=send_for_ever, args=(url, seed), daemon=True).start()
        time.sleep(WARM_S)
        with sync_playwright() as running:
            browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport=SIZE, color_scheme=scheme, locale="en-GB")
                take(context.new_page(), url, scheme, into)
                context.close()
            browser.close()
    finally:
        up.terminate()
        up.wait(30)


def take(tab: Page, url: str, scheme: str, into: Path) -> None:
    """Take the pictures of one colour scheme. The dark one is of the system alone."""
    tab.goto(url)
    tab.get_by_role("button", name="decode-1").wait_for()
    tab.wait_for_timeout(1000 * (WATCH_S if scheme == "light" else 11))
    take_with_pages_on_their_way(tab, into / f"page-{scheme}.png")
    if scheme == "dark":
        return
    tab.get_by_role("link", name="Charts").click()
    tab.wait_for_timeout(1500)
    tab.screenshot(path=into / "page-charts.png")
    tab.get_by_role("link", name="Requests").click()
    tab.locator("#request-rows tr:not(.is-live) button").first.click()
    tab.locator(".spans").first.wait_for()
    tab.set_viewport_size({**SIZE, "height": 900})
    tab.screenshot(path=into / "page-request.png")
    tab.set_viewport_size(SIZE)
    tab.keyboard.press("Escape")
    tab.get_by_role("link", name="System").click()
    tab.get_by_role("button", name="Chat", exact=True).click()
    tab.get_by_label("Colour drafted tokens").check()
    tab.get_by_text("Settings").click()
    tab.get_by_label("Send as").select_option("completion")
    for name, value in CHAT.items():
        tab.get_by_label(name).fill(value)
    tab.get_by_text("Settings").click()
    take_while_it_streams(tab, into / "page-chat.png")


def take_while_it_streams(tab: Page, path: Path) -> None:
    """Take a picture of the chat while an answer arrives. After many attempts, any picture will do."""
    for _ in range(20):
        tab.get_by_role("button", name="Clear").click()
        tab.get_by_label("Message", exact=True).fill(CHAT_TEXT)
        tab.keyboard.press("Enter")
        tab.evaluate("scrollTo(0, 0)")
        for _ in range(200):
            if tab.evaluate(STREAMS):
                break
            tab.wait_for_timeout(20)
        tab.screenshot(path=path)
        is_streaming = tab.get_by_role("button", name="Stop", exact=True).is_visible()
        tab.get_by_role("button", name="Where its time went").wait_for(timeout=60_000)
        if is_streaming:
            return


def take_with_pages_on_their_way(tab: Page, path: Path) -> None:
    """Take a picture with pages between the nodes. After many attempts, any picture will do."""
    for _ in range(40):
        for _ in range(100):
            if tab.evaluate(PAGES_MOVE):
                break
            tab.wait_for_timeout(30)
        tab.screenshot(path=path)
        if tab.evaluate(PAGES_MOVE):
            return


def read_url(up: subprocess.Popen[str]) -> str:
    """Return the address that `baton up` prints, and read on so that it never waits for its reader."""
    assert up.stdout is not None
    for line in up.stdout:
        if "http://127.0.0.1:" in line:
            threading.Thread(target=up.stdout.read, daemon=True).start()
            return "http://" + line.partition("http://")[2].split(",")[0].split()[0]
    raise SystemExit("baton up printed no address")


def wait_ready(url: str) -> None:
    """Wait until the router takes requests."""
    while ask(url, "GET", "/ready") != 200:
        time.sleep(0.5)


def send_for_ever(url: str, seed: int) -> None:
    """Send one request after the other. Some repeat a prompt, so the prefix cache has hits."""
    chosen = random.Random(seed)
    while True:
        prompt = "".join(chosen.choice(TOPICS) for _ in range(chosen.randint(1, 12)))
        body = {"model": "demo", "prompt": prompt, "max_tokens": chosen.randint(300, 700), "temperature": 0.7}
        ask(url, "POST", "/v1/completions", {**body, "ignore_eos": True})
        time.sleep(chosen.random())


def ask(url: str, method: str, path: str, body: object = None) -> int:
    """Send a request, read its answer, and return the status; 0 if nobody answers."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except OSError:
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    main()
