"""The app over HTTP and in a real browser, on a smoke checkpoint that knows its answers.

Each test asks a server of its own session; the browser tests skip where no Chromium is installed.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from qa_lib.__main__ import main
from qa_lib.app import MAX_QUESTION, _names, create_app, examples, named, offered
from qa_lib.data.squad import MAX_CONTEXT, open_source
from qa_lib.errors import SIGNALS, UserError
from qa_lib.model.hf_checkpoint import write_digests
from qa_lib.record import new_record, read_record
from qa_lib.report import figures, style
from qa_lib.report.page import dashboard
from qa_lib.run.fit import fit
from qa_lib.run.plan import plan
from qa_lib.score import ask
from qa_lib.score.ask import WAITING, Busy, Desk, QuestionTooLong, answer, load
from tests.test_report import GPU, make

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLIENT = httpx.Client(timeout=60)  # making one takes longer than an answer
LOAD_SECONDS = int(os.environ.get("QA_LIB_LOAD_SECONDS", 4))  # 60 for the figures that are reported
HEAD = "qa_outputs.weight"
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["qa_lib.app", "tests.test_app"])
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two smoke runs with their checkpoints, one of them with a notebook, and a third whose record is cut short.

    A2 is A1 once more, with other weights and a better F1.
    """
    folder = tmp_path_factory.mktemp("app") / "runs"
    first, second = plan(["A1", "A2"], "smoke")
    fit(first, folder, say=lambda _: None)
    other = shutil.copytree(folder / first.run_path, folder / second.run_path)
    weights = load_file(other / "model" / "model.safetensors")
    save_file(weights | {HEAD: 1.1 * weights[HEAD]}, other / "model" / "model.safetensors", {"format": "pt"})
    write_digests(other / "model")
    entry = json.loads((other / "record.json").read_text())
    entry["spec"] = new_record(second, {})["spec"]
    entry["quality"] |= {"best_f1": 99.94, "best_f1_threshold": 3.25}
    (other / "record.json").write_text(json.dumps(entry | {"run_id": other.name}))
    broken = folder / "cpu-smoke" / "A3-s0-abcdef"
    broken.mkdir()
    (broken / "record.json").write_text('{"schema": "qa_lib/1", "status":')
    notebook = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    cell = {"cell_type": "code", "id": "a", "execution_count": 1, "metadata": {}, "source": "1"}
    text = f"loss 0.5 <script>alert(1)</script> written to {folder}/cpu-smoke"
    output = {"output_type": "stream", "name": "stdout", "text": text}
    notebook["cells"].append(cell | {"outputs": [output]})
    (next(folder.glob("cpu-smoke/A1-*")) / "notebook.ipynb").write_text(json.dumps(notebook))
    return folder


class Started:
    """The app in a process of its own, forked from one that has imported it: ten seconds sooner than by a command."""

    def __init__(self, runs, slow=False):
        self.log = runs.parent / f"log-{time.monotonic_ns()}"
        self.process = FORK.Process(target=_serve, args=(self.log, runs, slow))
        self.process.start()
        end = time.monotonic() + 60
        while not self.log.exists() or "\n" not in self.log.read_text():
            assert time.monotonic() < end and self.process.is_alive()
            time.sleep(0.05)
        self.line = self.log.read_text()
        self.address = ADDRESS.search(self.line).group()

    def ended(self, number=signal.SIGTERM):
        """What it says, and its exit code, when it has been sent a signal; it has five seconds."""
        os.kill(self.process.pid, number)
        self.process.join(5)
        assert self.process.exitcode is not None, "it goes on"
        return self.log.read_text().removeprefix(self.line), self.process.exitcode


def _serve(log, runs, slow):
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if slow:
        ask.answer, ask.load = lambda *_: time.sleep(30), lambda folder: SimpleNamespace(small=True)
    os._exit(main(["app", "--runs", str(runs), "--port", "0"]))


