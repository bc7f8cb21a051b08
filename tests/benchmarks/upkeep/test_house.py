"""The counts of a checkout: circles of imports and reading lists."""

from __future__ import annotations

from pathlib import Path

from house import MAX_LINES, import_circles, long_functions, num_statements, reading_lists


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


def test_statements_and_long_functions_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""What."""\n\n\ndef f():\n    a = 1; b = 2\n    if a:\n        return b\n')
    assert num_statements(path) == 6 and list(long_functions(tmp_path, [path])) == []
    path.write_text("def f():\n" + MAX_LINES * "    a = (\n        1\n    )\n")
    assert list(long_functions(tmp_path, [path])) == [(3 * MAX_LINES + 1, "a.py:1 f")]
    assert num_statements(path) == MAX_LINES + 1


def test_a_page_has_the_reading_lists_of_its_blocks() -> None:
    page = (
        "```house\n box 1\n   1  router/a.py   reads\n  12  router/b.py   writes\n```\n```files who\nx.py\ny.py\n```\n"
    )
    assert list(reading_lists(page)) == [
        ("life of a request", ["router/a.py", "router/b.py"]),
        ("who", ["x.py", "y.py"]),
    ]
