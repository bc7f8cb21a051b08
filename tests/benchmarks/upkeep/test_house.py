"""The counts of a checkout: circles of imports and reading lists."""

from __future__ import annotations

from pathlib import Path

from house import import_circles, reading_lists


def test_circles_are_found_through_packages_and_types(tmp_path: Path) -> None:
    sources = {
        "router/__init__.py": "",
        "router/a.py": "from .http.b import B\n",
        "router/http/__init__.py": "",
        "router/http/b.py": "if TYPE_CHECKING:\n    from .. import c\n",
        "router/c.py": "def late():\n    from . import a\n",
        "router/d.py": "from .a import A\nfrom ..metadata import errors\n",
        "metadata/errors.py": "import router.d\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert import_circles(tmp_path, [tmp_path / name for name in sources]) == [
        ["router.a", "router.c", "router.http.b"]
    ]


def test_a_page_has_the_reading_lists_of_its_blocks() -> None:
    page = (
        "```house\n box 1\n   1  router/a.py   reads\n  12  router/b.py   writes\n```\n```files who\nx.py\ny.py\n```\n"
    )
    assert list(reading_lists(page)) == [
        ("life of a request", ["router/a.py", "router/b.py"]),
        ("who", ["x.py", "y.py"]),
    ]
