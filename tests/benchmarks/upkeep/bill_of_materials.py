"""The bill of materials of a release, in CycloneDX: the pinned packages, and those whose files Baton holds."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

TOOLS = "# What tests and tools need besides."  # the line of constraints.txt above the packages that no user needs
_VENDORED = re.compile(r"(\S+) (\S+), (\S+) licence .* from the npm package (\S+):")


def bill_of_materials(root: Path, epoch: int) -> str:
    """Return the document as JSON. `epoch`: the time of the release, in seconds since 1970."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    product = _component("application", "pypi", project["name"], project["version"])
    product["licenses"] = [{"expression": project["license"]}]
    components = [*_pinned(root / "constraints.txt"), *_vendored(root)]
    torch = next(each["bom-ref"] for each in components if each["name"] == "torch")
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": datetime.fromtimestamp(epoch, UTC).isoformat(), "component": product},
        "components": components,
        "compositions": [{"aggregate": "incomplete", "assemblies": [torch]}],  # its CUDA packages are not pinned
    }
    bill["serialNumber"] = f"urn:uuid:{uuid5(NAMESPACE_URL, json.dumps(bill))}"
    return json.dumps(bill, indent=2) + "\n"


def _pinned(constraints: Path) -> Iterator[dict[str, Any]]:
    """Yield the packages of constraints.txt. Those of tests and tools are listed as excluded from the product."""
    used, found, tools = constraints.read_text(encoding="utf-8").partition(TOOLS)
    assert found, f"{constraints} has no line {TOOLS!r}"
    for scope, lines in (("required", used), ("excluded", tools)):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", lines, re.M):
            kind = re.sub(r"[-_.]+", "-", name).lower()  # names that an index holds equal
            yield _component("library", "pypi", kind, version) | {"scope": scope}


def _vendored(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the packages whose files are part of the product, as README.txt beside them names them."""
    for readme in sorted(root.glob("router/**/vendor/*/README.txt")):
        match = _VENDORED.match(readme.read_text(encoding="utf-8"))
        assert match is not None, f"{readme} does not begin with name, version, licence and source of the package"
        _, version, licence, package = match.groups()
        yield _component("library", "npm", package, version) | {
            "scope": "required",
            "licenses": [{"license": {"id": licence}}],
        }


def _component(kind: str, index: str, name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:{index}/{name}@{version}"
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}
