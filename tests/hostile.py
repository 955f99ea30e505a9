"""Requests that the app's page never sends: generated, and the same ones for the same seed.

Each is (what it is, method, path, headers, body), or for RAW the bytes of a whole connection. The
files that they name are given: what exists and what does not, a device without an end, a pipe that
nobody writes to.
"""

import gzip
import json
import random
from collections.abc import Iterator

from qa_lib.lab.app.serving import ANSWERS, JOIN

# Gradio's own routes, those that the page uses among them.
ROUTES = """/ /config /info /startup-events /monitoring /monitoring/x /upload /upload_progress /file /file= /file/x
/proxy= /stream/x/y/z/playlist.m3u8 /component_server /queue/join /queue/data /queue/status /call/ask /call/ask/x
/call/v2/ask /run/ask /api/ask /cancel /reset /heartbeat/x /custom_component/x/client/component/x.js /login /logout
/token /user /app_id /app_id/ /dev/reload /svelte/x /static/ /static/x /assets/ /assets/x /theme.css /manifest.json
/robots.txt /favicon.ico /pwa_icon /pwa_icon/9 /deep_link /vibe-edit /vibe-code /process_recording /undo-vibe-edit
/openapi.json /docs /redoc /mcp/ /mcp/sse /runs /run-history/connect /api /gradio_api /login/huggingface
/login/callback /node /%2e%2e/%2e%2e/etc/passwd""".split()
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY")
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
    """Values that name a file to Gradio, or that look as if they did."""
    found: list[object] = []
    for path in [
        *paths,
        "http://127.0.0.1:1/x",
        "file:///etc/passwd",
        "data:,x",
        "x\x00y",
        "a" * 5_000,
    ]:
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        found += [
            file,
            [file],
            {"a": [file]},
            file | {"url": path, "orig_name": "../x", "is_stream": True},
            file | {"mime_type": "image/svg+xml", "size": 10**30},
            {"path": path},
            {"value": file, "__type__": "update"},
        ]
    return found


def odd_values() -> list[object]:
    """Values of no file that no component of the page has."""
    nested: object = 0
    for _ in range(300):
        nested = [nested]
    return [
        None,
        True,
        -1,
        2**63,
        10**400,
        0.5,
        "",
        "\ud800",
        "\x00",
        "😀" * 9,
        [],
        {},
        [[]],
        nested,
    ]


def events(config: dict) -> list[dict]:
    """The body of each of the page's events, by Gradio's description of it, with some values."""
    kinds = {part["id"]: part["type"] for part in config["components"]}
    samples = {"dropdown": None, "slider": 1.0, "number": 1}
    return [
        {
            "fn_index": event["id"],
            "session_hash": "",
            "data": [samples.get(kinds[part], "text") for part in event["inputs"]],
        }
        for event in config["dependencies"]
    ]


def bodies(config: dict, paths: list[str], chance: random.Random) -> Iterator[bytes]:
    """Bodies of events with a value, a part or their text spoilt; without end."""
    values, names = named_files(paths) + odd_values(), named_files(paths)
    parts = "fn_index session_hash data event_data trigger_id event_id oauth_token batched simple_format request"
    while True:
        event = json.loads(json.dumps(chance.choice(events(config))))
        event["session_hash"] = f"{chance.getrandbits(40):x}"
        what = chance.randrange(6)
        if what <= 2 and event["data"]:
            value = chance.choice(names if what else values)
            event["data"][chance.randrange(len(event["data"]))] = value
        elif what == 3:
            event[chance.choice(parts.split())] = chance.choice(values)
        elif what == 4:
            del event[chance.choice(list(event))]
        else:
            event["data"] = [chance.choice(values) for _ in range(chance.randrange(7))]
        text = json.dumps(event)
        yield chance.choice(SPOILERS)(text) if chance.random() < 0.2 else text.encode()


SPOILERS = (
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


def requests(config: dict, paths: list[str], seed: int, times: int) -> Iterator[tuple]:
    """That many events with spoilt bodies, every route by some method, and each of HEADERS on pages and events."""
    chance = random.Random(seed)
    generated = bodies(config, paths, chance)
    json_type = {"Content-Type": "application/json"}
    for number in range(times):
        kind = json_type if number % 20 else chance.choice(HEADERS[-2:])
        query = chance.choice(["", "", "?", f"?session_hash={paths[0]}", "?fn_index=0"])
        yield "event", "POST", JOIN + query, kind, next(generated)
    for route in ROUTES:
        for start in ("", "/gradio_api"):
            path = start + chance.choice([route, route + "/", route + paths[0], "/" + route])
            yield "route", chance.choice(METHODS), path, json_type, next(generated)
            yield "route", "GET", start + route + chance.choice(paths), {}, b""
    for page in ("/", "/config", "/theme.css", "/static/img/logo.svg", ANSWERS):
        for query in (
            "deep_link=../x",
            "page=x",
            "__theme=" + paths[0],
            "view=api",
            "session_hash=x",
        ):
            yield "query", "GET", f"{page}?{query}&session_hash={paths[0]}", {}, b""
        yield from (("head", "GET", page, head, b"") for head in HEADERS)
    for head in HEADERS:
        yield "head", "POST", JOIN, json_type | head, next(generated)


HEAD = (
    b"POST " + JOIN.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
)
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
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\r\n" * 9_000,
    b"\x00" * 500,
)
