"""Figures of load on a running server."""
