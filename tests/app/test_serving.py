"""The app as a server: what it listens on, how long it waits for a request, and its end."""

import os
import shutil
import signal
import socket
import time

import httpx
import psutil
import pytest

from qa_lib.lab.app import gate, serving
from qa_lib.lab.app.asking import MAX_CONTEXT
from tests.app.server import ARRIVAL_SECONDS, Server, folder_of, key_of
from tests.conftest import slow
from tests.material import python

# The head of a question, whose body does not come.
POST_HEAD = (
    b"POST /gradio_api/queue/join HTTP/1.1\r\n"
    b"Host: 127.0.0.1\r\n"
    b"Content-Type: application/json\r\n"
    b"Content-Length: 9000\r\n\r\n"
)


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port))


def test_it_opens_on_this_machine_alone(server):
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    listening = {each.laddr.ip for each in connections if each.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_an_empty_host_is_refused(typed):
    assert "--host is empty" in typed("app --port 0 --host", "", code=2)


def test_a_port_that_is_taken_is_refused(server, typed):
    assert "--port takes another" in typed("app --port", server.port, code=2)


def test_a_head_that_is_too_large_is_refused(server):
    with connect(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * serving.MAX_HEAD)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def seconds_until_closed(connection: socket.socket, dripped: bytes, most: float) -> float:
    """Send some bytes now and then, and return after how long the other end has closed.

    The test ends after `most` seconds, whether it has or not.
    """
    begin = time.monotonic()
    connection.settimeout(0.2)
    while time.monotonic() < begin + most:
        try:
            if connection.recv(100) == b"":
                break
        except TimeoutError:
            connection.sendall(dripped)
        except ConnectionError:
            break
    return time.monotonic() - begin


@pytest.mark.parametrize(
    ("begun", "dripped"),
    [
        slow(b"", b"", id="nothing"),
        slow(b"GET / HTTP/1.1\r\nX: ", b"x", id="in the head"),
        pytest.param(POST_HEAD, b"x", id="in the body"),
    ],
)
def test_a_byte_now_and_then_does_not_keep_a_place(server, begun, dripped):
    with connect(server) as sender:
        sender.sendall(begun)
        seconds = seconds_until_closed(sender, dripped, most=3 * ARRIVAL_SECONDS)
    assert ARRIVAL_SECONDS - 1 < seconds < 3 * ARRIVAL_SECONDS


@pytest.mark.slow
def test_nobody_waits_for_slow_senders(server, runs):
    """Some in their bodies, and more than are served at once that are silent or in their heads."""
    begun = [POST_HEAD] * 100 + [b"", b"GET / HT"] * (serving.MAX_CONNECTIONS // 2)
    senders = []
    for sent in begun:
        sender = connect(server)
        sender.sendall(sent)
        senders.append(sender)
    for _ in range(3):
        begin = time.monotonic()
        assert httpx.get(server.address).status_code == 200
        # It has not waited until they were given up.
        assert time.monotonic() - begin < ARRIVAL_SECONDS - 1
    assert server.ask(key_of(runs), "who ?", "it was she")[0]
    for sender in senders:
        sender.close()


@pytest.mark.slow
def test_a_signal_ends_it_within_seconds_whatever_is_at_work(tmp_path, runs):
    shutil.copytree(folder_of(runs).parent, tmp_path / "runs" / key_of(runs))
    server = Server(tmp_path / "runs")
    long = "it was she . " * (MAX_CONTEXT // 13)
    for _ in range(20):
        server.client.post(gate.JOIN, json=server.question(key_of(runs), "who ?", long))
    with connect(server) as silent:
        silent.sendall(POST_HEAD)
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.join(8)
        assert server.process.exitcode == 130


SERVE_NOTHING = """
import sys
from unittest.mock import patch
from qa_lib.__main__ import main
def serve(parent, listener):
    print("serves")
with patch("qa_lib.lab.app.page.serve", serve):
    sys.exit(main(["app", "--runs", sys.argv[1], "--port", "0"]))
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("all_proxy", "socks5://127.0.0.1:9"),
        slow("http_proxy", "http://127.0.0.1:9"),
        slow("https_proxy", "no address"),
        slow("no_proxy", "[::1"),
    ],
)
def test_the_command_line_imports_and_serves_it_past_any_proxy(tmp_path, variable, value):
    done = python("-c", SERVE_NOTHING, tmp_path, **{variable: value})
    assert "serves" in done.stdout
