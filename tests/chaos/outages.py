"""Times in which no node of a role was alive: only then, and only when one lasts, may a request end for want of one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rig import role_of

from baton.router.config import RouterConfig

NODE_WAIT_S = RouterConfig().node_wait_s  # as long the router waits for a node of a role that has none
_NONE_LEFT = re.compile(r"no (\w+)(?: and no (\w+))? node is left|has no (\w+) node")


class Outages:
    """Looks now and then at which nodes can serve."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self.longest: dict[str, float] = {}  # seconds, by role

    def look(self, serving: Mapping[str, bool], now: float) -> list[str]:
        """Takes note of who serves, by name; returns the roles of which nobody does."""
        roles = {role_of(name) for name in serving}
        alive = {role_of(name) for name, serves in serving.items() if serves}
        for role in roles & alive:
            self._since.pop(role, None)
        for role in roles - alive:
            seconds = now - self._since.setdefault(role, now)
            self.longest[role] = max(self.longest.get(role, 0.0), seconds)
        return sorted(roles - alive)

    def excuse(self, words: str) -> bool:
        """Whether an error says that a role has no node, and it had none for as long as one is waited for."""
        found = _NONE_LEFT.search(words)
        roles = [role for role in found.groups() if role] if found else []
        return bool(roles) and any(self.longest.get(role, 0.0) >= 0.9 * NODE_WAIT_S for role in roles)
