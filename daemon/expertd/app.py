"""Build the parts, run until a signal, drain, clean up, exit with a meaning. Nothing imports this."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import signal
import sys
import time

import psutil
import uvloop

from expertd.attach import AttachServer, unlink_quietly
from expertd.cache.budget import SystemMemory, parse_budget
from expertd.cache.ledger import Ledger
from expertd.config import DaemonConfig
from expertd.handlers import Handlers
from expertd.models import ModelOptions, Models
from expertd.server import Router
from expertd.snapshot import Daemon
from expertd.sockets import RunLock, bind_listener, prepare_run_dir
from expertd_protocol.endpoints import Endpoints
from expertd_protocol.errors import BadConfig

log = logging.getLogger(__name__)

#: libzmq aborts the process when accept runs out of descriptors, so there must be many.
NOFILE_WANTED = 65_536
#: A reader thread that has work waits so long for a busy loop to let go of Python's lock; the default
#: of 5 ms is longer than a read takes.
SWITCH_SECONDS = 0.0005
#: Connections beside the workers: stats, ps, top.
ADMIN_CONNECTIONS = 64
#: What the daemon keeps for itself, slabs and model files included, and what one connection may take:
#: both sockets, a page, a handle on the process.
OWN_DESCRIPTORS, CONNECTION_DESCRIPTORS = 128, 4


def run(config: DaemonConfig) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline.

    Raises:
        ExpertdError: the start failed; `exit_code` of the error says how to exit.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_descriptor_limit()
    limit = connections_that_fit(config.max_sessions + ADMIN_CONNECTIONS)
    memory = psutil.virtual_memory()
    budget = parse_budget(config.budget, SystemMemory(memory.total, memory.available))
    endpoints = prepare_run_dir(config.run_dir)
    with contextlib.closing(RunLock(endpoints.lock)) as lock:
        uvloop.run(_serve(config, endpoints, budget, limit, lock))


async def _serve(
    config: DaemonConfig,
    endpoints: Endpoints,
    budget: int,
    max_connections: int,
    lock: RunLock,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.lifeline_fd is not None:
        watch_lifeline(loop, config.lifeline_fd, stop)

    started = time.monotonic()
    daemon = Daemon(os.getpid(), secrets.randbits(62), endpoints, started)
    ledger = Ledger(budget)
    options = ModelOptions(
        read_mode=config.read_mode,
        threads=config.reader_threads,
        grace_seconds=config.grace_ms / 1000,
        max_in_flight=config.max_in_flight,
        poison_free_slots=config.poison_free_slots,
    )
    models = Models(
        ledger,
        options,
        loop,
        lambda model, ended: handlers.on_reads_ended(model, ended),
    )
    handlers = Handlers(
        loop,
        daemon,
        ledger,
        models,
        max_sessions=config.max_sessions,
        max_in_flight=config.max_in_flight,
        warm=config.warm,
        prefetch=config.prefetch == "auto",
    )
    router = handlers.router = Router(loop, endpoints, handlers.on_message)
    listener = bind_listener(endpoints.attach)
    attach = AttachServer(loop, listener, handlers.serve, max_connections)
    log.info("started pid=%d budget_bytes=%d run_dir=%s", daemon.pid, budget, endpoints.run_dir)
    try:
        await stop.wait()
        log.info("draining deadline_seconds=%.1f", config.drain_seconds)
        await handlers.drain(config.drain_seconds)
    finally:
        if lock.is_in_place():
            unlink_quietly(endpoints.attach)
        await asyncio.to_thread(models.close, 1.0)
        await attach.close()
        router.close()
        if lock.is_in_place():
            unlink_quietly(endpoints.router)
        log.info("stopped uptime_seconds=%.1f", time.monotonic() - started)


def watch_lifeline(loop: asyncio.AbstractEventLoop, fd: int, stop: asyncio.Event) -> None:
    """Set `stop` when the other end of the pipe `fd` is closed, however its owner ended."""

    def readable() -> None:
        if os.read(fd, 1024):
            return
        loop.remove_reader(fd)
        os.close(fd)
        stop.set()

    os.set_inheritable(fd, False)
    loop.add_reader(fd, readable)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files as far as the hard limit allows (launchd starts with 256)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # not run on macOS yet; above OPEN_MAX setrlimit is EINVAL there
    most = 10_240 if sys.platform == "darwin" else NOFILE_WANTED
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_that_fit(wanted: int) -> int:
    """Return how many connections the limit of open files allows, at most `wanted`.

    Raises:
        BadConfig: not even one.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    fit = (soft - OWN_DESCRIPTORS) // CONNECTION_DESCRIPTORS
    if fit < 1:
        raise BadConfig(
            f"the limit of open files is {soft}, expertd needs "
            f"{OWN_DESCRIPTORS + CONNECTION_DESCRIPTORS * wanted} for {wanted} connections; "
            "raise it (ulimit -n, or LimitNOFILE of the unit)"
        )
    if fit < wanted:
        log.warning("few_descriptors limit=%d connections=%d wanted=%d", soft, fit, wanted)
    return min(fit, wanted)
