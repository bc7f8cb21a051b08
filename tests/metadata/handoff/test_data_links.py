"""A node's ends of data links, taken together."""

from __future__ import annotations

from handoff_nodes import make_client, make_server, unit

from baton.metadata.bus.membership import DataLinks


def test_a_node_wakes_for_both_ends_and_closes_both() -> None:
    (server, source), (client, target) = make_server(lease_s=5.0), make_client()
    links = DataLinks(server, None, client)
    try:
        assert links.wait_s() is None
        server.open(unit(), 1)
        wait_s = links.wait_s()
        assert wait_s is not None and 0 < wait_s <= 5.0
        assert links.sockets() == [*server.sockets(), *client.sockets()] != []
    finally:
        links.close()
        for pool in (*source, *target):
            pool.close()
    assert server.socket.closed
