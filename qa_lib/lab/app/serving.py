"""Serve the app's page: which requests are let in, how large they are, and in what time they have to arrive.

Gradio takes more from a request than its page sends. A dict among an event's values, for one, may
name a file, which Gradio then opens and copies. So it never sees a request as it came: `Gate` hands
on those of the page, each written anew from the parts that it has checked.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar

import httpx
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from qa_lib.errors import UserError, first_line

SECONDS = 10  # in which a request, head and body, has to arrive
PENDING = (
    256  # connections that have not sent a whole request; the next takes the place of the oldest
)
CONNECTIONS = 600  # in all, below the 1,024 open files that many systems allow
MAX_HEAD = 16_384  # bytes of a head that is not whole yet
MAX_BODY = 1_500_000  # bytes; JSON may spell each of a paragraph's 100,000 characters in 12
# What Gradio's page asks for. Its other routes upload files, hand out files, fetch addresses and describe an API.
READ = re.compile(
    r"/|/(config|theme\.css|manifest\.json|favicon\.ico)|/(assets|static)(/[\w-][\w.-]{0,100}){1,5}|"
    r"/gradio_api/startup-events",
    re.ASCII,
)
JOIN = "/gradio_api/queue/join"  # every event: a question, a moved slider, a chosen group
ANSWERS = "/gradio_api/queue/data"  # the stream of what becomes of a session's events
SESSION = re.compile("[a-z0-9]{1,32}")
# The parts of an event that the page sends, and the types of their values. Gradio knows more parts.
PARTS = {
    "fn_index": (int,),
    "data": (list,),
    "session_hash": (str,),
    "event_data": (NoneType,),
    "trigger_id": (int, NoneType),
}
# The parts that the page's events make use of: Gradio is given no other.
NEEDED = ("fn_index", "data", "session_hash")
LARGEST = 2**53  # the page sends no number beyond it, since JavaScript cannot tell these apart
SESSION_QUERY = re.compile(b"session_hash=([a-z0-9]{1,32})")
# What Gradio is told of a request's head. It makes the page's address of the last three. Behind a
# proxy, as in Colab, the browser knows the page by the last two.
HEADERS = ("accept", "accept-encoding", "host", "x-forwarded-proto", "x-forwarded-host")
HOST = re.compile(r"[\w.:\[\]-]{1,300}", re.ASCII)
# Scripts and styles stand in Gradio's page, and it builds some of its code while it runs.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; base-uri 'self'; form-action 'none'; frame-ancestors "
)


@dataclass(frozen=True)
class Page:
    """What a page can send.

    `events` has for each event's number the types that each of its values may have. `sessions` are
    those that have asked something.
    """

    events: Mapping[int, Sequence[tuple[type, ...]]]
    sessions: Container[str]


class Gate:
    """ASGI middleware that hands on what Gradio's page asks for, written anew, and refuses all else.

    It adds the headers that keep the page to itself.
    """

    def __init__(self, app, page: Page, frames: str):
        self.app = app
        self.page = page
        self.headers = {
            "Content-Security-Policy": POLICY + frames,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":  # the app's own start and end
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket, which the page does without
            await send({"type": "websocket.close"})
            return

        async def marked(message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        try:
            checked = await self._checked(scope, receive)
        except HTTPException as refusal:
            answer = PlainTextResponse(refusal.detail, refusal.status_code)
            await answer(scope, receive, marked)
            return
        try:
            await self.app(*checked, marked)
        except asyncio.CancelledError:  # the app ends in the middle of an answer
            await send({"type": "http.response.body", "body": b""})

    async def _checked(self, scope, receive):
        """The scope and the `receive` that Gradio is given for a request of the page.

        Raises HTTPException for any other request.
        """
        method, path = scope["method"], scope["path"]
        headers = checked_headers(Headers(scope=scope))
        query = body = b""
        if method == "POST" and path == JOIN:
            if Headers(scope=scope).get("content-type", "").partition(";")[0] != "application/json":
                raise HTTPException(415, "JSON is expected")  # which no foreign form can send
            event = checked_event(await read_body(receive), self.page.events)
            body = json.dumps(event).encode()
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        elif method == "GET" and path == ANSWERS:
            query = self._checked_query(scope["query_string"])
        elif method not in ("GET", "HEAD") or not READ.fullmatch(path):
            raise HTTPException(404, "not a part of this page")
        changed = {"headers": Headers(headers).raw, "query_string": query}
        return scope | changed, replayed(body, receive)

    def _checked_query(self, query: bytes) -> bytes:
        """The query, if it names a session that has asked something; or else HTTPException."""
        found = SESSION_QUERY.fullmatch(query)
        if found is None or found[1].decode() not in self.page.sessions:
            raise HTTPException(404, "no such session")
        return query


async def read_body(receive) -> bytes:
    """The whole body of a request.

    Raises HTTPException for one of more than MAX_BODY bytes, and for one that has not arrived in
    SECONDS.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(400, "the request is not whole")
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise HTTPException(413, "too long")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise HTTPException(408, "too slow") from None


