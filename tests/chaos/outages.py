"""Outages: times in which a role had no node alive. A request may fail for lack of a node only in a long outage."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rig import role_of

from baton.router.config import RouterConfig

NODE_WAIT_S = RouterConfig().node_wait_s  # how long the router waits for a node if a role has none
_NONE_LEFT = re.compile(r"no (\w+)(?: and no (\w+))? node is left|has no (\w+) node")


class Outages:
    """Records for how long each role was without a node."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self.longest: dict[str, float] = {}  # seconds, by role

    def look(self, serving: Mapping[str, bool], now: float) -> list[str]:
        """Record which nodes serve now, by name. Returns the roles without one."""
        roles = {role_of(name) for name in serving}
        alive = {role_of(name) for name, serves in serving.items() if serves}
        for role in roles & alive:
            self._since.pop(role, None)
        for role in roles - alive:
            seconds = now - self._since.setdefault(role, now)
            self.longest[role] = max(self.longest.get(role, 0.0), seconds)
        return sorted(roles - alive)

    def excuse(self, words: str) -> bool:
        """Return whether the error blames a role without nodes and the role's outage was long enough to cause it."""
        found = _NONE_LEFT.search(words)
        roles = [role for role in found.groups() if role] if found else []
        return bool(roles) and any(self.longest.get(role, 0.0) >= 0.9 * NODE_WAIT_S for role in roles)
