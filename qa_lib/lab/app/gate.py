"""Which requests reach Gradio: those that the app's page sends, and nothing else.

Gradio takes more from a request than its page sends. A dict among an event's values, for one, may
name a file, which Gradio then opens and copies. So it never sees a request as it came: `Gate` hands
on those of the page, each written anew from the parts that it has checked.
"""

import asyncio
import ipaddress
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

import httpx
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ARRIVAL_SECONDS = 10  # in which a request, head and body, has to arrive
MAX_BODY = 1_500_000  # bytes; JSON may spell each of a paragraph's 100,000 characters in 12
# What Gradio's page reads. Its other routes upload files, hand out files, fetch addresses and
# describe an API.
READ = re.compile(
    r"/|/(config|theme\.css|manifest\.json|favicon\.ico)|"
    r"/(assets|static)(/[\w-][\w.-]{0,100}){1,5}|"
    r"/gradio_api/startup-events",
    re.ASCII,
)
JOIN = "/gradio_api/queue/join"  # every event: a question, a moved slider, a chosen group
ANSWERS = "/gradio_api/queue/data"  # the stream of what becomes of a session's events
SESSION = re.compile("[a-z0-9]{1,32}")
SESSION_QUERY = re.compile(b"session_hash=([a-z0-9]{1,32})")
# The parts of an event that the page sends, and the types of their values. Gradio knows more parts.
PART_TYPES = {
    "fn_index": (int,),
    "data": (list,),
    "session_hash": (str,),
    "event_data": (NoneType,),
    "trigger_id": (int, NoneType),
}
# The parts that the page's events make use of: Gradio is given no other.
NEEDED_PARTS = ("fn_index", "data", "session_hash")
MAX_NUMBER = 2**53  # JavaScript cannot tell larger ones apart, so that the page sends none
# What Gradio is told of a request's head. It makes the page's address of the last three. Behind a
# proxy, as in Colab, the browser knows the page by the last two.
PASSED_HEADERS = ("accept", "accept-encoding", "host", "x-forwarded-proto", "x-forwarded-host")
HOST = re.compile(r"[\w.:\[\]-]{1,300}", re.ASCII)
# Scripts and styles stand in Gradio's page, and it builds some of its code while it runs.
SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors "
)


@dataclass(frozen=True)
class Page:
    """What a page can send."""

    # By the number of each event, the types that each of its values may have.
    events: Mapping[int, Sequence[tuple[type, ...]]]
    # The sessions that have asked something.
    sessions: Container[str]


def guards(hosts: list[str], page: Page, frames: str) -> list[Middleware]:
    """Return the middleware of a page that answers to `hosts`, "*" being any.

    `frames` says which other pages may frame it, as a Content-Security-Policy does.
    """
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        Middleware(Gate, page=page, frames=frames),
    ]


def allowed_hosts(host: str, address: str) -> list[str]:
    """Return by which names the app may be called when it listens on `host`, which is `address`.

    Where other machines reach it, that is any name ("*"): it cannot know theirs.
    """
    if ipaddress.ip_address(address).is_loopback:
        return ["127.0.0.1", "localhost", host, f"[{host}]"]  # in brackets: IPv6
    return ["*"]


class Gate:
    """ASGI middleware that hands on what the page asks for, written anew, and refuses all else.

    It adds the headers that keep the page to itself.
    """

    def __init__(self, app: ASGIApp, page: Page, frames: str):
        self.app = app
        self.page = page
        self.headers = {
            "Content-Security-Policy": SECURITY_POLICY + frames,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the app's own start and end
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket, which the page does without
            await send({"type": "websocket.close"})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        try:
            checked_scope, checked_receive = await self._checked(scope, receive)
        except HTTPException as refusal:
            response = PlainTextResponse(refusal.detail, refusal.status_code)
            await response(scope, receive, send_with_headers)
            return
        try:
            await self.app(checked_scope, checked_receive, send_with_headers)
        except asyncio.CancelledError:  # the app ends in the middle of an answer
            await send({"type": "http.response.body", "body": b""})

    async def _checked(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """Return the scope and the `receive` that Gradio is given for a request of the page.

        Raises HTTPException for any other request.
        """
        method = scope["method"]
        path = scope["path"]
        headers = checked_headers(Headers(scope=scope))
        query = b""
        body = b""
        if method == "POST" and path == JOIN:
            content_type = Headers(scope=scope).get("content-type", "").partition(";")[0]
            if content_type != "application/json":  # which no foreign form can send
                raise HTTPException(415, "JSON is expected")
            event = checked_event(await read_body(receive), self.page.events)
            body = json.dumps(event).encode()
            headers["content-type"] = "application/json"
            headers["content-length"] = str(len(body))
        elif method == "GET" and path == ANSWERS:
            query = self._checked_query(scope["query_string"])
        elif method not in ("GET", "HEAD") or not READ.fullmatch(path):
            raise HTTPException(404, "not a part of this page")
        checked_scope = {**scope, "headers": Headers(headers).raw, "query_string": query}
        return checked_scope, replayed(body, receive)

    def _checked_query(self, query: bytes) -> bytes:
        """Return the query. Raises HTTPException unless it names a session that has asked."""
        match = SESSION_QUERY.fullmatch(query)
        if match is None or match[1].decode() not in self.page.sessions:
            raise HTTPException(404, "no such session")
        return query


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request.

    Raises HTTPException for one of more than MAX_BODY bytes, and for one that has not arrived in
    ARRIVAL_SECONDS.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(ARRIVAL_SECONDS):
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


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives this body first, and then what else comes.

    What else comes is the news that the sender has gone.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        if messages:
            return messages.pop()
        return await receive()

    return next_message


def checked_event(body: bytes, events: Mapping[int, Sequence[tuple[type, ...]]]) -> dict:
    """Return the NEEDED_PARTS of an event of the page.

    Raises HTTPException for what is no JSON, and for what the page does not send.
    """
    try:
        event = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise HTTPException(400, "not JSON") from None
    if not isinstance(event, dict):
        raise HTTPException(422, "an event is a JSON object")
    for name in NEEDED_PARTS:
        if name not in event:
            raise HTTPException(422, f"an event has a {name}")
    for name, value in event.items():
        if name not in PART_TYPES or not fits(value, PART_TYPES[name]):
            raise HTTPException(422, "a part of this event is none that the page sends")
    if not SESSION.fullmatch(event["session_hash"]):
        raise HTTPException(422, "a session_hash has 1 to 32 small letters and digits")
    value_types = events.get(event["fn_index"])
    if value_types is None:
        raise HTTPException(404, "no such event")
    values = event["data"]
    if len(values) != len(value_types) or not all(map(fits, values, value_types)):
        raise HTTPException(422, "a value of this event is none that the page sends")
    return {name: event[name] for name in NEEDED_PARTS}


def fits(value: object, types: tuple[type, ...]) -> bool:
    """Tell whether a value from JSON has one of these types, and is no number beyond MAX_NUMBER.

    A bool is not taken for an int.
    """
    if type(value) not in types:
        return False
    if isinstance(value, int | float):
        return -MAX_NUMBER <= value <= MAX_NUMBER
    return True


def checked_headers(headers: Headers) -> dict[str, str]:
    """Return those of PASSED_HEADERS that a request has.

    Raises HTTPException for what is no host.
    """
    passed = {name: headers[name] for name in PASSED_HEADERS if name in headers}
    for name in ("host", "x-forwarded-host"):
        if name in passed:
            passed[name] = checked_host(passed[name])
    return passed


def checked_host(text: str) -> str:
    """Return the host that a request names: of several that proxies list the first, the browser's.

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
