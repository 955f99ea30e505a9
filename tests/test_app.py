"""The demo as its page asks it, over HTTP, and in a real browser: tests that skip where no Chromium is installed."""

import asyncio
import html
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from unittest.mock import Mock

import httpx
import psutil
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from starlette.exceptions import HTTPException

from qa_lib.__main__ import main
from qa_lib.data.squad import open_source
from qa_lib.lab.app import serving
from qa_lib.lab.app.choices import Choices, named, offered
from qa_lib.lab.app.page import MAX_CONTEXT, answer, app, dashboard, decided, running
from qa_lib.lab.launch.warm import SERVER
from qa_lib.lab.search.plan import plan
from qa_lib.model.hf_checkpoint import write_digests
from qa_lib.records.record import new_record
from qa_lib.score import predict
from qa_lib.spec.machine import Machine
from tests import hostile
from tests.conftest import slow
from tests.material import ROOT, cases, change_record, leave, python, refused, wait_for, write

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HEAD = "qa_outputs.weight"
SECONDS = 3  # of serving.SECONDS, in the server of these tests
EVIL = '<img src=x onerror="alert(1)"><script>alert(2)</script>${alert(3)}{{alert(4)}}![x](http://evil.example/x.png)'


@pytest.fixture(scope="module")
def runs(tmp_path_factory, swept):
    """Two smoke runs with their checkpoints, a third whose record is cut short, and one that is running.

    A2 is A1 once more, with other weights, a better F1, and code in its model's name.
    """
    folder = tmp_path_factory.mktemp("app") / "runs"
    first, second, running = plan(["A1", "A2", "A4"], "smoke")
    shutil.copytree(swept.folder_of("A1"), folder / first.run_path)
    other = shutil.copytree(folder / first.run_path, folder / second.run_path)
    weights = load_file(other / "model" / "model.safetensors")
    save_file(
        weights | {HEAD: 1.1 * weights[HEAD]},
        other / "model" / "model.safetensors",
        {"format": "pt"},
    )
    write_digests(other / "model")
    quality = {"best_f1": 99.94, "best_f1_threshold": 3.25}
    entry = change_record(other, spec=new_record(second, {})["spec"], quality=quality)
    write(other / "record.json", entry | {"run_id": other.name})
    broken = folder / "cpu-smoke" / "A3-s0-abcdef"
    broken.mkdir()
    (broken / "record.json").write_text('{"schema": "qa_lib/1", "status":')
    began = leave(
        folder, running, "running", {"message": EVIL}, entry["env"], spec={"planned_steps": 400}
    )
    write(began / "steps.jsonl", {"step": 7, "loss": 1.0, "lr": 0.1, "ms": 1.0})
    figure = folder.parent / "figures" / "cpu-smoke" / "ladder.png"
    figure.parent.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(figure)
    return folder


# What Python tells its audit hooks of before it is done, with a path or an address in front.
TOUCHES = (
    "open",
    "os.listdir",
    "os.scandir",
    "shutil.copyfile",
    "os.mkdir",
    "os.remove",
    "socket.connect",
)


