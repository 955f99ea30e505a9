"""Which requests the app lets in: those that its page sends, whole and in time."""

import asyncio
import json
import os
import socket
import sys
from collections import Counter

import httpx
import pytest
from starlette.exceptions import HTTPException

from qa_lib.lab.app import gate
from tests import hostile
from tests.app.server import ARRIVAL_SECONDS, TOUCHES, key_of
from tests.material import ROOT

JSON_TYPE = {"Content-Type": "application/json"}
FOREIGN_VALUE = "a value of this event is none that the page sends"


# Events


@pytest.fixture
def paths(tmp_path):
    """A file, none, a pipe that nobody writes to, an endless device, and a file of the system."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    return [str(secret), str(tmp_path / "none"), str(pipe), "/dev/zero", "/etc/passwd"]


def test_a_file_that_a_request_names_is_refused_whether_it_is_there_or_not(server, paths, tmp_path):
    """Gradio would copy it, and wait for ever at the pipe and the device."""
    answers = set()
    for value in hostile.named_files(paths):
        for place in range(4):
            body = server.question("", "who ?", "text")
            body["data"][place] = value
            answer = server.client.post(gate.JOIN, json=body)
            answers.add((answer.status_code, answer.text))
    assert answers == {(422, FOREIGN_VALUE)}
    assert str(tmp_path) not in server.touched.read_text()


SENT = {"fn_index": 0, "session_hash": "a1", "data": []}  # what the first example's button sends


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"fn_index": 99}, 404),
        ({"fn_index": -1}, 404),
        ({"fn_index": True}, 422),
        ({"fn_index": "0"}, 422),
        ({"fn_index": 10**400}, 422),
        ({"session_hash": "../a"}, 422),
        ({"session_hash": ""}, 422),
        ({"session_hash": {}}, 422),
        ({"trigger_id": {}}, 422),
        ({"event_data": {"path": "/dev/zero"}}, 422),
        ({"event_id": "a"}, 422),
        ({"batched": True}, 422),
        ({"oauth_token": "a"}, 422),
        ({"data": ["one too many"]}, 422),
        ({"data": {}}, 422),
        ({"data": None}, 422),
    ],
)
def test_an_event_that_the_page_does_not_send_is_refused(server, change, status):
    assert server.client.post(gate.JOIN, json=SENT | change).status_code == status


SENT_TEXT = json.dumps(SENT)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 400, id="empty"),
        pytest.param(b"[]", 422, id="a list"),
        pytest.param(b"[" * 500_000, 400, id="nested"),
        pytest.param(b'{"fn_index": ' + b"9" * 5_000 + b"}", 400, id="many digits"),
        pytest.param(SENT_TEXT.encode("utf-16"), 400, id="UTF-16"),
        pytest.param(SENT_TEXT.encode("utf-8-sig"), 400, id="byte order mark"),
        pytest.param(SENT_TEXT.encode() + b"\xff", 400, id="no UTF-8"),
        pytest.param(SENT_TEXT[:-1].encode(), 400, id="cut short"),
        pytest.param(b'{"session_hash": "a1", "data": []}', 422, id="no event number"),
    ],
)
def test_a_body_that_is_no_event_is_refused(server, body, status):
    answer = server.client.post(gate.JOIN, content=body, headers=JSON_TYPE)
    assert answer.status_code == status
    assert "\n" not in answer.text


def test_of_a_part_that_is_given_twice_gradio_sees_the_one_that_was_checked(server):
    file = '[{"path": "/dev/zero", "meta": {"_type": "gradio.FileData"}}]'
    body = json.loads(f'{{"data": {file}, ' + SENT_TEXT[1:])
    assert server.outcome(body | {"session_hash": "b2"})["success"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "true"])
def test_a_number_that_the_page_cannot_send_is_refused(server, number):
    body = json.dumps(server.moved_slider("", 0, 0, 0.0, -7)).replace("-7", number)
    answer = server.client.post(gate.JOIN, content=body, headers=JSON_TYPE)
    assert answer.status_code == 422


def test_a_threshold_below_the_margin_leaves_no_answer(server):
    outcome = server.outcome(server.moved_slider("text", 0, 4, -1.0, -2))
    assert outcome["output"]["data"][0] == "No answer"


def test_an_empty_threshold_leaves_the_answer(server):
    outcome = server.outcome(server.moved_slider("text", 0, 4, -1.0, None))
    assert outcome["success"]
    assert "value" not in json.dumps(outcome["output"]["data"])


@pytest.mark.parametrize(
    "query", ["", "?session_hash=none", "?session_hash=a1&session_hash=a1", "?session_hash=%61"]
)
def test_a_session_that_has_asked_nothing_has_no_answers(server, query):
    assert server.client.get(gate.ANSWERS + query).status_code == 404


# Routes


@pytest.mark.parametrize("path", ["/", "/config"])
def test_what_the_page_reads_is_served(server, path):
    assert server.client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "upload",
        "component_server",
        "call/ask",
        "run/predict",
        "api/predict",
        "run-history/connect",
    ],
)
def test_nothing_else_of_gradio_can_be_posted_to(server, path):
    answer = server.client.post(f"/gradio_api/{path}", files={"files": b"x"})
    assert answer.status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "file=/etc/passwd",
        "file=http://127.0.0.1:1/x",
        "info",
        "openapi.json",
        "runs",
        "upload_progress",
        "custom_component/1/client/component/x.js",
        "proxy=http://127.0.0.1:1/",
    ],
)
def test_nothing_else_of_gradio_can_be_read(server, path):
    assert server.client.get(f"/gradio_api/{path}").status_code == 404


def test_no_file_of_the_figures_is_handed_out_by_its_path(server, runs):
    path = f"/gradio_api/file={runs.parent}/figures/cpu-smoke/ladder.png"
    assert server.client.get(path).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/monitoring", "/static/../../routes.py", "/assets/%2e%2e/%2e%2e/%2e%2e/routes.py"],
)
def test_no_path_leads_out_of_the_pages_files(server, path):
    assert server.client.get(path).status_code in (403, 404)


def test_no_options_are_told(server):
    assert server.client.options(gate.JOIN).status_code == 404


# Heads


@pytest.mark.parametrize("head", ["Host", "X-Forwarded-Host"])
@pytest.mark.parametrize("host", ["[::1", "127.0.0.1:x", "999.999.999.999", "a b", "a/../b", "x@y"])
def test_a_host_that_is_none_is_refused(server, head, host):
    assert server.client.get("/", headers={head: host}).status_code == 400


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "8.8.8.8"])
@pytest.mark.parametrize("path", ["/", "/config", gate.JOIN])
def test_a_foreign_host_is_refused(server, host, path):
    assert server.client.get(path, headers={"Host": host}).status_code == 400


def test_what_a_foreign_form_can_send_is_refused(server):
    headers = {"Content-Type": "text/plain"}
    assert server.client.post(gate.JOIN, content=b"{}", headers=headers).status_code == 415


def test_the_page_is_kept_to_itself(server):
    policy = server.client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert policy.endswith("frame-ancestors 'none'")


@pytest.mark.parametrize(
    ("host", "address", "any_name"),
    [("lab", "10.0.0.7", True), ("::1", "::1", False), ("localhost", "127.0.0.1", False)],
)
def test_other_names_are_answered_only_where_others_reach_it(host, address, any_name):
    assert ("*" in gate.allowed_hosts(host, address)) == any_name


# Sizes and times


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_body_that_is_too_large_is_refused(server, says_its_length):
    body = b"x" * (gate.MAX_BODY + 1)
    content = body if says_its_length else iter([body])
    answer = server.client.post(gate.JOIN, content=content, headers=JSON_TYPE)
    assert answer.status_code == 413


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    """In a notebook, too, whose server is Gradio's own."""
    monkeypatch.setattr(gate, "ARRIVAL_SECONDS", 0.05)

    async def receive_nothing():
        await asyncio.sleep(60)

    with pytest.raises(HTTPException) as caught:
        asyncio.run(gate.read_body(receive_nothing))
    assert caught.value.status_code == 408


