"""Requests that the app's page never sends: generated, and the same ones for the same seed.

`requests` generates them; RAW has the bytes of whole connections that are no proper requests. The
files that requests name are given: what exists and what does not, a device without an end, a pipe
that nobody writes to.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qa_lib.lab.app.gate import ANSWERS, JOIN


class Request(NamedTuple):
    """One request, and what is wrong with it: `event`, `route`, `query` or `head`."""

    kind: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


# Gradio's own routes, those that the page uses among them.
ROUTES = """
/ /config /info /startup-events /monitoring /monitoring/x /upload /upload_progress /file /file=
/file/x /proxy= /stream/x/y/z/playlist.m3u8 /component_server /queue/join /queue/data /queue/status
/call/ask /call/ask/x /call/v2/ask /run/ask /api/ask /cancel /reset /heartbeat/x
/custom_component/x/client/component/x.js /login /logout /token /user /app_id /app_id/ /dev/reload
/svelte/x /static/ /static/x /assets/ /assets/x /theme.css /manifest.json /robots.txt /favicon.ico
/pwa_icon /pwa_icon/9 /deep_link /vibe-edit /vibe-code /process_recording /undo-vibe-edit
/openapi.json /docs /redoc /mcp/ /mcp/sse /runs /run-history/connect /api /gradio_api
/login/huggingface /login/callback /node /%2e%2e/%2e%2e/etc/passwd
""".split()
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY")
# Headers that a server may trip over, one to a request.
HEADERS = (
    {"Host": "evil.example"},
    {"Host": "127.0.0.1:99999999"},
    {"Host": "127.0.0.1:x"},
    {"Host": "[::1"},
    {"X-Forwarded-Host": "["},
    {"X-Forwarded-Host": "a b"},
    {"X-Forwarded-Host": "999.999.999.999"},
    {"X-Forwarded-Host": "x@y/../..?#"},
    {"X-Forwarded-Proto": "file"},
    {"X-Gradio-Server": "file:///etc/passwd"},
    {"X-Gradio-Server": "["},
    {"X-Gradio-User": "a"},
    {"Range": "bytes=-9-"},
    {"Range": "bytes=" + "0-1," * 2_000},
    {"Cookie": "access-token=x; session=" + "A" * 3_000},
    {"Accept-Encoding": "br;q=x, gzip;q=nan"},
    {"Authorization": "Bearer x"},
    {"Expect": "100-continue"},
    {"If-Modified-Since": "never"},
    {"Content-Encoding": "gzip"},
    {"Transfer-Encoding": "gzip"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": "application/json; charset=utf-7"},
)


def named_files(paths: list[str]) -> list[object]:
    """Return values that name a file to Gradio, or that look as if they did."""
    odd_paths = ["http://127.0.0.1:1/x", "file:///etc/passwd", "data:,x", "x\x00y", "a" * 5_000]
    values: list[object] = []
    for path in [*paths, *odd_paths]:
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        values += [
            file,
            [file],
            {"a": [file]},
            file | {"url": path, "orig_name": "../x", "is_stream": True},
            file | {"mime_type": "image/svg+xml", "size": 10**30},
            {"path": path},
            {"value": file, "__type__": "update"},
        ]
    return values


def odd_values() -> list[object]:
    """Return values that name no file, and that no component of the page has."""
    nested: object = 0
    for _ in range(300):
        nested = [nested]
    numbers = [None, True, -1, 2**63, 10**400, 0.5]
    texts = ["", "\ud800", "\x00", "😀" * 9]
    return [*numbers, *texts, [], {}, [[]], nested]


def events(config: dict) -> list[dict]:
    """Return the body of each of the page's events, by Gradio's description of it."""
    kinds = {component["id"]: component["type"] for component in config["components"]}
    samples = {"dropdown": None, "slider": 1.0, "number": 1}
    return [
        {
            "fn_index": event["id"],
            "session_hash": "",
            "data": [samples.get(kinds[component], "text") for component in event["inputs"]],
        }
        for event in config["dependencies"]
    ]


EVENT_KEYS = (
    "fn_index session_hash data event_data trigger_id event_id oauth_token batched simple_format "
    "request"
).split()


def spoilt_event(event: dict, paths: list[str], rng: random.Random) -> dict:
    """Spoil an event: one of its inputs, one of its keys, or all of its inputs."""
    file_values = named_files(paths)
    any_values = file_values + odd_values()
    event["session_hash"] = f"{rng.getrandbits(40):x}"
    way = rng.randrange(6)
    if way <= 2 and event["data"]:
        value = rng.choice(any_values if way == 0 else file_values)
        event["data"][rng.randrange(len(event["data"]))] = value
    elif way == 3:
        event[rng.choice(EVENT_KEYS)] = rng.choice(any_values)
    elif way == 4:
        del event[rng.choice(list(event))]
    else:
        event["data"] = [rng.choice(any_values) for _ in range(rng.randrange(7))]
    return event


def bodies(config: dict, paths: list[str], rng: random.Random) -> Iterator[bytes]:
    """Generate bodies of events with a value, a key or their text spoilt, without end."""
    while True:
        event = rng.choice(events(config))
        text = json.dumps(spoilt_event(event, paths, rng))
        if rng.random() < 0.2:
            yield rng.choice(SPOILERS)(text)
        else:
            yield text.encode()


# Each turns the text of a body into bytes that are no such JSON.
SPOILERS: tuple[Callable[[str], bytes], ...] = (
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-32-be"),
    lambda text: text.encode("utf-8-sig"),
    lambda text: gzip.compress(text.encode()),
    lambda text: text[:-3].encode(),
    lambda text: text.encode() + b"x",
    lambda text: text.encode() + b"\xff",
    lambda text: (text[:-1] + ', "fn_index": 0, "data": []}').encode(),  # a name given twice
    lambda text: ('{"data": [NaN, Infinity, 1e999], ' + text[1:]).encode(),
    lambda text: b"[" * 100_000,
    lambda text: b'{"a":' * 100_000,
    lambda text: b"9" * 100_000,
    lambda text: b"",
    lambda text: b"null",
)


def requests(config: dict, paths: list[str], seed: int, event_count: int) -> Iterator[Request]:
    """Generate that many events with spoilt bodies, every route by some method, and each of HEADERS
    on pages and events."""
    rng = random.Random(seed)
    generated = bodies(config, paths, rng)
    json_type = {"Content-Type": "application/json"}

    for number in range(event_count):
        headers = rng.choice(HEADERS[-2:]) if number % 20 == 0 else json_type
        query = rng.choice(["", "", "?", f"?session_hash={paths[0]}", "?fn_index=0"])
        yield Request("event", "POST", JOIN + query, headers, next(generated))

    for route in ROUTES:
        for start in ("", "/gradio_api"):
            path = start + rng.choice([route, route + "/", route + paths[0], "/" + route])
            yield Request("route", rng.choice(METHODS), path, json_type, next(generated))
            yield Request("route", "GET", start + route + rng.choice(paths), {}, b"")

    queries = ("deep_link=../x", "page=x", f"__theme={paths[0]}", "view=api", "session_hash=x")
    for page in ("/", "/config", "/theme.css", "/static/img/logo.svg", ANSWERS):
        for query in queries:
            path = f"{page}?{query}&session_hash={paths[0]}"
            yield Request("query", "GET", path, {}, b"")
        for headers in HEADERS:
            yield Request("head", "GET", page, headers, b"")

    for headers in HEADERS:
        yield Request("head", "POST", JOIN, json_type | headers, next(generated))


HEAD = (
    b"POST " + JOIN.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
)
# Bytes that are sent on a connection of their own.
RAW = (
    HEAD + b"Content-Length: 5\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\n\r\n{}GET /etc/passwd HTTP/1.1\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n{}",
    HEAD + b"Content-Length: 1_0\r\n\r\n{}",
    HEAD + b"Content-Length: " + b"9" * 5_000 + b"\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://127.0.0.1:1/file=/etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: \xff\xfe\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: y\r\n z\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\r\n" * 9_000,
    b"\x00" * 500,
)
