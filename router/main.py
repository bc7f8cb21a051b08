"""The router process: hub for nodes and HTTP server for clients in one event loop, until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import time
from functools import partial
from ipaddress import ip_address

import uvloop
from aiohttp import web

from ..metadata.bus.allow_list import ROUTER, ROUTER_PREFIX, is_router
from ..metadata.bus.curve import KeyPair
from ..metadata.bus.descriptors import Descriptors, NodePort, raise_limit
from ..metadata.bus.hub import Hub
from ..metadata.bus.sockets import new_epoch
from ..metadata.errors import ConfigError
from ..metadata.garbage import Garbage
from ..metadata.service_manager import has_manager, notify
from .config import RouterConfig
from .dispatching.runner import RunningDispatcher
from .figures.export import TraceExport, configured_export
from .figures.metrics import Metrics
from .http.server.api import Api
from .http.server.app import application, ops_application
from .http.server.connection import KEEP_ALIVE_S, ClientErrorFilter, Connection, HttpListener
from .text.tokenizer import start_threads

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger("aiohttp.server")
_http_logger.addFilter(ClientErrorFilter())
_LOOK_S = 0.5  # between two looks whether keys have changed, and garbage can be collected


class Router:
    """A running router. `start`, then `stop`; both belong to one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.metrics_names)
        self.dispatcher = RunningDispatcher(config, new_epoch(), self.metrics)
        self.metrics.watch_nodes(self.dispatcher.registry, lambda: self.dispatcher.queues.num_waiting)
        self._max_descriptors = raise_limit()
        self.api = Api(config, self.dispatcher, self.metrics, Descriptors(self._max_descriptors))
        self.metrics.watch_service(
            self.dispatcher.registry,
            self.dispatcher.queues,
            self.dispatcher.requests,
            lambda: self.api.why_not_ready() is None and not self.api.is_draining,
        )
        self._tracing: TraceExport | None = None
        self._hub: Hub | None = None
        self._runner: web.AppRunner | None = None
        self._http: HttpListener | None = None
        self._ops: web.AppRunner | None = None
        self.ops_url = ""
        self.url = ""
        self.node_address = ""

    async def start(self) -> None:
        """Listen for nodes and clients. Raises ConfigError for an address that is taken or not allowed."""
        config = self.config
        await start_threads()
        keys = KeyPair.configured(config)
        if keys is not None and keys.name is not None and not is_router(keys.name):
            raise ConfigError(
                f"--keys {config.keys}: allow-list {config.allow_list} calls this key {keys.name!r}; a router's is "
                f"called {ROUTER!r} or {ROUTER_PREFIX}NAME (`baton keys --name {ROUTER} FILE` makes one)"
            )
        self._tracing = configured_export(os.environ)
        self.dispatcher.on_over = self._tracing.over if self._tracing is not None else None
        self._hub = Hub(
            config.node_address,
            self.dispatcher.epoch,
            keys,
            self.dispatcher.on_message,
            self.dispatcher.on_connection_lost,
            NodePort(self._max_descriptors),
        )
        self.node_address = self._hub.address
        self.dispatcher.start(self._hub)
        self._hub.start()
        self._runner = web.AppRunner(
            application(self.api),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            logger=_http_logger,
        )
        await self._runner.setup()
        try:
            self._http = await self._listen(self._runner)
        except OSError as error:
            await self.stop()
            raise ConfigError(_cannot_serve("--host", "--port", config.host, config.port, error)) from error
        addresses = [listening.getsockname() for listening in self._http.sockets]
        host, port = addresses[0][:2]
        self.api.access.is_local = all(ip_address(address[0]).is_loopback for address in addresses)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("serving HTTP on %s, nodes on %s", self.url, self.node_address)
        await self._listen_for_operators()
        if not self.api.access.is_local and not self.api.access.has_api_keys:
            logger.warning("no --api-key is set: whoever reaches %s can use it", self.url)
        if not self.api.access.is_local and not self.api.access.has_admin_key:
            logger.warning("no --admin-key is set: /admin and /debug are closed, since %s is not on loopback", self.url)

    async def drain(self) -> None:
        """Take no new requests, and wait for running ones up to drain_timeout_s."""
        self.api.drain()
        notify("stopping", self.words, limit_s=self.config.drain_timeout_s)
        deadline = time.monotonic() + self.config.drain_timeout_s
        while self._num_requests() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._num_requests():
            logger.warning("%d requests did not finish in time", self._num_requests())

    async def stop(self) -> None:
        """End all requests and close all sockets."""
        self.dispatcher.close()
        self.api.close()
        await asyncio.sleep(0)  # streams write their last event
        if self._http is not None:
            self._http.close()
        for runner in (self._runner, self._ops):
            if runner is not None:
                await runner.cleanup()
        if self._hub is not None:
            self._hub.close()
        if self._tracing is not None:
            await self._tracing.close()

    async def _listen_for_operators(self) -> None:
        """Serve --ops-address, if it is set. Raises ConfigError for an address that is taken."""
        address = self.config.ops
        if address is None:
            return
        self._ops = web.AppRunner(ops_application(self.api, address), access_log=None, shutdown_timeout=1.0)
        await self._ops.setup()
        try:
            await web.TCPSite(self._ops, address.host, address.port).start()
        except OSError as error:
            await self.stop()
            raise ConfigError(f"ops_address: cannot serve on {self.config.ops_address}: {error.strerror}") from error
        host, port = self._ops.addresses[0][:2]
        self.ops_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("serving /metrics, /health and /ready without a key on %s", self.ops_url)

    async def _listen(self, runner: web.AppRunner) -> HttpListener:
        """Do what web.TCPSite does, with our own class of connections."""
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None, "the runner has been set up"
        factory = partial(
            Connection,
            server,
            self.api.descriptors,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,
            logger=_http_logger,
            auto_decompress=False,  # bodies.py does it: aiohttp serves what libraries happen to be installed
        )
        listener = HttpListener(factory, self.api.descriptors)
        await listener.open(self.config.host, self.config.port)
        return listener

    def reload(self) -> None:
        """Read the file of API keys now. What is wrong with it is logged."""
        logger.info("received SIGHUP: reading api_keys %s", self.config.api_keys or "again, but none is set")
        self.api.access.look(force=True)

    @property
    def words(self) -> str:
        """A line for the service manager: whether the router serves, and what is missing."""
        if self.api.is_draining:
            return f"takes no new requests; {self._num_requests()} finish"
        reasons = (self.api.why_not_ready() or "ready", self.api.access.complaint)
        return "; ".join(filter(None, (f"serves {self.url}", self.api.joined_words, *reasons)))

    @property
    def is_idle(self) -> bool:
        """Whether no client waits for an answer."""
        return not self._num_requests()

    def _num_requests(self) -> int:
        return sum(not request.is_canary for request in self.dispatcher.requests.values())