@pytest.fixture(scope="module")
def server(runs):
    """The app without --model: (address, process, seconds it took to open)."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "qa_lib", "app", "--runs", str(runs), "--port", "0"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    line = process.stdout.readline()
    address = ADDRESS.search(line)
    assert address, line
    CLIENT.get(address.group()).raise_for_status()
    yield address.group(), process, time.monotonic() - begin
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module")
def questions():
    """Short generated questions, answerable and not, that the model has not been trained on."""
    return [e for e in open_source("synthetic:400", "validation").examples if len(e.context) < 300]


def key_of(runs, variant="A1"):
    (folder,) = runs.glob(f"cpu-smoke/{variant}-*/model")
    return f"cpu-smoke/{folder.parent.name}"


def post(server, runs, question, context, model=None):
    body = {"question": question, "context": context, "model": model or key_of(runs)}
    return CLIENT.post(f"{server[0]}/ask", json=body)


def test_it_opens_within_ten_seconds_and_listens_on_this_machine_alone(server):
    assert server[2] < 10 * (3 if os.environ.get("CI") else 1.5)  # the clock here is shared
    addresses = {c.laddr.ip for c in psutil.Process(server[1].pid).net_connections("tcp") if c.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}
    assert CLIENT.get(server[0], headers={"Host": "evil.example"}).status_code == 400


def test_answers_are_right_and_their_places_as_well(server, runs, questions):
    right = 0
    for example in questions[:30]:
        reply = post(server, runs, example.question, example.context).json()
        assert set(reply["ms"]) == {"tokenise", "model", "decode", "wait"} and reply["windows"] == 1
        for entry in reply["nbest"]:
            if entry["text"]:
                assert example.context[entry["begin"] : entry["end"]] == entry["text"]
        right += reply["answer"] in ([text for text, _ in example.answers] or [""])
    assert right >= 24


def test_a_long_paragraph_is_windowed(server, runs, questions):
    context = " ".join(example.context for example in questions[:20])
    assert post(server, runs, questions[0].question, context).json()["windows"] > 5


@pytest.mark.parametrize(
    ("question", "context", "status", "field"),
    [
        ("  ", "some text", 422, "question"),
        ("who ?", "", 422, "context"),
        ("who ?", "a" * (MAX_CONTEXT + 1), 422, "context"),
        ("who ?", "a " * 1_000_000, 413, "context"),
        ("who " * 400, "some text", 422, "question"),
    ],
)
def test_bad_input_is_refused_beside_its_field(server, runs, question, context, status, field):
    reply = post(server, runs, question, context)
    assert (reply.status_code, reply.json()["field"]) == (status, field)
    assert reply.json()["message"].endswith(".")


def test_models_are_named_by_run_and_never_by_path(server, runs):
    for name in ("../../etc", str(runs), "cpu-smoke/A9-s0-000000"):
        assert post(server, runs, "who ?", "text", model=name).status_code == 404
    for path in ("/runs/../../etc/passwd", "/runs/cpu-smoke/..%2f..%2fx/notebook", "/static/x", "/web/ask.js"):
        assert CLIENT.get(server[0] + path).status_code == 404
    for page in ("/", "/dashboard"):
        assert str(runs.parent) not in CLIENT.get(server[0] + page).text
    assert CLIENT.post(f"{server[0]}/ask", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_notebook_runs_no_script_and_tells_no_path(server, runs):
    reply = CLIENT.get(f"{server[0]}/runs/{key_of(runs)}/notebook.ipynb")
    assert "loss 0.5" in reply.text and "…/cpu-smoke" in reply.text and str(runs) not in reply.text
    assert reply.headers["content-security-policy"].startswith("sandbox; default-src 'none'")


def test_without_a_checkpoint_the_page_says_how_to_get_one(tmp_path):
    client = TestClient(create_app([], tmp_path, ["testserver"]))
    assert "make quickstart" in client.get("/").text
    assert "There are no records yet" in client.get("/dashboard").text


@pytest.mark.parametrize(
    ("variant", "spoil", "said"),
    [
        ("A2", lambda record: "{", ".json: not readable as JSON"),
        ("A2", lambda record: json.dumps(record | {"speed": {"features_per_s": "fast"}}), "features_per_s is"),
        ("A2", lambda record: json.dumps(record | {"spec": None}), "spec is"),
        ("A1", lambda record: json.dumps(record | {"schema": "other/9"}), "the baseline A1 has no record"),
        ("A1", lambda record: json.dumps(record | {"time": []}), "time is"),
        (
            "A2",
            lambda record: json.dumps(record | {"spec": record["spec"] | {"adjusted": [{}]}}),
            "spec.adjusted[0] is",
        ),
    ],
    ids="cut-short text-for-number no-spec other-schema list-for-object notes".split(),
)
def test_a_corrupt_record_is_marked_and_the_page_lives(runs, tmp_path, variant, spoil, said):
    for path in runs.glob("cpu-smoke/*/record.json"):
        for group in ("cpu-smoke", "another"):
            copy = tmp_path / group / path.parent.name / "record.json"
            copy.parent.mkdir(parents=True)
            copy.write_text(path.read_text().replace('"group": "cpu-smoke"', f'"group": "{group}"'))
    (spoilt,) = tmp_path.glob(f"cpu-smoke/{variant}-*/record.json")
    spoilt.write_text(spoil(json.loads(spoilt.read_text())))
    html, _ = dashboard(tmp_path, lambda runs, group: ({}, {}), None)
    whole, marked = html.split('data-group="cpu-smoke"')
    assert said in marked and spoilt.parent.name in marked
    assert "A1</button>" in whole and "A2</button>" in whole
    assert str(tmp_path) not in html


def test_a_folder_with_pickles_is_refused_with_the_reason(runs, tmp_path, capsys):
    (folder,) = runs.glob("cpu-smoke/A1-*/model")
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert main(["app", "--model", str(tmp_path / "model"), "--port", "0"]) == 2
    assert "a pickle, which could run any code" in capsys.readouterr().err


def test_a_taken_port_is_said_in_one_line(server, capsys):
    assert main(["app", "--port", server[0].rsplit(":", 1)[1]]) == 2
    assert "--port takes another" in capsys.readouterr().err


def test_a_crowd_gets_its_own_answers_beside_many_who_hang_up(server, runs, questions):
    """A hundred askers of paragraphs of any length, for LOAD_SECONDS, beside five hundred who ask and leave."""
    texts = {e.id: " ".join(other.context for other in questions[i : i + (1, 1, 1, 4, 30)[i % 5]])
             for i, e in enumerate(questions[:100])}  # fmt: skip
    bodies = [{"question": e.question, "context": texts[e.id], "model": key_of(runs)} for e in questions[:100]]
    alone = [CLIENT.post(f"{server[0]}/ask", json=body).json()["answer"] for body in bodies]
    process, waits, busy, failed, sizes = psutil.Process(server[1].pid), [], 0, [], []

    async def asker(client, body, answer, until):
        nonlocal busy
        while time.monotonic() < until:
            begin = time.monotonic()
            reply = await client.post(f"{server[0]}/ask", json=body)
            if reply.status_code == 503:  # said in time, and to be asked again
                busy += 1
                await asyncio.sleep(1)
                continue
            waits.append(time.monotonic() - begin)
            found = reply.json()
            right = all(body["context"][e["begin"] : e["end"]] == e["text"] for e in found["nbest"] if e["text"])
            if reply.status_code != 200 or not right or found["answer"] != answer:
                failed.append(found)

    async def leaver(number, until):
        """Sends all of a question, or half of it, or half a head, and hangs up: one of 500 in the time there is."""
        await asyncio.sleep((until - time.monotonic()) * number / 500)
        host, port = server[0].removeprefix("http://").split(":")
        body = json.dumps(bodies[number % 100]).encode()
        head = f"POST /ask HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        request = head.encode() + b"\r\n\r\n" + body
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request[: (len(request), len(request) // 2, 20)[number % 3]])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def crowd(seconds):
        until = time.monotonic() + seconds
        # Idle connections are left sooner than by the server, which may close one while a question is on its way.
        limits = httpx.Limits(max_connections=400, keepalive_expiry=1)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            asking = [asker(client, *of, until) for of in zip(bodies, alone, strict=True)]
            await asyncio.gather(*asking, *(leaver(number, until) for number in range(500)))
        sizes.append(process.memory_info().rss / 2**20)

    asyncio.run(crowd(3))  # to warm up
    waits.clear()
    asyncio.run(crowd(LOAD_SECONDS))
    p50, p95 = (sorted(waits)[int(share * len(waits))] for share in (0.5, 0.95))
    print(
        f"{len(waits)} answered in {LOAD_SECONDS} s, {busy} times busy, {p50:.2f} s at the median, {p95:.2f} s at p95"
    )
    print(f"{max(waits):.2f} s at most; {sizes[0]:.0f} MiB, then {sizes[1]:.0f}")
    assert failed == []
    assert len(waits) > 10 * LOAD_SECONDS
    assert sizes[1] - sizes[0] < 50
    begin = time.monotonic()
    assert post(server, runs, questions[0].question, questions[0].context).status_code == 200
    assert time.monotonic() - begin < 3, "nothing of those who left is waiting"


def test_what_is_too_much_is_refused_and_the_rest_answered(runs, questions):
    desk, (folder,) = Desk(), runs.glob("cpu-smoke/A1-*/model")
    accepted = []
    with pytest.raises(Busy, match="busy: 64 questions are waiting"):
        for _ in range(100 * WAITING):  # in less time than it takes to load the model
            accepted.append(desk.ask(folder, "who came ?", questions[0].context))
    assert len(accepted) >= WAITING
    assert {future.result(60)["answer"] for future in accepted} == {accepted[0].result()["answer"]}


def test_a_question_that_would_cut_its_paragraph_into_very_many_pieces_is_refused(runs):
    (folder,) = runs.glob("cpu-smoke/A1-*/model")
    loaded = load(folder)
    length = loaded.max_length - loaded.stride - 4  # leaves a window one token more than the overlap
    with pytest.raises(QuestionTooLong, match=r"in \d,\d{3} pieces"):
        answer(loaded, [("who " * length, "she " * 3_000)])
    assert answer(loaded, [("who came", "she " * 3_000)])[0]["windows"] < 100


def test_a_checkpoint_that_was_written_again_is_loaded_again(runs, tmp_path):
    old, new = (next(runs.glob(f"cpu-smoke/{name}-*/model")) for name in ("A1", "A2"))
    folder, desk = tmp_path / "model", Desk()
    shutil.copytree(old, folder)

    def margin(of):
        return desk.ask(of, "who", "it was she").result(60)["margin"]

    first, other = margin(folder), margin(new)
    assert first != other
    shutil.copytree(new, folder, dirs_exist_ok=True)
    assert margin(folder) == other


def test_a_checkpoint_that_is_refused_is_loaded_once_for_all_who_wait_for_it(tmp_path, monkeypatch):
    loads, gate = [], threading.Event()

    def refuse(folder):
        loads.append(folder)
        gate.wait(20)
        raise UserError("pickles")

    monkeypatch.setattr(ask, "load", refuse)
    desk = Desk()
    first = desk.ask(tmp_path / "other", "who", "she")  # while it is refused, the others gather
    refused = [desk.ask(tmp_path, "who", "she") for _ in range(5)]
    gate.set()
    assert [str(future.exception(20)) for future in (first, *refused)] == ["pickles"] * 6
    assert loads == [tmp_path / "other", tmp_path]


def test_of_questions_that_are_asked_together_one_that_cannot_be_answered_fails_alone(runs, questions):
    (folder,) = runs.glob("cpu-smoke/A1-*/model")
    desk = Desk()
    asked = [desk.ask(folder, question, "she " * 3_000) for question in ("who", "who " * 60, "who")]
    first, long, last = (future.exception(60) for future in asked)
    assert first is last is None and isinstance(long, QuestionTooLong)


def test_every_paragraph_within_the_limit_fits_into_a_request(runs):
    client = TestClient(create_app([], runs, ["testserver"]))
    emoji = "\U0001f600"
    asked = json.dumps({"model": key_of(runs), "question": MAX_QUESTION * emoji, "context": MAX_CONTEXT * emoji})
    assert asked.isascii() and len(asked) > 12 * MAX_CONTEXT  # as clients escape it that know ASCII alone
    assert client.post("/ask", content=asked, headers={"content-type": "application/json"}).status_code != 413


@pytest.mark.parametrize(
    ("host", "address", "local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.2", True),
        ("::1", "::1", True),
        ("localhost", "127.0.0.1", True),
        ("0.0.0.0", "0.0.0.0", False),
        ("lab", "10.0.0.7", False),
    ],
)
def test_where_only_this_machine_reaches_it_no_other_names_are_answered(runs, host, address, local):
    client = TestClient(create_app([], runs, _names(host, address)))
    own = f"[{host}]:8600" if ":" in host else f"{host}:8600"
    assert client.get("/", headers={"host": own}).status_code == 200
    assert client.get("/", headers={"host": "foreign.example"}).status_code == (400 if local else 200)


def test_busy_is_said_to_the_asker(runs, monkeypatch):
    client = TestClient(create_app([], runs, ["testserver"]))
    monkeypatch.setattr("qa_lib.score.ask.WAITING", 0)
    reply = client.post("/ask", json={"question": "who ?", "context": "text", "model": key_of(runs)})
    assert reply.status_code == 503 and reply.json()["message"].startswith("busy")


def half_sent(server, size=10_000):
    """A connection over which a question is being sent and no more comes."""
    host, port = server[0].removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /ask HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode() + b'{"question": "wh')
    return connection


def test_questions_of_askers_who_left_are_dropped(runs, monkeypatch):
    """While one question is in work, others come, and their askers leave: they are never begun."""
    seen, gate = [], threading.Event()

    def slow(loaded, questions):
        seen.extend(question for question, _ in questions)
        if "first" in seen:  # and not while the model is warmed up
            gate.wait(20)
        return [{"answer": "", "ms": {}} for _ in questions]

    app = create_app([], runs, ["testserver"])
    monkeypatch.setattr("qa_lib.score.ask.answer", slow)

    async def scenario():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:

            def post(question):
                body = {"question": question, "context": "text", "model": key_of(runs)}
                return asyncio.ensure_future(client.post("/ask", json=body, timeout=60))

            first = post("first")
            while "first" not in seen:
                await asyncio.sleep(0.05)
            leaving = [post(f"left {i}") for i in range(5)]
            last = post("last")
            await asyncio.sleep(0.3)
            for asker in leaving:
                asker.cancel()
            await asyncio.sleep(0.1)
            gate.set()
            return (await first).status_code, (await last).status_code

    assert asyncio.run(scenario()) == (200, 200)
    assert [question for question in seen if question.startswith(("first", "left", "last"))] == ["first", "last"]


def test_an_asker_who_closes_the_connection_has_left(runs):
    """As the server reports it: the request, then that nobody listens any more."""
    app, sent = create_app([], runs, ["testserver"]), []
    body = json.dumps({"question": "who ?", "context": "a " * 40_000, "model": key_of(runs)}).encode()
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
    headers = [(b"host", b"testserver"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/ask", "query_string": b"", "headers": headers}

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499


def test_who_leaves_stops_or_says_nothing_is_borne_in_silence_and_gives_the_place_back(runs):
    app = Started(runs)
    server = (app.address,)
    host, port = server[0].removeprefix("http://").split(":")
    half_sent(server).close()
    stopped = [half_sent(server) for _ in range(20)]
    assert CLIENT.get(server[0]).status_code == 200
    silent = [socket.create_connection((host, int(port))) for _ in range(520)]  # more than are served at once
    for connection in silent[::2]:
        connection.sendall(b"GET / HT")
    end = time.monotonic() + 15
    with contextlib.suppress(httpx.TransportError):
        assert httpx.get(server[0]).status_code == 503, "all places are taken"  # over a connection behind the others
    while CLIENT.get(server[0]).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert stopped[0].recv(100).startswith(b"HTTP/1.1 408 ")
    waiting = half_sent(server)
    time.sleep(0.3)
    assert "Traceback" not in app.ended()[0]
    for connection in (*silent, *stopped, waiting):
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_the_app_and_questions_in_work_are_answered(runs, questions, number):
    app = Started(runs)
    server = (app.address,)
    post(server, runs, "who ?", "it was she")  # so that the model is in memory
    long = " ".join(example.context for example in questions[:40])
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(post, server, runs, questions[0].question, long) for _ in range(4)]
        time.sleep(0.2)
        said = app.ended(number)
        assert [future.result().status_code for future in asked] == [200] * 4
    assert said == (f"stopped by {SIGNALS[number]}; finished runs are kept\n", 130)


def test_the_app_ends_in_time_while_a_question_takes_long(runs, tmp_path):
    """A model that computes for half a minute: the asker hears an error, and the thread that answers is left behind."""
    app = Started(runs, slow=True)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, (app.address,), runs, "who ?", "it was she")
        time.sleep(1)
        said, _ = app.ended()
        with contextlib.suppress(httpx.TransportError):
            assert asked.result().status_code == 499
    assert "Traceback" not in said


def test_the_pages_stand_while_run_folders_come_and_go(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {"cost": figures.fig_cost})
    monkeypatch.setattr(style, "png", lambda figure: b"a picture")  # which takes most of the time, and reads nothing
    source, folder = next(runs.glob("cpu-smoke/A1-*")), tmp_path / "runs"
    shutil.copytree(source, folder / "cpu-smoke" / source.name)
    client, over = TestClient(create_app([], folder, ["testserver"])), threading.Event()

    def churn(number):
        copy = folder / f"group{number}" / source.name
        while not over.is_set():
            copy.mkdir(parents=True)
            shutil.copy(source / "record.json", copy)
            shutil.rmtree(copy.parent)

    with ThreadPoolExecutor() as pool:
        try:
            for number in range(3):
                pool.submit(churn, number)
            assert [client.get("/dashboard").status_code for _ in range(15)] == [200] * 15
            assert [client.get("/").status_code for _ in range(100)] == [200] * 100
        finally:
            over.set()


def test_an_empty_host_is_refused(capsys):
    assert main(["app", "--host", "", "--port", "0"]) == 2
    assert "--host is empty" in capsys.readouterr().err


def test_models_of_one_name_are_told_apart(runs, tmp_path):
    (model,) = runs.glob("cpu-smoke/A1-*/model")
    for name in ("one/bert", "other/bert", "third"):
        shutil.copytree(model, tmp_path / name)
    given = named([tmp_path / "one/bert", tmp_path / "other/bert", tmp_path / "third"])
    html = TestClient(create_app(given, tmp_path, ["*"])).get("/").text
    names = re.findall(r"<option value=\"model \d\"[^>]*>(.*?)</option>", html)
    assert names == ["bert (model 1)", "bert (model 2)", "third"] * 2


def test_the_best_model_comes_first_and_those_of_synthetic_text_last(runs, tmp_path):
    for source in runs.glob("cpu-smoke/A[12]-*"):
        shutil.copytree(source, tmp_path / "cpu-smoke" / source.name)
    real = tmp_path / "h200-local" / "E1-s2-aaaaaa"
    shutil.copytree(next(runs.glob("cpu-smoke/A1-*")), real)
    entry = json.loads((real / "record.json").read_text())
    entry["data"]["name"], entry["quality"]["best_f1"] = "squad", 76.0
    entry["spec"] |= {"variant": "E1", "seed": 2}
    (real / "record.json").write_text(json.dumps(entry))
    found = offered(tmp_path)
    assert [choice.name for choice in found] == [
        "E1-s2 · smoke · F1 76.0", "A2-s0 · smoke · F1 99.9", f"A1-s0 · smoke · F1 {found[2].f1:.1f}"
    ]  # fmt: skip
    assert [choice.examples for choice in found] == ["english", "synthetic", "synthetic"]
    assert found[1].threshold == 3.25 and found[2].f1 > 90
    for spoilt in ("x", None, [], float("inf")):
        entry["quality"]["best_f1"], entry["task"] = spoilt, entry["task"] | {"scores": []}
        (real / "record.json").write_text(json.dumps(entry))
        assert len(offered(tmp_path)) == 2


def test_a_runs_folder_is_asked_with_its_own_threshold(runs):
    (run,) = runs.glob("cpu-smoke/A2-*")
    (choice,), (other,) = named([run]), named([str(run / "model")])
    assert choice == other and choice.name == "A2-s0 · smoke · F1 99.9" and choice.folder == run / "model"
    html = TestClient(create_app([choice], runs, ["testserver"])).get("/").text
    assert html.count("A2-s0") == 2 and 'value="model 1" data-examples="synthetic" data-threshold="3.25"' in html


def test_the_first_english_example_is_a_paragraph_with_three_questions():
    found = examples()["english"]
    assert len(found) == 3 and len({example["context"] for example in found}) == 1
    assert [example["name"].endswith("(no answer)") for example in found] == [False, False, True]


@pytest.mark.parametrize(("host", "frames"), [("127.0.0.1", "'none'"), ("0.0.0.0", "*")])
def test_a_foreign_page_may_frame_it_only_where_others_may_call_it(runs, host, frames):
    client = TestClient(create_app([], runs, _names(host, host)), base_url="http://127.0.0.1")
    assert client.get("/").headers["content-security-policy"].endswith(f"frame-ancestors {frames}")


def test_the_dashboard_opens_on_the_newest_group_and_keeps_cells_apart(tmp_path):
    for seed, size in ((0, 8), (1, 16)):
        make(tmp_path, "A1", seed, micro_batch=size)
        make(tmp_path, "A2", seed, micro_batch=size)
    newer = make(tmp_path, "A1", machine=GPU)
    for path in tmp_path.glob("*/*/record.json"):
        entry = json.loads(path.read_text())
        entry["time"]["started"] = f"2026-01-0{1 + (path.parent == newer)}T00:00:00+00:00"
        if path.parent == newer:
            entry["model"] |= {"name": "bert-base", "params_total": 109_000_000}
        path.write_text(json.dumps(entry))
    html, _ = dashboard(tmp_path, lambda runs, group: ({}, {}), None)
    first, second = re.split("<section ", html)[1:]
    assert f'data-group="{newer.parent.name}"' in first and "smaller than BERT-base" not in first
    assert 'data-group="cpu-smoke"' in second and "tiny (75 k parameters), smaller than BERT-base" in second
    results = second[second.index('<table class="rows results">') : second.index("</table>")]
    large, small = results.split("<tbody>")[1:]
    assert "micro-batch 16" in large and "micro-batch 8" in small
    assert all(part.count("data-panel") == 2 for part in (large, small))
    assert 'class="more number"' in results and 'href="#cpu-smoke/ladder"' in second
    # The app sends one group at a time, so that of fifty the first is there as soon as an only one would be.
    for wanted, shown in (("", newer.parent.name), ("cpu-smoke", "cpu-smoke"), ("none", newer.parent.name)):
        html, _ = dashboard(tmp_path, lambda runs, group: ({}, {}), None, True, wanted)
        assert re.findall('<section .*?data-group="(.*?)"', html) == [shown]
        assert html.count("<option>") + html.count("<option selected>") >= 2 and f"<option selected>{shown}<" in html


def test_the_pages_outlive_runs_that_vanish_and_records_that_are_nested_deeply(runs, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "cpu-smoke"
    shutil.copytree(next(runs.glob("cpu-smoke/A1-*")), folder / "A1-s0-aaaaaa")
    shutil.copytree(next(runs.glob("cpu-smoke/A1-*")), folder / "A1-s1-bbbbbb")
    (folder / "A1-s1-bbbbbb" / "record.json").write_text("[" * 100_000)
    client = TestClient(create_app([], tmp_path / "runs", ["testserver"]))
    assert client.get("/").status_code == client.get("/dashboard").status_code == 200
    glob = Path.glob
    gone = folder / "A1-s2-cccccc" / "record.json"
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*glob(path, pattern), gone])
    assert client.get("/dashboard").status_code == 200
    monkeypatch.undo()
    key = "cpu-smoke/A1-s0-aaaaaa"
    shutil.rmtree(folder)
    reply = client.post("/ask", json={"question": "who ?", "context": "text", "model": key})
    assert reply.status_code in (200, 422)  # asked already, so in memory; or gone


def test_the_static_page_is_whole_and_small_and_loads_nothing(runs, tmp_path):
    out = tmp_path / "lab.html"
    assert main(["report", "--runs", str(runs), "--figures", str(tmp_path / "figures"), "--html", str(out)]) == 0
    text = out.read_text()
    assert len(text) < 5e6 and str(runs.parent) not in text
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    record = read_record(next(runs.glob("cpu-smoke/A1-*")))
    assert f"{record['quality']['f1']:.2f}" in text and "A3-s0-abcdef" in text


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """A page that fails the test if a script fails or the policy stops something."""
    problems = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(server[0])
    yield page
    notebook = page.url.endswith("/notebook.ipynb")  # in whose sandbox a browser complains of every script
    page.close()
    # A refused request is shown by the browser as an error of its own.
    assert notebook or [text for text in problems if "status of 4" not in text] == []


def put(page, question, context):
    page.fill("#context", context)
    page.fill("#question", question)
    page.click("#ask")
    page.locator("#ask", has_text=re.compile("^Ask$")).wait_for()  # it says otherwise while the server works


def fits(page):
    """Whether nothing is wider than the window."""
    return page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_browser_answer_is_marked_in_its_place_and_the_threshold_decides(page, questions):
    example = next(example for example in questions if example.answers)
    context = f"😀 {example.context}"  # two units of a browser's string, one character here
    put(page, example.question, context)
    assert page.text_content(".paragraph") == context
    best = page.text_content(".answer")
    assert page.text_content("mark") == best != ""
    assert "tokenise" in page.text_content(".latency") and page.locator(".nbest tbody tr").count() > 1
    slider = page.locator(".card input[type=range]")
    slider.focus()
    page.keyboard.press("Home")  # the lowest threshold: any margin is over it
    assert page.text_content(".answer") == "No answer" and page.locator("mark").count() == 0
    page.keyboard.press("End")
    assert page.text_content("mark") == best
    assert fits(page)


def test_browser_no_answer_is_said_with_its_margin(page, questions):
    for example in [example for example in questions if example.impossible][:10]:
        put(page, example.question, example.context)
        if page.text_content(".answer") == "No answer":
            assert re.search(r"scores [\d.]+ (above|below) .*: [\d.]+ over the threshold", page.text_content(".margin"))
            return
    pytest.fail("ten unanswerable questions were all answered")


def test_browser_compares_two_checkpoints_and_offers_examples(page, runs):
    assert "No model was named" in page.text_content(".note")
    page.select_option("#model", key_of(runs, "A1"))
    page.select_option("#other", key_of(runs, "A2"))
    page.click("#examples button >> nth=0")
    page.wait_for_selector(".card >> nth=1")
    names = page.locator(".card .name").all_text_contents()
    assert [name[:3] for name in names] == ["A1-", "A2-"]
    assert page.locator(".latency").count() == 2
    assert page.locator(".card output").nth(1).text_content() in ("3.2", "3.3")  # its own, not the other's


@pytest.mark.parametrize("width", [1280, 390])
def test_browser_shows_the_answer_where_the_eye_is(page, width):
    """The first example is filled in; one click, and the answer stands inside the window."""
    page.set_viewport_size({"width": width, "height": 844})
    page.reload()
    assert page.locator("#model option").first.text_content() == "A2-s0 · smoke · F1 99.9"
    assert page.input_value("#context") and page.input_value("#question")
    page.click("#ask")
    place = page.locator(".answer").bounding_box()
    assert place["y"] >= 0 and place["y"] + place["height"] <= 844
    assert fits(page)


def test_browser_lists_answers_without_the_punctuation_around_them(page):
    spans = [(", they and", 0.0), ("they and", -1.0), ("", -2.0), (".", -3.0)]
    places = [(4, 4 + len(text)) if text else (None, None) for text, _ in spans]
    nbest = [
        {"text": text, "begin": begin, "end": end, "score": score, "probability": 0.1}
        for (text, score), (begin, end) in zip(spans, places, strict=True)
    ]
    reply = {"nbest": nbest, "margin": -2.0, "windows": 1, "window_tokens": 9, "together": 1}
    reply["ms"] = dict.fromkeys(("tokenise", "model", "decode", "wait"), 0.5)
    page.route("**/ask", lambda route: route.fulfill(json=reply))
    put(page, "who ?", "with, they and all")
    assert page.text_content("mark") == "they and"
    assert page.locator(".nbest tbody td:first-child").all_text_contents() == ["they and", "no answer", "."]
    assert page.locator(".nbest button").all_text_contents() == ["they and", "."]  # the rest is no link


def test_browser_shows_html_as_text_and_errors_beside_their_fields(page):
    put(page, "who ?", '<img src=x onerror="alert(1)"><script>alert(2)</script> then alice came .')
    assert "<script>alert(2)</script>" in page.text_content(".paragraph")
    assert page.locator("#results img, #results script").count() == 0
    put(page, " ", "some text")
    assert "question" in page.text_content("#question-error").lower()
    assert page.get_attribute("#question", "aria-invalid") == "true"


def test_browser_dashboard_filters_and_opens_a_row(page, server):
    page.goto(f"{server[0]}/dashboard", timeout=60_000)
    visible = "section.group:not([hidden]) tr[data-panel]:not([hidden])"
    assert page.locator(visible).count() >= 2
    heading = page.locator("section.group:not([hidden]) .results thead button", has_text="row")
    for _ in range(2):
        before = page.locator(f".results {visible.split()[-1]} th button").all_text_contents()
        heading.click()
        assert page.locator(f".results {visible.split()[-1]} th button").all_text_contents() == before[::-1]
    page.fill("#search", "sdpa")
    assert set(page.locator(f"{visible} th button").all_text_contents()) == {"A2"}
    page.fill("#search", "")
    page.select_option("#rows", "B")
    assert page.locator(visible).count() == 0 and "No row" in page.text_content("section .empty:visible")
    page.select_option("#rows", "all")
    page.click("tr[data-panel='cpu-smoke/A2'] >> nth=0")
    dialog = page.locator("dialog[open]")
    assert "attention" in dialog.text_content() and "eager" in dialog.text_content()
    page.keyboard.press("Escape")
    assert "A3-s0-abcdef" in page.content()
    page.click("tr[data-panel='cpu-smoke/A1'] >> nth=0")
    page.click("dialog[open] a")
    page.get_by_text("loss 0.5").wait_for()


def test_browser_on_a_phone_cuts_nothing_off(page, server, questions):
    page.set_viewport_size({"width": 390, "height": 800})
    put(page, questions[0].question, questions[0].context)
    assert fits(page)
    page.goto(f"{server[0]}/dashboard#cpu-smoke/ladder", timeout=60_000)
    assert fits(page)
    table = "section.group:not([hidden]) .results"
    assert page.evaluate(f"(t => t.scrollWidth <= t.parentElement.clientWidth)(document.querySelector('{table}'))")
    headings = page.locator(f"{table} thead th:visible")
    folded = headings.count()
    page.locator("section.group:not([hidden]) input[type=checkbox]").check()
    assert headings.count() > folded >= 4


def test_browser_shows_the_group_that_is_addressed_or_chosen(browser, runs, tmp_path):
    (record,) = runs.glob("cpu-smoke/A1-*/record.json")
    for group in ("cpu-smoke", "another"):
        copy = tmp_path / group / record.parent.name / "record.json"
        copy.parent.mkdir(parents=True)
        copy.write_text(record.read_text().replace('"group": "cpu-smoke"', f'"group": "{group}"'))
    out = tmp_path / "lab.html"
    out.write_text(dashboard(tmp_path, lambda runs, group: ({}, {}), None)[0])
    page = browser.new_page()
    shown = page.locator("section.group:visible")
    for group in ("cpu-smoke", "another"):
        page.goto("about:blank")
        page.goto(f"{out.as_uri()}#{group}/ladder")
        assert shown.count() == 1 and shown.get_attribute("data-group") == group
    page.select_option("#group", "cpu-smoke")
    page.locator("section[data-group=cpu-smoke]:visible").wait_for()
    assert shown.count() == 1
    page.close()


def test_browser_static_page_works_without_a_server(browser, runs, tmp_path):
    out = tmp_path / "lab.html"
    assert main(["report", "--runs", str(runs), "--figures", str(tmp_path / "figures"), "--html", str(out)]) == 0
    page = browser.new_page(viewport={"width": 390, "height": 800})
    asked = []
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.goto(out.as_uri())
    assert page.locator("img").count() > 0 and page.evaluate("[...document.images].every((i) => i.naturalWidth > 0)")
    page.click("tr[data-panel='cpu-smoke/A2'] >> nth=0")
    assert "eager" in page.locator("dialog[open]").text_content()
    assert fits(page) and asked.count("file") == 1 and set(asked) <= {"file", "data"}
    page.close()
