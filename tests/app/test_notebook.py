"""`app()` in a notebook and in Colab: where it is shown, whom it asks, and past which proxies."""

import contextlib
import os
import socket
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from qa_lib.lab.app import page
from qa_lib.lab.app.choices import Choice
from qa_lib.lab.app.page import app
from qa_lib.lab.app.proxies import past_proxies
from tests.material import refused


@pytest.fixture
def connected_to(monkeypatch) -> list[str]:
    """The hosts that this process has connected to; "a public link" where one was asked for."""
    hosts = []
    connect = socket.socket.connect

    def noting_connect(self, address):
        hosts.append(address[0])
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noting_connect)
    monkeypatch.setattr(
        "gradio.networking.setup_tunnel", lambda *_, **__: hosts.append("a public link")
    )
    return hosts


def test_a_notebook_shows_it_without_a_public_link_and_asks_nobody(
    in_a_notebook, runs, monkeypatch, connected_to
):
    monkeypatch.setenv("GRADIO_SHARE", "True")
    with closing(app(runs=runs)) as demo:
        assert httpx.get(demo.local_url).status_code == 200
        assert demo.share_url is None
        time.sleep(0.5)  # for what would be asked in the background
        assert set(connected_to) <= {"127.0.0.1", "localhost"}


def test_a_notebooks_server_has_the_same_guards(in_a_notebook, runs):
    with closing(app(runs=runs)) as demo:
        upload = httpx.post(f"{demo.local_url}gradio_api/upload", files={"files": b"x"})
        foreign = httpx.get(demo.local_url, headers={"Host": "evil.example"})
    assert upload.status_code == 404
    assert foreign.status_code == 400


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("http_proxy", "http://127.0.0.1:9"),
        ("HTTP_PROXY", "http://proxy.example:3128"),
        ("all_proxy", "socks5://127.0.0.1:9"),
        ("https_proxy", "no address"),
        ("no_proxy", "[::1"),
    ],
)
def test_a_notebook_shows_it_past_any_proxy(in_a_notebook, runs, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with closing(app(runs=runs)) as demo:
        assert httpx.get(demo.local_url, trust_env=False).status_code == 200
    assert os.environ[variable] == value


def test_a_proxy_that_keeps_a_public_link_from_being_made_is_named(
    in_a_notebook, runs, monkeypatch
):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    refused("while all_proxy is set: .*SOCKS", app, runs=runs, share=True)


@pytest.fixture
def proxies(monkeypatch) -> dict[str, str]:
    """The only proxy variables of the environment, which name no `no_proxy`."""
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    set_ones = {"http_proxy": "http://proxy.example:3128", "HTTPS_PROXY": "http://proxy.example:1"}
    for name, value in set_ones.items():
        monkeypatch.setenv(name, value)
    return set_ones


@pytest.mark.parametrize("share", [True, False])
def test_the_environment_has_its_proxies_and_no_others_afterwards(proxies, share):
    before = dict(os.environ)
    with contextlib.suppress(ZeroDivisionError), past_proxies(share):
        raise ZeroDivisionError
    assert dict(os.environ) == before


class ColabShell:
    """What IPython's shell is in Colab, by which Gradio knows it."""

    def __str__(self):
        return "<google.colab._shell.Shell object at 0x7f>"


@pytest.fixture
def in_colab(in_a_notebook, monkeypatch) -> list:
    """What is displayed in Colab, which has no browser on this machine."""
    displayed = []
    monkeypatch.setattr("IPython.core.getipython.get_ipython", ColabShell)
    monkeypatch.setattr("IPython.display.display", displayed.append)
    monkeypatch.setattr("webbrowser.open", lambda *_: pytest.fail("there is no browser"))
    return displayed


def test_colab_shows_it_by_its_own_proxy_which_calls_it_by_another_name(in_colab, runs):
    name = "x-8600-colab.example"
    headers = {"Host": "localhost:8080", "X-Forwarded-Host": name, "X-Forwarded-Proto": "https"}
    with closing(app(runs=runs)) as demo:
        page = httpx.get(f"http://127.0.0.1:{demo.server_port}", headers=headers)
        (artifact,) = in_colab
        assert f"({demo.server_port}, " in artifact.data
        assert "proxyPort" in artifact.data
    assert page.status_code == 200
    assert f"https://{name}" in page.text
    assert page.headers["content-security-policy"].endswith("frame-ancestors *")


# What the command line makes of its options.


@pytest.fixture
def made(monkeypatch, typed):
    """Return a function that runs the verb `app` and serves nothing.

    It is given the words and the address that the host has; it returns the stand-ins for what makes
    the page, by their names, and what was printed.
    """
    stand_ins = {name: Mock() for name in ("build", "guards", "page_of", "load_ahead", "serve")}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(page, name, stand_in)
    monkeypatch.setattr(page, "Starlette", Mock())
    monkeypatch.setattr(page.gr, "mount_gradio_app", Mock())

    def run(words, address="127.0.0.1", models=()):
        listener = Mock(getsockname=lambda: (address, 8600, 0, 0))
        monkeypatch.setattr(page, "listen", Mock(return_value=listener))
        monkeypatch.setattr(page, "Choices", lambda *_: Mock(listed=lambda: list(models)))
        return stand_ins, typed(f"app {words}")

    return run


@pytest.mark.parametrize(
    ("words", "address", "frames", "link"),
    [
        ("", "127.0.0.1", "'none'", "http://127.0.0.1:8600"),
        ("--host ::1", "::1", "'none'", "http://[::1]:8600"),
        ("--host lab", "10.0.0.7", "*", "http://lab:8600"),
        ("--host 0.0.0.0", "0.0.0.0", "*", "http://0.0.0.0:8600"),
    ],
)
def test_the_page_may_be_in_frames_where_others_reach_it_and_its_link_can_be_opened(
    words, address, frames, link, made
):
    stand_ins, printed = made(words, address)
    assert stand_ins["guards"].call_args.args[2] == frames
    assert printed.startswith(f"{link}  ")


def test_the_page_is_of_the_folders_and_the_length_that_were_typed(made):
    stand_ins, _ = made("--runs a --figures b --max-answer-length 9")
    assert stand_ins["build"].call_args.args[1:] == (Path("a"), Path("b"), 9)


def test_the_first_model_alone_is_loaded_ahead(made):
    models = [Choice(name, name, Path(name)) for name in ("best", "other")]
    stand_ins, _ = made("", models=models)
    stand_ins["load_ahead"].assert_called_once_with(models[0])
