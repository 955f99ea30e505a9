"""The app: ask a checkpoint questions about a paragraph, compare two, and read the dashboard. For one's own machine."""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import math
import re
import signal
import socket
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from qa_lib.data.squad import MAX_CONTEXT, Example, open_source
from qa_lib.errors import UserError
from qa_lib.record import read_quantized, read_record, run_files
from qa_lib.report import page
from qa_lib.report import publish as report
from qa_lib.score.ask import Busy, Desk, QuestionTooLong
from qa_lib.score.predict import find_folder, load_qa_model

EXAMPLE = """examples:
  python -m qa_lib app --model deepset/minilm-uncased-squad2          # of the hub: safetensors alone, and no code
  python -m qa_lib app --model my-bert/ --model runs/h200-local/A3-s0-1a2b3c/   # two side by side
On another machine: ssh -L 8600:localhost:8600 MACHINE, start it there, and open http://localhost:8600 here.
In Colab, whose proxy needs it to answer to any name and in a frame, as it does where --host lets others in:
  get_ipython().system_raw("python -m qa_lib app --host 0.0.0.0 &")
  from google.colab import output; output.serve_kernel_port_as_iframe(8600, height=900)   # some seconds later
Without a browser; a model is called "model 1" (the first --model) or, of the runs, by its folders "GROUP/RUN":
  curl http://127.0.0.1:8600/ask -H "Content-Type: application/json" \\
    -d '{"model": "model 1", "question": "Who wrote it?", "context": "It was written by Ada."}'
The reply is JSON: answer, margin of "no answer", nbest, ms and others; or what is wrong: field and message."""
FIGURES = Path("figures")  # what report draws into; read where it is up to date
MAX_QUESTION = 1_000
MAX_BODY = 12 * (MAX_CONTEXT + MAX_QUESTION) + 10_000  # bytes; JSON may spell an emoji in as many; and what is around
BODY_SECONDS = 5  # in which a request's body has to arrive: one that is half sent holds a place that others want
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
GONE = 499  # the status of an answer that nobody hears, as nginx has it
TOO_LONG = "The {} is longer than {:,} characters, the limit."


@dataclass(frozen=True)
class Choice:
    """A checkpoint that can be asked. `key` is what the page calls it by; no path ever leaves the server.

    `f1` is its best one and `threshold` the margin of "no answer" that goes with it, NaN where no record tells;
    `examples` says which suit it, english or synthetic.
    """

    key: str
    name: str
    folder: Path
    f1: float = math.nan
    threshold: float = math.nan
    examples: str = "english"


def offered(runs: Path) -> list[Choice]:
    """The checkpoints of the runs that ended ok, the best F1 first; after all others those of synthetic text, whose
    F1 is of another kind."""
    names = ("model/model.safetensors", "model-*/quantized.json")
    found = [_of_run(path.parent) for name in names for path in run_files(runs, name)]
    return sorted(filter(None, found), key=lambda choice: (choice.examples == "synthetic", -choice.f1, choice.name))