def _cannot_serve(host_flag: str, port_flag: str, host: str, port: int, error: OSError) -> str:
    mends = {
        errno.EADDRINUSE: f"; another process listens there: use another {port_flag}, or stop it",
        errno.EADDRNOTAVAIL: f"; this host has no such address: give one of its own by {host_flag}, or 0.0.0.0 for all",
        errno.EACCES: f"; this user may not: use a {port_flag} of 1024 or above",
    }
    why = os.strerror(error.errno) if error.errno in mends else error.strerror
    return f"cannot serve HTTP on {host}:{port}: {why}{mends.get(error.errno or 0, '')}"


def run(config: RouterConfig) -> int:
    """Run a router until SIGTERM or SIGINT; a second signal ends it at once. Returns the exit status.

    SIGHUP reads the API keys again; in a router on a terminal it means that the terminal has closed, and ends it.
    Raises ConfigError if it cannot start.
    """
    return uvloop.run(_main(config))


async def _main(config: RouterConfig) -> int:
    router = Router(config)
    stop = asyncio.Event()
    now = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            now.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if not sys.stderr.isatty():
        loop.add_signal_handler(signal.SIGHUP, router.reload)
    await router.start()
    notify("ready", router.words)
    upkeep = asyncio.create_task(_keep_up(Garbage(), router))
    await stop.wait()
    logger.info("shutting down")
    drain = asyncio.create_task(router.drain())
    at_once = asyncio.create_task(now.wait())
    await asyncio.wait((drain, at_once), return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, at_once, upkeep):
        task.cancel()
    await router.stop()
    return 0


async def _keep_up(garbage: Garbage, router: Router) -> None:
    has_listener = has_manager()
    while True:
        await asyncio.sleep(_LOOK_S)
        router.api.access.look()
        for tenant in router.api.access.take_removed():
            logger.info("tenant %s has no key any more: its cached pages are removed", tenant)
            router.api.dispatcher.forget_salts(router.api.salts.prefix(tenant))
        if has_listener:
            notify("alive", router.words)
        garbage.look(time.monotonic(), is_idle=router.is_idle)