# Generated requests


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_generated_request_opens_a_file_fails_the_server_or_hangs_it(
    server, runs, paths, tmp_path, seed
):
    """About 900 for each seed: QA_LIB_HOSTILE=5000 sends that many more; see hostile.py."""
    event_count = int(os.environ.get("QA_LIB_HOSTILE", 500))
    touched_before = server.touched.stat().st_size
    statuses = Counter()
    for request in hostile.requests(server.config, paths, seed, event_count):
        try:
            with server.client.stream(
                request.method,
                request.path,
                headers=request.headers,
                content=request.body,
                timeout=10,
            ) as answer:
                statuses[request.kind, answer.status_code] += 1
        except (httpx.LocalProtocolError, httpx.InvalidURL):  # no request at all
            continue
    for raw in hostile.RAW:
        assert not _first_bytes(server, raw).startswith(b"HTTP/1.1 5")

    allowed = {200, 400, 403, 404, 405, 413, 415, 422}
    assert {status for _, status in statuses} <= allowed, statuses
    assert statuses["event", 422] > 100
    assert statuses["route", 404] > 100
    assert server.ask(key_of(runs), "who ?", "it was she")[0]

    own = [str(runs), str(runs.parent / "figures"), str(ROOT)]
    places = [*own, sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/usr/"]
    expected = tuple(f"{event} ['{place}" for event in TOUCHES for place in places)
    for line in server.touched.read_text()[touched_before:].splitlines():
        assert str(tmp_path) not in line
        assert line.startswith(expected)


def _first_bytes(server, raw: bytes) -> bytes:
    """Return how the server's answer to these bytes of a connection begins."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw)
        connection.settimeout(2 * ARRIVAL_SECONDS)
        return connection.recv(100)


# Parts of a request, without a server


@pytest.mark.parametrize(
    ("value", "types", "fitting"),
    [
        (gate.MAX_NUMBER, (int,), True),
        (-gate.MAX_NUMBER - 1, (int,), False),
        (2.0**53 + 2, (float,), False),
        (True, (int,), False),
        (1, (float,), False),
        (None, (str, type(None)), True),
        ("9" * 30, (str,), True),
    ],
)
def test_a_value_fits_by_its_own_type_and_within_the_numbers_of_a_page(value, types, fitting):
    assert gate.fits(value, types) is fitting


def test_of_several_hosts_that_proxies_list_the_first_counts():
    headers = {"host": "a:1", "x-forwarded-host": "b.example, c.example", "cookie": "x"}
    assert gate.checked_headers(headers) == {"host": "a:1", "x-forwarded-host": "b.example"}


def test_a_body_may_have_as_many_bytes_as_the_limit_and_arrive_in_parts():
    parts = [{"type": "http.request", "body": b"x" * (gate.MAX_BODY - 1), "more_body": True}]
    parts.append({"type": "http.request", "body": b"x"})

    async def receive():
        return parts.pop(0)

    assert len(asyncio.run(gate.read_body(receive))) == gate.MAX_BODY


def test_a_body_that_was_checked_is_given_once_and_then_what_else_comes():
    async def receive():
        return "gone"

    async def received():
        next_message = gate.replayed(b"body", receive)
        return [await next_message(), await next_message()]

    first, second = asyncio.run(received())
    assert first == {"type": "http.request", "body": b"body", "more_body": False}
    assert second == "gone"


def test_an_ipv6_address_is_called_in_brackets():
    assert "[::1]" in gate.allowed_hosts("::1", "::1")


def test_a_host_that_a_proxy_names_is_checked_as_well():
    with pytest.raises(HTTPException, match="not the name of a host"):
        gate.checked_headers({"host": "a", "x-forwarded-host": "b/c"})


def test_a_body_whose_sender_has_gone_is_not_whole():
    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(HTTPException) as caught:
        asyncio.run(gate.read_body(receive))
    assert caught.value.status_code == 400


# A gate before another app


def sent_through(app, body: bytes = b"", **scope) -> list[dict]:
    """Return what is sent for a request through a gate to `app`, whose page has one event."""
    page = gate.Page(events={0: ()}, sessions=set())
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    request = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(gate.Gate(app, page, frames="'none'")(request | scope, receive, send))
    return sent


async def echo(scope, receive, send):
    """Answer with the headers and the body of a request."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": scope["headers"]})
    await send({"type": "http.response.body", "body": body})


def test_an_event_is_handed_on_with_the_length_of_what_was_written_anew():
    json_type = [(b"content-type", b"application/json; charset=utf-8"), (b"content-length", b"99")]
    body = json.dumps(SENT | {"trigger_id": 5}).encode()
    start, end = sent_through(echo, body, method="POST", path=gate.JOIN, headers=json_type)
    assert json.loads(end["body"]) == SENT
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(end["body"])).encode()


def test_what_is_refused_has_the_headers_that_keep_the_page_to_itself():
    start, _ = sent_through(echo, path="/gradio_api/upload")
    assert start["status"] == 404
    assert dict(start["headers"])[b"x-content-type-options"] == b"nosniff"


def test_a_websocket_is_closed():
    assert sent_through(echo, type="websocket") == [{"type": "websocket.close"}]


def test_an_answer_that_the_end_of_the_app_cuts_short_is_ended():
    async def cancelled(scope, receive, send):
        raise asyncio.CancelledError

    assert sent_through(cancelled) == [{"type": "http.response.body", "body": b""}]
