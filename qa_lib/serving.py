"""Serve the app's page: which requests are let in, how large they are, and in what time they have to arrive."""

import asyncio
import ipaddress
import re
import signal
import socket
from typing import ClassVar

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from qa_lib.errors import UserError

SECONDS = 10  # in which a request, head and body, has to arrive
PENDING = (
    256  # connections that have not sent a whole request; the next takes the place of the oldest
)
CONNECTIONS = 600  # in all, below the 1,024 open files that many systems allow
MAX_HEAD = 16_384  # bytes of a head that is not whole yet
MAX_BODY = 1_500_000  # bytes; JSON may spell each of a paragraph's 100,000 characters in 12
# What Gradio's page asks for. Its other routes upload files, hand out files, fetch addresses and describe an API.
READ = re.compile(
    r"/|/(config|theme\.css|manifest\.json|favicon\.ico)|/(assets|static)/.+|/gradio_api/(startup-events|queue/data)"
)
JOIN = "/gradio_api/queue/join"  # every event: a question, a moved slider, a chosen group
# Scripts and styles stand in Gradio's page, and it builds some of its code while it runs.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; base-uri 'self'; form-action 'none'; frame-ancestors "
)


class Gate:
    """ASGI middleware that lets through what Gradio's page asks for, and adds the headers that keep it to itself."""

    def __init__(self, app, frames: str):
        self.app = app
        self.headers = {
            "Content-Security-Policy": POLICY + frames,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":  # the app's own start and end
            await self.app(scope, receive, send)
            return

        async def marked(message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        try:
            await (_refused(scope) or self.app)(scope, receive, marked)
        except asyncio.CancelledError:  # the app ends in the middle of an answer
            await send({"type": "http.response.body", "body": b""})


def _refused(scope) -> PlainTextResponse | None:
    """The answer to a request that is not the page's, or None."""
    headers = Headers(scope=scope)
    if scope["method"] == "POST" and scope["path"] == JOIN:
        if (
            headers.get("content-type", "").partition(";")[0] != "application/json"
        ):  # which no foreign form can send
            return PlainTextResponse("JSON is expected", 415)
        # A body without a length is not the page's; of others uvicorn takes no byte more than they said.
        too_long = int(headers.get("content-length", MAX_BODY + 1)) > MAX_BODY
        return PlainTextResponse("too long", 413) if too_long else None
    if scope["method"] in ("GET", "HEAD") and READ.fullmatch(scope["path"]):
        return None
    return PlainTextResponse("not a part of this page", 404)


class Connection(H11Protocol):
    """A connection on which each request has SECONDS to arrive whole, since uvicorn's own timer ends at the first byte.

    Where more than PENDING wait for one, the oldest is closed: slow senders push out each other, and nobody else waits.
    """

    pending: ClassVar[dict["Connection", asyncio.TimerHandle]] = {}  # by age

    def connection_made(self, transport) -> None:
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
        self._forget()

    def _watch(self) -> None:
        """Set the timer of a request that has not arrived; one that runs is left alone, whatever arrives."""
        if self.cycle and not self.cycle.response_complete and not self.cycle.more_body:
            self._forget()
        elif self not in self.pending and not self.transport.is_closing():
            self.pending[self] = self.loop.call_later(SECONDS, self.transport.close)
            if len(self.pending) > PENDING:
                oldest = next(iter(self.pending))
                oldest._forget()
                oldest.transport.close()

    def _forget(self) -> None:
        if timer := self.pending.pop(self, None):
            timer.cancel()


def guards(hosts: list[str], frames: str) -> list[Middleware]:
    """Middleware for an app that answers to `hosts`, "*" being any, and that pages of `frames` (CSP) may frame."""
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        Middleware(Gate, frames=frames),
    ]


def names(host: str, address: str) -> list[str]:
    """By what names the app may be called when it listens on `host`, which is `address`: any where others than this
    machine reach it, since it cannot know them."""
    own = ["127.0.0.1", "localhost", host, f"[{host}]"]  # in brackets: IPv6
    return own if ipaddress.ip_address(address).is_loopback else ["*"]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError for an empty host and a port that is taken."""
    if not host.strip():
        raise UserError(
            "--host is empty, which would listen to everybody: leave it out, or write 0.0.0.0 to mean that"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; --port takes another"
        ) from None
    # asyncio does it for sockets of its own only: answers would wait 40 ms for the asker's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(app, listener: socket.socket) -> None:
    """Serve until a signal comes, and then give requests in work three seconds."""
    config = uvicorn.Config(
        app, http=Connection, ws="none", limit_concurrency=CONNECTIONS, h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=3, log_level="warning", access_log=False, server_header=False,
    )  # fmt: skip
    if (
        signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    ):  # as `nohup` has it; else it ends the app as Ctrl-C does
        uvicorn.server.HANDLED_SIGNALS = {*uvicorn.server.HANDLED_SIGNALS, signal.SIGHUP}
    uvicorn.Server(config).run(sockets=[listener])
