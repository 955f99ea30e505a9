"""Which requests the app's page lets in, and how large they are.

The page is for one's own machine. To show it to the world, put a server such as nginx before it, which also closes the
connections of those that send slowly.
"""

import asyncio
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse

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
        if headers.get("content-type", "").partition(";")[0] != "application/json":  # which no foreign form can send
            return PlainTextResponse("JSON is expected", 415)
        # A body without a length is not the page's; of others uvicorn takes no byte more than they said.
        too_long = int(headers.get("content-length", MAX_BODY + 1)) > MAX_BODY
        return PlainTextResponse("too long", 413) if too_long else None
    if scope["method"] in ("GET", "HEAD") and READ.fullmatch(scope["path"]):
        return None
    return PlainTextResponse("not a part of this page", 404)


def guards(hosts: list[str], frames: str) -> list[Middleware]:
    """Middleware for an app that answers to `hosts`, "*" being any, and that pages of `frames` (CSP) may frame."""
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return [trusted, Middleware(Gate, frames=frames)]


def names(host: str) -> list[str]:
    """By what names the app may be called when it listens on `host`: any where others than this machine reach it, since
    it cannot know them."""
    return ["127.0.0.1", "localhost", "[::1]"] if host in ("127.0.0.1", "localhost", "::1") else ["*"]