def _of_run(folder: Path) -> Choice | None:
    """The checkpoint of a run that ended ok, or None where no record says so."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record = read_record(folder.resolve().parent)
        spec, quality, width = record["spec"], record["quality"], ""
        if record["status"] != "ok" or record["task"]["name"] != "qa":
            return None
        if (folder / "quantized.json").is_file():  # whose answers are others
            quantized = read_quantized(folder)
            quality, width = quantized["after"], f" · {quantized['width']}"
        name = f"{spec['variant']}-s{spec['seed']}{width} · {spec['scale']['name']} · F1 {quality['best_f1']:.1f}"
        kind = "synthetic" if str(record["data"]["name"]).startswith("synthetic") else "english"
        key = "/".join(folder.parts[-3:]).removesuffix("/model")
        return Choice(key, name, folder, float(quality["best_f1"]), float(quality["best_f1_threshold"]), kind)
    return None


def named(models: list[str | Path]) -> list[Choice]:
    """The checkpoints that the user named: folders, of runs or models, and names of the hub. Raises UserError."""
    found = []
    for i, model in enumerate(models, 1):
        folder, path = find_folder(model), Path(model).resolve()
        load_qa_model(folder)
        name = (path.parent if path.name == "model" else path).name if path.exists() else str(model)
        found.append(replace(_of_run(folder) or Choice("", name, folder), key=f"model {i}"))
    return found


def examples() -> dict[str, list[dict]]:
    """Questions to click: {name, question, context} for models of the synthetic text and for those of English."""
    generated = sorted(open_source("synthetic:200", "validation").examples, key=lambda example: len(example.context))
    answered = [example for example in generated if example.answers]
    impossible = next(example for example in generated if example.impossible)
    english = open_source(page.WEB / "english.json", "validation").examples
    kinds = {"synthetic": [*answered[:2], impossible, answered[-1]], "english": english}
    chips = {kind: [_chip(example) for example in found] for kind, found in kinds.items()}
    chips["synthetic"][-1]["name"] += " (long paragraph)"
    return chips


def _chip(example: Example) -> dict:
    note = " (no answer)" if example.impossible else ""
    return {"name": example.question + note, "question": example.question, "context": example.context}


def create_app(given: list[Choice], runs: Path, hosts: list[str]) -> Starlette:
    """The app over `given` checkpoints and those of the runs; it answers requests for `hosts` alone, so that no foreign
    page can ask it."""
    desk, chips = Desk(), examples()
    known: dict[str, Choice] = {}  # every checkpoint seen so far: asking does not read all records again
    drawing, drawn = threading.Lock(), {}
    frames = "*" if "*" in hosts else "'none'"  # who may call it by any name may show it in a frame, as Colab does

    def shown(html: str, policy: str) -> Response:
        return HTMLResponse(html, headers=HEADERS | {"Content-Security-Policy": f"{policy}; frame-ancestors {frames}"})

    def choices() -> list[Choice]:
        twice = {choice.folder.resolve() for choice in given}
        listed = [*given, *(choice for choice in offered(runs) if choice.folder.resolve() not in twice)]
        for name, times in Counter(choice.name for choice in listed).items():
            if times > 1:
                listed = [replace(c, name=f"{name} ({c.key})") if c.name == name else c for c in listed]
        known.update((choice.key, choice) for choice in listed)
        return listed

    def home(request: Request) -> Response:
        listed = choices()
        return shown(*page.render("ask", "'self'", choices=listed, given=listed[: len(given)], examples=chips))

    def dashboard(request: Request) -> Response:
        wanted = request.query_params.get("group", "")
        files = [*run_files(runs, "record.json"), *run_files(runs, "profile.json"), *FIGURES.glob("*/manifest.json")]
        state = {"wanted": wanted}
        for path in files:
            with contextlib.suppress(OSError):  # runs come and go while the app looks at them
                state[path] = path.stat().st_mtime_ns

        def pictures(chosen, group: str):
            return report.pictures(chosen, FIGURES / group)

        with drawing:  # matplotlib is not for two threads at once
            if drawn.get("state") != state:
                drawn.update(state=state, page=page.dashboard(runs, pictures, "/runs", True, wanted))
            return shown(*drawn["page"])

    def notebook(request: Request) -> Response:
        """A run's notebook, found in the list of runs: what the address says is compared, never opened."""
        wanted = runs / request.path_params["path"]
        found = [path for path in run_files(runs, "notebook.ipynb") if path == wanted]
        if not found:
            return PlainTextResponse("no such run, or none with a notebook", 404)
        # It holds whatever its run printed: no script runs in it, and it loads nothing.
        policy = "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        try:
            return shown(notebook_html(found[0]), policy)
        except Exception:  # whatever a spoilt notebook leads to, or one that is gone by now
            return PlainTextResponse("this notebook cannot be read", 500)

    async def ask(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _refuse(415, "form", "JSON is expected")  # which a form of a foreign page cannot send
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(request)
        except TimeoutError:
            return _refuse(408, "form", "The question did not arrive in time.")
        except (ClientDisconnect, asyncio.CancelledError):
            return Response(status_code=GONE)
        if len(body) > MAX_BODY:
            return _refuse(413, "context", TOO_LONG.format("paragraph", MAX_CONTEXT))
        try:
            entry = json.loads(body)
            question, context, key = entry["question"], entry["context"], str(entry["model"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return _refuse(400, "form", "question, context and model are expected")
        if problem := check(question, context):
            return _refuse(422, *problem)
        if key not in known:
            await run_in_threadpool(choices)
        if not (choice := known.get(key)):
            return _refuse(404, "model", "There is no such model, or no longer; load the page again.")
        try:
            answer = asyncio.wrap_future(desk.ask(choice.folder, question, context))
            leaving = asyncio.create_task(_left(request))
            leaving.add_done_callback(lambda _: answer.cancel())  # which drops the question, unless it is in work
            return JSONResponse(await answer)
        except asyncio.CancelledError:  # by the asker, or as the app ends
            return Response(status_code=GONE)
        except Busy as problem:
            return _refuse(503, "form", str(problem), {"Retry-After": "1"})
        except QuestionTooLong as problem:
            return _refuse(422, "question", f"The question is {problem}.")
        except (UserError, OSError) as problem:
            reason = str(problem).removeprefix(f"{choice.folder}: ").replace(str(choice.folder), choice.name)
            return _refuse(422, "model", page.without_paths(f"{choice.name} cannot be asked: {reason}"))

    for choice in choices()[:1]:
        desk.ask(choice.folder, "who", "it was she")  # loaded while the page is being read
    return Starlette(
        routes=[
            Route("/", home),
            Route("/ask", ask, methods=["POST"]),
            Route("/dashboard", dashboard),
            Route("/runs/{path:path}", notebook),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
    )


class Connection(H11Protocol):
    """A connection whose place others get when the head of a request is not there in time: uvicorn's timer between two
    requests also runs before the first, and while a head is half sent."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()

    def _start_timer(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


def check(question: object, context: object) -> tuple[str, str] | None:
    """The field and what is wrong with it, or None."""
    fields = (("context", "paragraph", context, MAX_CONTEXT), ("question", "question", question, MAX_QUESTION))
    for field, name, text, most in fields:
        if not isinstance(text, str) or not text.strip():
            return field, f"Write or paste a {name}."
        if len(text) > most:
            return field, TOO_LONG.format(name, most)
        if re.search("[\ud800-\udfff]", text):
            return field, "This text holds half a character, which no tokenizer takes."
    return None


async def _body(request: Request) -> bytes:
    """The request's body, cut off behind MAX_BODY: a browser hears no answer while it still sends, so the rest is read
    and dropped."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk[: MAX_BODY + 1 - len(body)]
    return bytes(body)


async def _left(request: Request) -> None:
    """Wait until the asker, whose request has been read, closes the connection or has the answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse(status: int, field: str, message: str, headers: dict | None = None) -> Response:
    return JSONResponse({"field": field, "message": message}, status, headers)


def notebook_html(path: Path) -> str:
    """An executed notebook as a page, without its scripts' addresses and without this machine's paths in outputs."""
    from nbconvert import HTMLExporter  # a second, for the few who look

    notebook = nbformat.read(path, as_version=4)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        output |= {key: _cleaned(output[key]) for key in ("text", "evalue", "traceback") if key in output}
        data |= {key: _cleaned(data[key]) for key in data if key.startswith("text/")}
    exporter = HTMLExporter(template_name="classic", require_js_url="", mathjax_url="", jquery_url="")
    return exporter.from_notebook_node(notebook)[0]


def _cleaned(text: str | list[str]) -> str | list[str]:
    """A text of an output, or its lines, without terminal colours and paths."""
    if isinstance(text, list):
        return [_cleaned(line) for line in text]
    return page.without_paths(re.sub(r"\x1b\[[\d;]*m", "", text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib app`."""
    parser.add_argument("--model", action="append", default=[], metavar="M", help="folder or hub name; repeatable")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the records (default: runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8600, metavar="N", help="0 takes a free one (default: 8600)")


def _names(host: str, address: str) -> list[str]:
    """By what names the app may be called when it listens on `host`, which is `address`: any where others than this
    machine reach it, since it cannot know them."""
    local = ipaddress.ip_address(address).is_loopback
    return ["127.0.0.1", "localhost", host, f"[{host}]"] if local else ["*"]  # in brackets: IPv6


def main(args: argparse.Namespace) -> int:
    """Serve until a signal comes, and then give requests in work three seconds.

    Raises UserError for a name that leads to no such model, and for a port that is taken.
    """
    if not args.host.strip():
        raise UserError("--host is empty, which would listen to everybody: leave it out, or write 0.0.0.0 to mean that")
    given = named(args.model)
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=512)
        # asyncio does it for sockets of its own only: answers would wait 40 ms for the asker's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"cannot listen on {args.host}, port {args.port}: {reason}; --port takes another") from None
    address, port = listener.getsockname()[:2]
    app = create_app(given, args.runs, _names(args.host, address))
    quiet = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "off"}
    config = uvicorn.Config(app, http=Connection, limit_concurrency=512, timeout_graceful_shutdown=3, **quiet)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it; else it ends the app as Ctrl-C does
        uvicorn.server.HANDLED_SIGNALS = {*uvicorn.server.HANDLED_SIGNALS, signal.SIGHUP}
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{port}  (Ctrl-C stops it)", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
    return 0