def checked_event(body: bytes, events: Mapping[int, Sequence[tuple[type, ...]]]) -> dict:
    """The NEEDED parts of an event of the page.

    Raises HTTPException for what is no JSON, and for what the page does not send.
    """
    try:
        found = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise HTTPException(400, "not JSON") from None
    if not isinstance(found, dict):
        raise HTTPException(422, "an event is a JSON object")
    for name in NEEDED:
        if name not in found:
            raise HTTPException(422, f"an event has a {name}")
    for name, value in found.items():
        if name not in PARTS or not fits(value, PARTS[name]):
            raise HTTPException(422, "a part of this event is none that the page sends")
    if not SESSION.fullmatch(found["session_hash"]):
        raise HTTPException(422, "a session_hash has 1 to 32 small letters and digits")
    kinds = events.get(found["fn_index"])
    if kinds is None:
        raise HTTPException(404, "no such event")
    values = found["data"]
    if len(values) != len(kinds) or not all(map(fits, values, kinds)):
        raise HTTPException(422, "a value of this event is none that the page sends")
    return {name: found[name] for name in NEEDED}


def fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value from JSON has one of these types, and is no number beyond LARGEST.

    A bool is not taken for an int.
    """
    if type(value) not in kinds:
        return False
    return not isinstance(value, int | float) or -LARGEST <= value <= LARGEST


def checked_headers(headers: Headers) -> dict[str, str]:
    """Those of HEADERS that a request has. Raises HTTPException for what is no host."""
    found = {name: headers[name] for name in HEADERS if name in headers}
    for name in ("host", "x-forwarded-host"):
        if name in found:
            found[name] = checked_host(found[name])
    return found


def checked_host(text: str) -> str:
    """The host that a request names; the first of several that proxies list, which is the browser's.

    Raises HTTPException for what is no host.
    """
    host = text.partition(",")[0].strip()
    if not HOST.fullmatch(host):
        raise HTTPException(400, "not the name of a host")
    try:
        httpx.URL(f"http://{host}")  # Gradio makes this of it, too
    except httpx.InvalidURL:
        raise HTTPException(400, "not the name of a host") from None
    return host


def replayed(body: bytes, receive):
    """A `receive` that gives this body first, and then what else comes: that the sender has gone."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message():
        return messages.pop() if messages else await receive()

    return next_message


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


def guards(hosts: list[str], page: Page, frames: str) -> list[Middleware]:
    """Middleware for a page that answers to `hosts`, "*" being any, and that pages of `frames` (CSP) may frame."""
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        Middleware(Gate, page=page, frames=frames),
    ]


@contextlib.contextmanager
def past_proxies(share: bool) -> Iterator[None]:
    """Inside, requests to this machine go past the proxies that environment variables name.

    Gradio asks its own server whether it answers, which a proxy elsewhere cannot tell. No variable is
    set inside, so that not even a broken one matters; but with `share`, when Gradio asks its makers'
    server, too. Then a variable that no request can be sent with raises UserError, which names it.
    """
    before = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    inside = {}
    if share and before:
        others = urllib.request.getproxies_environment().get("no")
        inside = before | {"no_proxy": ",".join(filter(None, [others, "127.0.0.1,localhost"]))}
    for name in before:
        del os.environ[name]
    os.environ |= inside
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as problem:
        if not inside:
            raise
        raise UserError(
            f"the page's server cannot be asked while {', '.join(before)} is set: {first_line(problem)}"
        ) from problem
    finally:
        for name in inside:
            del os.environ[name]
        os.environ |= before


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
