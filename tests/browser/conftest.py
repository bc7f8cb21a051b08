"""A headless Chromium for the tests of the page. Without it or its driver they are skipped, with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Visit = Callable[..., Any]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start a Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium on PATH, such as Debian's package chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """Open addresses in tabs of their own. At the end, no tab may have written an error or a warning to its console, or
    have broken the Content-Security-Policy. `may_fail`: statuses of answers that the test provokes. Chromium also
    writes a line when a server goes away, which is no fault of the page."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_tab(url: str, *, may_fail: tuple[int, ...] = (), **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, "locale": "en-GB", **options})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20_000)

        def heard(message: Any) -> None:
            is_provoked = any(f"status of {each} " in message.text for each in may_fail)
            is_gone = "net::ERR_" in message.text
            if message.type in ("error", "warning") and not is_provoked and not is_gone:
                problems.append(f"{message.type}: {message.text}")

        tab.on("console", heard)
        tab.on("pageerror", lambda error: problems.append(f"exception: {error}"))
        tab.add_init_script(
            "document.addEventListener('securitypolicyviolation', (event) => "
            "console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`))"
        )
        tab.goto(url)
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert not problems, problems