def _serve(log, runs):
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    touched = os.open(log.with_name("touched"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event, values):
        if event in TOUCHES:
            paths = [value for value in values if isinstance(value, str | bytes | tuple)]
            os.write(touched, f"{event} {paths}\n".encode(errors="replace"))

    sys.addaudithook(note)
    serving.SECONDS = SECONDS
    os._exit(
        main(["app", "--runs", str(runs), "--figures", str(runs.parent / "figures"), "--port", "0"])
    )


class Server:
    """The app in a process of its own, forked from one that has imported most of it."""

    def __init__(self, runs):
        self.log, self.touched = runs.parent / "log", runs.parent / "touched"
        self.process = SERVER.Process(target=_serve, args=(self.log, runs))
        self.process.start()
        wait_for(
            lambda: (
                not self.process.is_alive() or (self.log.exists() and "\n" in self.log.read_text())
            )
        )
        self.address = re.search(r"http://127\.0\.0\.1:\d+", self.log.read_text()).group()
        self.client = httpx.Client(timeout=60, base_url=self.address)
        self.port = self.client.base_url.port
        self.config = self.client.get("/config").json()
        (button,) = (
            part["id"]
            for part in self.config["components"]
            if part["props"].get("elem_id") == "ask"
        )
        (self.ask,) = (
            event for event in self.config["dependencies"] if [button, "click"] in event["targets"]
        )

    def question(self, model, question, context, other="", longest=""):
        """The body that asks, as the page sends it."""
        session = os.urandom(5).hex()
        return {
            "fn_index": self.ask["id"],
            "session_hash": session,
            "data": [model, other, context, question, longest],
        }

    def moved_slider(self, *values):
        """The body that asks for the answer under another threshold, as the page sends it."""
        (number, *_) = (
            event["id"]
            for event in self.config["dependencies"]
            if len(event["inputs"]) == 5 and event["id"] != self.ask["id"]
        )
        return {"fn_index": number, "session_hash": os.urandom(5).hex(), "data": [*values]}

    def __call__(self, *question):
        """What the first card keeps of what was found, None if nothing was; and the card's updates."""
        body = self.question(*question)
        message = self.outcome(body)
        assert message["success"], message
        card = message["output"]["data"][:9]
        context, begin, end, margin = card[5:]
        found = {"context": context, "begin": begin, "end": end, "margin": margin}
        return found if context else None, card

    def outcome(self, body) -> dict:
        """What the server says in the end of an event with this body."""
        self.client.post(serving.JOIN, json=body).raise_for_status()
        lines = self.client.get(
            f"{serving.ANSWERS}?session_hash={body['session_hash']}"
        ).text.splitlines()
        said = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        (message,) = (one for one in said if one["msg"] == "process_completed")
        return message


@pytest.fixture(scope="module")
def server(runs):
    server = Server(runs)
    yield server
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.join(5)
    said = server.log.read_text()
    assert server.process.exitcode == 130 and said.endswith(
        "\nstopped by SIGTERM; finished runs are kept\n"
    )
    assert "Exception in ASGI" not in said


@pytest.fixture(scope="module")
def questions():
    """Short generated questions, answerable and not, that the model has not been trained on."""
    return [e for e in open_source("synthetic:400", "validation").examples if len(e.context) < 300]


def folder_of(runs, variant="A1"):
    (folder,) = runs.glob(f"cpu-smoke/{variant}-*/model")
    return folder


def key_of(runs, variant="A1"):
    return f"cpu-smoke/{folder_of(runs, variant).parent.name}"


ODD = [
    "😀 {} 👩\u200d👩\u200d👧",
    "e\u0301 İ ß {} ﬁ",
    "\u200b\u202e{}\u202c\ufeff",
    "東京 {}。中文",
]
ODD += ["a\r\n\n\t  {}\u00a0\x00 .", "<b>&amp; {} $&"]


@pytest.mark.parametrize("frame", ODD)
def test_answers_and_their_places_are_those_of_the_paragraph_as_it_was_typed(
    server, runs, questions, frame
):
    for example in questions[:4]:
        context = frame.format(example.context) + " " + frame.format("x")
        found, card = server(key_of(runs), example.question, context)
        begin, end, margin = found["begin"], found["end"], found["margin"]
        asked = predict.ask(folder_of(runs), example.question, context)
        best = next(entry for entry in asked["nbest"] if entry["text"])
        assert found["context"] == context and best["text"] == context[begin:end]
        assert margin == pytest.approx(asked["margin"], abs=1e-3)
        pieces = re.fullmatch(
            r'<div class="text">(.*)<mark>(.*)</mark>(.*)</div>',
            decided(**found, threshold=1e9)[1],
            re.DOTALL,
        )
        assert [html.unescape(part) for part in pieces.groups()] == [
            context[:begin],
            context[begin:end],
            context[end:],
        ]
        assert card[1]["value"] == (
            "No answer" if margin > card[3]["value"] else context[begin:end]
        )


def test_answers_are_right_and_long_paragraphs_windowed(server, runs, questions):
    def right(example):
        text = server(key_of(runs), example.question, example.context)[1][1]["value"]
        return text in ([text for text, _ in example.answers] or ["No answer"])

    assert sum(right(example) for example in questions[:30]) >= 24
    _, card = server(
        key_of(runs), "who came ?", " ".join(example.context for example in questions[:20])
    )
    assert int(re.search(r"(\d+) windows", card[4]["value"])[1]) > 5
    assert all(f"{part} " in card[4]["value"] for part in ("tokenize", "model", "decode"))


@pytest.mark.parametrize(
    ("question", "times", "context", "as_often", "said"), cases("questions that are refused")
)
def test_what_cannot_be_asked_is_said_in_place_of_the_answer(
    server, runs, question, times, context, as_often, said
):
    found, (_, answer, marked, *_) = server(key_of(runs), question * times, context * as_often)
    assert found is None and said in answer["value"] and marked["visible"] is False


def test_every_paragraph_within_the_limit_is_answered(server, runs):
    asked = json.dumps(server.question(key_of(runs), "who ?", "\U0001f600" * MAX_CONTEXT))
    assert asked.isascii() and 12 * MAX_CONTEXT < len(asked) <= serving.MAX_BODY
    assert (
        " windows of " in server(key_of(runs), "who ?", "😀 " * (MAX_CONTEXT // 2))[1][4]["value"]
    )


def test_an_answer_is_as_long_as_the_page_says(server, runs):
    context = "then alice baker came . bob cook came"
    most = {}
    for longest in ("", " 1 "):
        found = server(key_of(runs), "who came ?", context, "", longest)[0]
        most[longest] = len(found["context"][found["begin"] : found["end"]].split())
    assert most[" 1 "] == 1 <= most[""]
    for wrong in ("0", "-1", "1.5", "x", "9" * 12, "9" * 30):
        found, (_, said, *_) = server(key_of(runs), "who came ?", context, "", wrong)
        assert found is None and said["value"].startswith("The longest answer is ")


def test_models_are_called_by_run_and_never_by_path(server, runs, tmp_path):
    for key in ("../../etc", str(folder_of(runs)), "cpu-smoke/A9-s0-000000"):
        with pytest.raises(AssertionError, match="'success': False"):
            server(key, "who ?", "text")
        assert Choices([], runs).find(key) is None
    refused("no such model", answer, None, "who ?", "text")
    assert str(runs.parent) not in server.client.get("/").text


def test_hostile_model_folders_are_refused_in_a_clear_sentence(runs, tmp_path, typed):
    run = shutil.copytree(folder_of(runs).parent, tmp_path / "cpu-smoke" / "A1-s0-aaaaaa")
    choices = Choices([], tmp_path)
    (choice,) = choices.listed()
    (run / "model" / "config.json").write_text(
        '{"architectures": ["X"], "auto_map": {"AutoModel": "evil.Model"}}'
    )
    assert str(tmp_path) not in refused("cannot be asked", answer, choice, "who ?", "text")
    (run / "model" / "model.safetensors").rename(run / "model" / "pytorch_model.bin")
    assert (
        "error: " in typed("app --port 0 --model", run / "model", code=2) and choices.listed() == []
    )


def test_no_place_on_this_machine_is_told(runs, monkeypatch):
    (choice, *_) = Choices([], runs).listed()
    problem = OSError(f"{runs}/model.safetensors and /secret/place/of/mine.bin cannot be read")
    monkeypatch.setattr("qa_lib.lab.app.page._ask", Mock(side_effect=problem))
    said = refused("…/mine.bin cannot be read", answer, choice, "who ?", "text")
    assert str(runs) not in said and "secret" not in said


def test_a_checkpoint_that_is_written_again_is_loaded_again(runs, tmp_path):
    margins = []
    for variant in ("A1", "A2"):
        folder = shutil.copytree(folder_of(runs, variant), tmp_path / "model")
        margins.append(predict.ask(folder, "who", "it was she")["margin"])
        shutil.rmtree(
            folder
        )  # weights in memory are those of the file, which is not to be written over
    assert (
        margins[0]
        != margins[1]
        == predict.ask(folder_of(runs, "A2"), "who", "it was she")["margin"]
    )


def test_a_question_that_would_cut_its_paragraph_into_very_many_pieces_is_refused(runs):
    loaded = predict._loaded(folder_of(runs), 0)
    length = (
        loaded.max_length - loaded.stride - 4
    )  # leaves a window one token more than the overlap
    refused(r"in \d,\d{3} pieces", predict.answer, loaded, "who " * length, "she " * 3_000)


def test_the_best_model_comes_first_and_those_of_synthetic_text_last(runs, tmp_path):
    for variant in ("A1", "A2"):
        shutil.copytree(folder_of(runs, variant).parent, tmp_path / key_of(runs, variant))
    real = shutil.copytree(folder_of(runs).parent, tmp_path / "h200-local" / "E-packed-s2-aaaaaa")
    change_record(
        real,
        quality={"best_f1": 76.0},
        data={"name": "squad"},
        spec={"variant": "E-packed", "seed": 2},
    )
    found = offered(tmp_path)
    assert [choice.name for choice in found[:2]] == [
        "E-packed-s2 · smoke · F1 76.0",
        "A2-s0 · smoke · F1 99.9",
    ]
    assert [choice.synthetic for choice in found] == [False, True, True] and found[
        1
    ].threshold == 3.25
    for spoilt in ("x", None, [], float("inf")):
        change_record(real, quality={"best_f1": spoilt})
        assert len(offered(tmp_path)) == 2


def test_named_models_have_their_runs_threshold_and_names_of_their_own(runs, tmp_path):
    run = folder_of(runs, "A2").parent
    (choice,), (other,) = named([run]), named([str(run / "model")])
    assert (
        choice == other and choice.threshold == 3.25 and len(Choices([choice], runs).listed()) == 2
    )
    given = named(
        [shutil.copytree(run / "model", tmp_path / name) for name in ("one/bert", "other/bert")]
    )
    assert [c.name for c in Choices(given, tmp_path).listed()] == [
        "bert (model 1)",
        "bert (model 2)",
    ]


# What is let in.


@pytest.fixture
def paths(tmp_path):
    """A file, none, a pipe that nobody writes to, a device without an end, and a file of the system."""
    secret, pipe = tmp_path / "secret.txt", tmp_path / "pipe"
    secret.write_text("secret")
    os.mkfifo(pipe)
    return [str(secret), str(tmp_path / "none"), str(pipe), "/dev/zero", "/etc/passwd"]


def test_a_file_that_a_request_names_is_refused_whether_it_is_there_or_not(server, paths, tmp_path):
    """Gradio would copy it, and wait for ever at the pipe and the device."""
    answers = set()
    for value in hostile.named_files(paths):
        for place in range(4):
            body = server.question("", "who ?", "text")
            body["data"][place] = value
            answer = server.client.post(serving.JOIN, json=body)
            answers.add((answer.status_code, answer.text))
    assert answers == {(422, "a value of this event is none that the page sends")}
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
    assert server.client.post(serving.JOIN, json=SENT | change).status_code == status


NESTED = b"[" * 500_000
TEXT = json.dumps(SENT)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 422),
        (NESTED, 400),
        (b'{"fn_index": ' + b"9" * 5_000 + b"}", 400),
        (TEXT.encode("utf-16"), 400),
        (TEXT.encode("utf-8-sig"), 400),
        (TEXT.encode() + b"\xff", 400),
        (TEXT[:-1].encode(), 400),
        (b'{"session_hash": "a1", "data": []}', 422),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_body_that_is_no_event_is_refused(server, body, status):
    answer = server.client.post(
        serving.JOIN, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status and "\n" not in answer.text


def test_of_a_part_that_is_given_twice_gradio_sees_the_one_that_was_checked(server):
    text = '{"data": [{"path": "/dev/zero", "meta": {"_type": "gradio.FileData"}}], ' + TEXT[1:]
    body = json.loads(text) | {"session_hash": "b2"}
    assert server.outcome(body)["success"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "true"])
def test_a_number_that_the_page_cannot_send_is_refused(server, number):
    body = json.dumps(server.moved_slider("", 0, 0, 0.0, -7))
    answer = server.client.post(
        serving.JOIN,
        content=body.replace("-7", number),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 422


def test_an_empty_threshold_leaves_the_answer(server):
    decided = server.outcome(server.moved_slider("text", 0, 4, -1.0, -2))["output"]["data"]
    assert decided[0] == "No answer"
    outcome = server.outcome(server.moved_slider("text", 0, 4, -1.0, None))
    assert outcome["success"] and "value" not in json.dumps(outcome["output"]["data"])


def test_a_session_that_has_asked_nothing_has_no_answers(server):
    for query in (
        "",
        "?session_hash=none",
        "?session_hash=a1&session_hash=a1",
        "?session_hash=%61",
    ):
        assert server.client.get(serving.ANSWERS + query).status_code == 404


@pytest.mark.parametrize("head", ["Host", "X-Forwarded-Host"])
@pytest.mark.parametrize("host", ["[::1", "127.0.0.1:x", "999.999.999.999", "a b", "a/../b", "x@y"])
def test_a_host_that_is_none_is_refused(server, head, host):
    assert server.client.get("/", headers={head: host}).status_code == 400


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    """In a notebook, too, whose server is Gradio's own."""
    monkeypatch.setattr(serving, "SECONDS", 0.05)

    async def never():
        await asyncio.sleep(60)

    with pytest.raises(HTTPException) as caught:
        asyncio.run(serving.read_body(never))
    assert caught.value.status_code == 408


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_generated_request_opens_a_file_fails_the_server_or_hangs_it(
    server, runs, paths, tmp_path, seed
):
    """About 900 each: QA_LIB_HOSTILE=5000 sends that many more; see hostile.py."""
    times = int(os.environ.get("QA_LIB_HOSTILE", 500))
    statuses = Counter()
    begin = server.touched.stat().st_size
    for what, method, path, headers, body in hostile.requests(server.config, paths, seed, times):
        request = {"headers": headers, "content": body, "timeout": 10}
        try:
            with server.client.stream(method, path, **request) as answer:
                statuses[what, answer.status_code] += 1
        except (httpx.LocalProtocolError, httpx.InvalidURL):  # no request at all
            continue
    for raw in hostile.RAW:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw)
            connection.settimeout(2 * SECONDS)
            assert not connection.recv(100).startswith(b"HTTP/1.1 5")
    assert {status for _, status in statuses} <= {200, 400, 403, 404, 405, 413, 415, 422}, statuses
    assert statuses["event", 422] > 100 and statuses["route", 404] > 100
    assert server(key_of(runs), "who ?", "it was she")[0]
    own = (str(runs), str(runs.parent / "figures"), str(ROOT))
    places = (*own, sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/usr/")
    for line in server.touched.read_text()[begin:].splitlines():
        assert str(tmp_path) not in line
        assert line.startswith(tuple(f"{event} ['{place}" for event in TOUCHES for place in places))


@pytest.mark.slow
def test_a_signal_ends_it_within_seconds_whatever_is_at_work(tmp_path, runs):
    shutil.copytree(folder_of(runs).parent, tmp_path / "runs" / key_of(runs))
    server = Server(tmp_path / "runs")
    long = "it was she . " * (MAX_CONTEXT // 13)
    for _ in range(20):
        server.client.post(serving.JOIN, json=server.question(key_of(runs), "who ?", long))
    silent = socket.create_connection(("127.0.0.1", server.port))
    silent.sendall(POST)
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.join(8)
    assert server.process.exitcode == 130
    silent.close()


def test_only_what_the_page_asks_for_is_served(server, runs):
    for path in (
        "upload",
        "component_server",
        "call/ask",
        "run/predict",
        "api/predict",
        "run-history/connect",
    ):
        assert server.client.post(f"/gradio_api/{path}", files={"files": b"x"}).status_code == 404
    files = (
        "file=/etc/passwd",
        f"file={runs.parent}/figures/cpu-smoke/ladder.png",
        "file=http://127.0.0.1:1/x",
    )
    others = "info openapi.json runs upload_progress custom_component/1/client/component/x.js proxy=http://127.0.0.1:1/"
    for path in (*files, *others.split()):
        assert server.client.get(f"/gradio_api/{path}").status_code == 404
    for path in (
        "/monitoring",
        "/static/../../routes.py",
        "/assets/%2e%2e/%2e%2e/%2e%2e/routes.py",
    ):
        assert server.client.get(path).status_code in (403, 404)
    assert server.client.options(serving.JOIN).status_code == 404
    assert server.client.get("/").status_code == server.client.get("/config").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "8.8.8.8"])
def test_foreign_hosts_and_pages_are_refused(server, host):
    for path in ("/", "/config", serving.JOIN):
        assert server.client.get(path, headers={"Host": host}).status_code == 400
    assert (
        server.client.post(
            serving.JOIN, content=b"{}", headers={"Content-Type": "text/plain"}
        ).status_code
        == 415
    )
    policy = server.client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy and policy.endswith("frame-ancestors 'none'")


def test_other_names_are_answered_only_where_others_reach_it():
    assert "*" in serving.names("lab", "10.0.0.7")
    assert "*" not in serving.names("::1", "::1") + serving.names("localhost", "127.0.0.1")


def test_heads_and_bodies_that_are_too_large_are_refused(server):
    """The second body says no length."""
    headers, body = {"Content-Type": "application/json"}, b"x" * (serving.MAX_BODY + 1)
    for content in (body, iter([body])):
        assert server.client.post(serving.JOIN, content=content, headers=headers).status_code == 413
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * serving.MAX_HEAD)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


JSON = b"Content-Type: application/json\r\nContent-Length: 9000"
POST = b"POST /gradio_api/queue/join HTTP/1.1\r\nHost: 127.0.0.1\r\n" + JSON + b"\r\n\r\n"


@pytest.mark.parametrize(
    "begun", [slow(b"", id="no head"), slow(b"GET / HTTP/1.1\r\nX: ", id="head"), POST]
)
def test_a_byte_now_and_then_does_not_keep_a_place(server, begun):
    with socket.create_connection(("127.0.0.1", server.port)) as sender:
        begin = time.monotonic()
        sender.sendall(begun)
        sender.settimeout(0.2)
        with suppress(ConnectionError):
            while time.monotonic() < begin + 3 * SECONDS:
                try:
                    if sender.recv(100) == b"":
                        break
                except TimeoutError:
                    sender.sendall(b"x" if begun else b"")
        assert SECONDS - 1 < time.monotonic() - begin < 3 * SECONDS


@pytest.mark.slow
def test_nobody_waits_for_slow_senders(server, runs):
    """Some in their bodies, and more than are served at once that are silent or in their heads."""
    senders = []
    for sent in [POST] * 100 + [b"", b"GET / HT"] * (serving.CONNECTIONS // 2):
        senders.append(socket.create_connection(("127.0.0.1", server.port)))
        senders[-1].sendall(sent)
    for _ in range(3):
        begin = time.monotonic()
        assert httpx.get(server.address).status_code == 200
        assert time.monotonic() - begin < SECONDS - 1, "it has not waited until they were given up"
    assert server(key_of(runs), "who ?", "it was she")[0]
    for connection in senders:
        connection.close()


@pytest.mark.slow
def test_a_hundred_askers_get_their_own_answers(server, runs, questions):
    """Of paragraphs of any length, all at once and once more."""
    texts = [
        " ".join(e.context for e in questions[i : i + (1, 1, 1, 4, 30)[i % 5]]) for i in range(100)
    ]
    asked = [
        (key_of(runs), e.question, text) for e, text in zip(questions[:100], texts, strict=True)
    ]
    wanted = [server(*one)[0] for one in asked]
    assert [found["context"] for found in wanted] == texts
    place = lambda each: (each["context"], each["begin"], each["end"])  # noqa: E731
    process, sizes = psutil.Process(server.process.pid), []
    with ThreadPoolExecutor(100) as pool:
        for _ in range(2):
            found = [each for each, _ in pool.map(lambda one: server(*one), asked)]
            assert [place(each) for each in found] == [place(each) for each in wanted]
            sizes.append(process.memory_info().rss / 2**20)
    assert sizes[1] - sizes[0] < 50


# The command, and a notebook.


def test_it_opens_on_this_machine_alone(server):
    """And ends at a signal: see the fixture."""
    listening = [
        c for c in psutil.Process(server.process.pid).net_connections("tcp") if c.status == "LISTEN"
    ]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


def test_an_empty_host_and_a_taken_port_are_said_in_one_line(server, typed):
    assert "--host is empty" in typed("app --port 0 --host", "", code=2)
    assert "--port takes another" in typed("app --port", server.port, code=2)


@pytest.fixture
def notebook(monkeypatch):
    """As in a notebook, where launching does not wait."""
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)


def test_a_notebook_shows_it_without_a_public_link_and_asks_nobody(notebook, runs, monkeypatch):
    called, connect = [], socket.socket.connect
    monkeypatch.setenv("GRADIO_SHARE", "True")
    monkeypatch.setattr(
        socket.socket, "connect", lambda self, to: called.append(to) or connect(self, to)
    )
    monkeypatch.setattr(
        "gradio.networking.setup_tunnel", lambda *_, **__: called.append(("a public link",))
    )
    with closing(app(runs=runs)) as demo:
        assert httpx.get(demo.local_url).status_code == 200 and demo.share_url is None
        assert (
            httpx.post(f"{demo.local_url}gradio_api/upload", files={"files": b"x"}).status_code
            == 404
        )
        assert httpx.get(demo.local_url, headers={"Host": "evil.example"}).status_code == 400
        time.sleep(0.5)  # what would be asked in the background
        assert {to[0] for to in called} <= {"127.0.0.1", "localhost"}


PROXIES = [
    ("http_proxy", "http://127.0.0.1:9"),
    ("HTTP_PROXY", "http://proxy.example:3128"),
    ("all_proxy", "socks5://127.0.0.1:9"),
    ("https_proxy", "no address"),
    ("no_proxy", "[::1"),
]


@pytest.mark.parametrize(("name", "value"), PROXIES)
def test_a_notebook_shows_it_past_any_proxy(notebook, runs, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with closing(app(runs=runs)) as demo:
        assert httpx.get(demo.local_url, trust_env=False).status_code == 200
    assert os.environ[name] == value


def test_a_proxy_that_keeps_a_public_link_from_being_made_is_named(notebook, runs, monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    refused("while all_proxy is set: .*SOCKS", app, runs=runs, share=True)


@pytest.mark.parametrize(
    ("name", "value"), [PROXIES[2], *(slow(*pair) for pair in (PROXIES[0], *PROXIES[3:]))]
)
def test_the_command_line_imports_and_serves_it_past_any_proxy(tmp_path, name, value):
    script = """import sys, httpx
from unittest.mock import patch
from qa_lib.__main__ import main
from qa_lib import app
def serve(parent, listener):
    print("serves")
with patch("qa_lib.lab.app.page.serve", serve):
    sys.exit(main(["app", "--runs", sys.argv[1], "--port", "0"]))"""
    assert "serves" in python("-c", script, tmp_path, **{name: value}).stdout


def test_colab_shows_it_by_its_own_proxy(notebook, runs, monkeypatch):
    """Which is no browser on this machine, and calls the page by another name."""

    class Shell:
        def __str__(self):
            return "<google.colab._shell.Shell object at 0x7f>"

    shown = []
    monkeypatch.setattr("IPython.core.getipython.get_ipython", Shell)
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr("webbrowser.open", lambda *_: pytest.fail("there is no browser"))
    with closing(app(runs=runs)) as demo:
        (artifact,) = shown
        assert f"({demo.server_port}, " in artifact.data and "proxyPort" in artifact.data
        name = "x-8600-colab.example"
        heads = {"Host": "localhost:8080", "X-Forwarded-Host": name, "X-Forwarded-Proto": "https"}
        local = f"http://127.0.0.1:{demo.server_port}"
        page = httpx.get(local, headers=heads)
        assert page.status_code == 200 and f"https://{name}" in page.text
        assert page.headers["content-security-policy"].endswith("frame-ancestors *")


# The dashboard.


def test_a_corrupt_record_costs_a_sentence(runs, tmp_path):
    *_, text = dashboard(runs, tmp_path, "cpu-smoke")
    assert "A3-s0-abcdef" in text and "not readable as JSON" in text and str(runs) not in text
    assert "No figures yet" in text and "<td>A1</td>" in text and "<td>A2</td>" in text


def test_the_dashboard_opens_on_the_newest_group(tmp_path):
    names = ["h200-smoke", "cpu-smoke"]
    for day, group in enumerate(reversed(names), 1):
        (spec,) = plan(["A1"], "smoke", machine=Machine(group.removesuffix("-smoke")))
        leave(tmp_path, spec, time={"started": f"2026-01-0{day}T00:00:00+00:00"})
    for wanted, shown in (("", names[0]), (names[1], names[1]), ("../..", names[0])):
        assert dashboard(tmp_path, tmp_path, wanted)[:2] == (names, shown)
    assert dashboard(tmp_path / "none", tmp_path)[2].startswith("<p>There are no records yet")


def archived(runs, spec, **sections):
    """An archive of one run, as the committed groups are."""
    folder = leave(runs, spec, **sections)
    line = json.loads((folder / "record.json").read_text())
    (runs / f"{spec.group}.jsonl").write_text(json.dumps(line) + "\n")
    shutil.rmtree(folder.parent)
    return spec.group


def specs_of(*hardware):
    return [plan(["A1"], "smoke", machine=Machine(name))[0] for name in hardware]


def began(day):
    return {"started": f"2026-01-0{day}T00:00:00+00:00"}


def test_the_dashboard_opens_on_the_newest_of_ones_own_groups(tmp_path):
    """Which come before all that are archived, whatever their age."""
    old, new, mine, other = specs_of("h100", "h200", "cpu", "t4")
    archived(tmp_path, old, time=began(8))
    archived(tmp_path, new, time=began(9))
    groups = [new.group, old.group]
    assert dashboard(tmp_path, tmp_path)[:2] == (groups, new.group)
    leave(tmp_path, mine, time=began(2))
    leave(tmp_path, other, time=began(1))
    groups = [mine.group, other.group, *groups]
    assert dashboard(tmp_path, tmp_path)[:2] == (groups, mine.group)
    assert dashboard(tmp_path, tmp_path, old.group)[:2] == (groups, old.group)


def test_the_dashboard_opens_on_ones_own_group_where_its_records_cannot_be_read(tmp_path):
    committed, mine = specs_of("h100", "cpu")
    archived(tmp_path, committed)
    (leave(tmp_path, mine) / "record.json").write_text("{")
    _, name, text = dashboard(tmp_path, tmp_path)
    assert name == mine.group and "not readable as JSON" in text


# What a record has that spoils what is made of it, whether reading refuses it or not.
SPOILT = {
    "half a character": {"error": {"message": "\ud800"}},
    "half a character in a name": {"model": {"name": "\udcff"}},
    "an unknown task": {"task": {"name": "poetry"}},
    "a task's metric": {"task": {"metric": "rhyme"}},
    "a gpu that is none": {"env": {"gpu": ["\ud800"]}},
    "an odd time": {"time": {"started": "\ud800"}},
}


@pytest.mark.parametrize("sections", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_record_leaves_the_other_groups_their_tables(tmp_path, sections):
    spoilt, other = specs_of("h100", "cpu")
    change_record(leave(tmp_path, spoilt), **sections)
    leave(tmp_path, other)
    groups, name, text = dashboard(tmp_path, tmp_path, other.group)
    assert sorted(groups) == sorted([spoilt.group, other.group])
    assert name == other.group and "<td>A1</td>" in text and "annot be" not in text
    groups, name, text = dashboard(tmp_path, tmp_path, spoilt.group)
    assert name == spoilt.group and text.startswith("<p>")
    json.dumps([groups, name, text, running(tmp_path)], ensure_ascii=False).encode()


def test_a_folder_whose_name_is_no_text_costs_a_sentence(runs, tmp_path):
    """A file system takes any bytes; a page only text."""
    run = folder_of(runs).parent
    for name in (b"A1-s0-\xff", b"A1-s0-b50f84"):
        folder = os.path.join(os.fsencode(tmp_path), b"cpu-\xff", name)
        shutil.copytree(os.fsencode(run), folder)
    shutil.copytree(run, tmp_path / "cpu-smoke" / run.name)
    groups, name, text = dashboard(tmp_path, tmp_path)
    assert name == "cpu-smoke" and len(groups) == 2 and "<td>A1</td>" in text
    json.dumps([groups, name, text, dashboard(tmp_path, tmp_path, groups[1])]).encode()
    json.dumps(dashboard(tmp_path, tmp_path, groups[1]), ensure_ascii=False).encode()
    keys = [choice.key for choice in Choices([], tmp_path).listed()]
    assert keys == [f"cpu-smoke/{run.name}"]


def test_runs_may_come_and_go_while_they_are_looked_at(runs, tmp_path):
    source, folder = folder_of(runs).parent / "record.json", tmp_path / "group" / "A1-s0-aaaaaa"

    def look():
        for _ in range(50):
            running(tmp_path)
            dashboard(tmp_path, tmp_path)

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        while not looking.done():
            folder.mkdir(parents=True)
            (folder / "record.json").write_text(
                source.read_text().replace('"status": "ok"', '"status": "running"')
            )
            shutil.rmtree(folder.parent)
    looking.result()


# In a browser.


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(params=[1280, slow(390)])
def page(browser, server, request):
    """A page that fails the test if a script fails, something is asked of another host, or a hostile string runs."""
    problems = []
    page = browser.new_page(viewport={"width": request.param, "height": 844})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.on("dialog", lambda dialog: problems.append(dialog.message) or dialog.dismiss())
    page.on(
        "request", lambda request: problems.append(request.url) if foreign(request.url) else None
    )
    foreign = lambda url: not url.startswith((server.address + "/", "data:", "blob:"))  # noqa: E731
    page.goto(server.address)
    page.locator("#ask").wait_for()
    yield page
    page.close()
    assert problems == []


# What reaches beyond the window, or beyond what it lies in, unless that scrolls.
CUT_OFF = """() => [...document.querySelectorAll('main *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && getComputedStyle(e).visibility !== 'hidden' && box.right > innerWidth + 1 && !e.closest('.wide');
}).map(e => e.outerHTML.slice(0, 100))"""


def fits(page):
    return (
        page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        and page.evaluate(CUT_OFF) == []
    )


def test_browser_one_click_shows_the_answer_in_the_window(page):
    page.locator("#ask").click()
    mark = page.locator("mark")
    mark.wait_for()
    assert mark.text_content() == page.locator(".answer textarea").first.input_value() != ""
    box = mark.bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 844 and fits(page)
    assert page.get_by_label("Model").input_value() == "A2-s0 · smoke · F1 99.9"
    assert page.locator("footer:visible").count() == 0


@pytest.mark.slow
def test_browser_marks_the_answer_and_the_threshold_decides_again(page, server, questions):
    example = next(example for example in questions if example.answers)
    context = f"😀  {EVIL}\n\n {example.context} \t<b>\u200b"
    page.get_by_label("Paragraph").fill(context)
    page.get_by_label("Question").fill(example.question)
    page.locator("#ask").click()
    page.wait_for_function(
        "text => document.querySelector('.paragraph .text')?.textContent === text", arg=context
    )
    best = page.locator("mark").text_content()
    slider, joined = page.locator("input[type=range]:visible"), []
    assert page.locator("input[type=number]:visible").input_value() == "3.25"
    page.on(
        "request",
        lambda request: joined.append(request.post_data_json) if request.method == "POST" else None,
    )
    slider.focus()
    page.keyboard.press("Home")  # the lowest threshold: any margin is over it
    page.locator("mark").wait_for(state="detached")
    assert page.locator(".answer textarea").first.input_value() == "No answer"
    page.keyboard.press("End")
    page.locator("mark").wait_for()
    assert (
        page.locator("mark").text_content() == best
        and page.locator(".paragraph .text").text_content() == context
    )
    assert joined and server.ask["id"] not in {body["fn_index"] for body in joined}, (
        "the model runs once"
    )


@pytest.mark.slow
def test_browser_dashboard_shows_a_group_and_how_far_runs_are(page, runs):
    page.get_by_role("tab", name="Dashboard").click()
    page.get_by_text("step 7 of ").wait_for()
    page.wait_for_function("document.querySelectorAll('.shown img').length > 0")
    assert page.evaluate(
        "[...document.querySelectorAll('.shown img')].every(one => one.naturalWidth > 0)"
    )
    assert page.locator(".shown img[src=x], .shown script").count() == 0
    said = page.locator(".shown").all_text_contents()
    assert any("A3-s0-abcdef" in text and "not readable as JSON" in text for text in said)
    assert any(EVIL in text for text in said), "text, and not HTML"
    assert page.locator("table tbody tr:visible").count() >= 2 and fits(page)
    steps = next(runs.glob("cpu-smoke/A4-*/steps.jsonl"))
    steps.write_text(steps.read_text().replace('"step": 7', '"step": 8'))
    page.get_by_text("step 8 of ").wait_for(timeout=8_000)  # by itself
    steps.write_text(steps.read_text().replace('"step": 8', '"step": 7'))
