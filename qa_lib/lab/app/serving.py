"""Serve the app's page: its socket, its connections, and how long a request may take to arrive."""

import asyncio
import signal
import socket
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from qa_lib.errors import UserError
from qa_lib.lab.app import gate

# Connections that have not sent a whole request; the next one takes the place of the oldest.
MAX_PENDING = 256
MAX_CONNECTIONS = 600  # in all, below the 1,024 open files that many systems allow
MAX_HEAD = 16_384  # bytes of a head that is not whole yet
GRACE_SECONDS = 3  # for requests in work when a signal comes


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError for an empty host and a port that is taken."""
    if not host.strip():
        raise UserError(
            "--host is empty, which would listen to everybody: "
            "leave it out, or write 0.0.0.0 to mean that"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; --port takes another"
        ) from None
    # Without it answers would wait 40 ms for the asker's delayed ACK; asyncio sets it for sockets
    # of its own only.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve until a signal comes, and then give requests in work GRACE_SECONDS."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=GRACE_SECONDS,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    # SIGHUP ends the app as Ctrl-C does, unless it is ignored: `nohup` has it so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        uvicorn.server.HANDLED_SIGNALS = {*uvicorn.server.HANDLED_SIGNALS, signal.SIGHUP}
    uvicorn.Server(config).run(sockets=[listener])


class Connection(H11Protocol):
    """A connection on which each request has gate.ARRIVAL_SECONDS to arrive whole.

    The timer of uvicorn itself ends at the first byte. Where more than MAX_PENDING connections wait
    for a request, the oldest is closed: slow senders push out each other, and nobody else waits.
    """

    # The connections that wait for a request, the oldest first, and the timers that close them.
    pending: ClassVar[dict["Connection", asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch(self) -> None:
        """Start the timer of a request that has not arrived, and stop that of one that has.

        A timer that runs is left alone, whatever arrives.
        """
        if self._has_whole_request():
            self._stop_timer()
            return
        if self in self.pending or self.transport.is_closing():
            return
        self.pending[self] = self.loop.call_later(gate.ARRIVAL_SECONDS, self.transport.close)
        if len(self.pending) > MAX_PENDING:
            oldest = next(iter(self.pending))
            oldest._stop_timer()
            oldest.transport.close()

    def _has_whole_request(self) -> bool:
        """Tell whether a request has arrived whole and is not answered yet.

        `cycle` is uvicorn's name for a request and its response.
        """
        cycle = self.cycle
        return bool(cycle) and not cycle.response_complete and not cycle.more_body

    def _stop_timer(self) -> None:
        timer = self.pending.pop(self, None)
        if timer is not None:
            timer.cancel()
