"""The page's files, without a browser: nothing inline, nothing from another host, no way to make markup of text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.router.http.page.files import STATIC

OWN = sorted(path for path in Path(STATIC).glob("*.js"))
INDEX = (STATIC / "index.html").read_text()
FORBIDDEN = (
    "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|createContextualFragment|srcdoc|eval\\(|"
    "new Function|localStorage|sessionStorage|indexedDB|document.cookie|https?://"
)


def test_the_document_has_no_inline_code_or_style_and_loads_its_own_files_alone() -> None:
    assert re.search(r"<style|\sstyle=|\son\w+=|javascript:|https?://", INDEX) is None
    assert re.findall(r"<script[^>]*>[^<]", INDEX) == []
    named = re.findall(r'(?:href|src)="([^"#]+)"', INDEX)
    assert named
    for name in named:
        assert (STATIC / name.removeprefix("page/")).is_file(), name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_module_makes_no_markup_of_text_stores_nothing_and_imports_what_exists(path: Path) -> None:
    text = path.read_text()
    found = [line for line in re.findall(rf".*(?:{FORBIDDEN}).*", text) if "www.w3.org/2000/svg" not in line]
    assert found == []
    for name in re.findall(r'(?:from|import) "([^"]+)"', text):
        assert (path.parent / name).is_file(), name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_every_element_that_a_module_asks_for_is_in_the_document(path: Path) -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', INDEX))
    assert set(re.findall(r'byId\("([^"]+)"\)', path.read_text())) <= ids
