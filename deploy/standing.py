"""State of the router that `baton up` started: joined nodes, draining nodes, and whether it serves."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ..metadata.errors import BatonError
from .client import Client

_DRAINING = re.compile(r"^baton_node_draining\{(.*)\} (\S+)$", re.MULTILINE)
_NODE = re.compile(r'(?:^|,)node="([^"]*)"')


class Standing(NamedTuple):
    """The last answers of the router."""

    answers: bool
    joined: frozenset[str] = frozenset()
    draining: tuple[str, ...] = ()  # in words, one each
    trouble: str | None = None  # why nothing is served


def look(client: Client) -> Standing:
    """Asks the router. Nobody listening, or no answer in time, is an answer as well."""
    try:
        found = _DRAINING.findall(client.metrics())
        status, body = client.ready()
    except BatonError:
        return Standing(answers=False)
    joined: set[str] = set()
    draining: set[str] = set()
    for labels, value in found:
        node = _NODE.search(labels)
        if node is not None:
            joined.add(node[1])
            if float(value):
                draining.add(node[1])
    try:
        answer = json.loads(body)
        if status != 200:
            return Standing(True, frozenset(joined), (), str(answer["error"]["message"]))
        words = {item["node"]: item["words"] for item in answer.get("degraded", [])}
    except (ValueError, KeyError, TypeError):  # no router of ours
        return Standing(True, frozenset(joined))
    return Standing(True, frozenset(joined), tuple(words.get(name, f"{name} is draining") for name in sorted(draining)))


class Teller:
    """Turns what changed between two looks into lines for the terminal."""

    def __init__(self) -> None:
        self._last = Standing(answers=True)

    def lines(self, now: Standing) -> list[str]:
        """Return the news since the last look. The launcher reports a router that does not answer."""
        if not now.answers:
            return []
        last, self._last = self._last, now
        lines: list[str] = []
        if now.trouble is not None and now.trouble != last.trouble:
            lines.append(f"nothing is served now: {now.trouble}")
        elif now.trouble is None:
            if last.trouble is not None:
                lines.append("requests are served again")
            lines += [words for words in now.draining if words not in last.draining]
            if last.draining and not now.draining:
                lines.append("no node is draining any more")
        return lines
