"""The app in a process of its own, as the tests of this folder ask it over HTTP."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import httpx

from qa_lib.__main__ import main
from qa_lib.lab.app import gate
from qa_lib.lab.launch.warm import SERVER
from tests.material import wait_for

ARRIVAL_SECONDS = 3  # in place of gate.ARRIVAL_SECONDS, so that tests of it are short
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
# A text that runs a script or asks another host wherever it is not shown as text.
EVIL = (
    '<img src=x onerror="alert(1)"><script>alert(2)</script>${alert(3)}{{alert(4)}}'
    "![x](http://evil.example/x.png)"
)


def folder_of(runs: Path, variant: str = "A1") -> Path:
    """Return the model folder of the variant's only run."""
    (folder,) = runs.glob(f"cpu-smoke/{variant}-*/model")
    return folder


def key_of(runs: Path, variant: str = "A1") -> str:
    """Return what the page calls the model of the variant's only run."""
    return f"cpu-smoke/{folder_of(runs, variant).parent.name}"


class Server:
    """The app in a process of its own, forked from one that has imported most of it."""

    def __init__(self, runs: Path):
        self.log = runs.parent / "log"  # what it prints
        self.touched = runs.parent / "touched"  # a line for each of TOUCHES
        given = (self.log, self.touched, runs, dict(os.environ))
        self.process = SERVER.Process(target=_serve, args=given)
        self.process.start()
        wait_for(self._has_printed_a_line_or_ended)
        self.address = re.search(r"http://127\.0\.0\.1:\d+", self.log.read_text()).group()
        self.client = httpx.Client(timeout=60, base_url=self.address)
        self.port = self.client.base_url.port
        self.config = self.client.get("/config").json()
        self.ask_event = self._event_of_button("ask")

    def _has_printed_a_line_or_ended(self) -> bool:
        if not self.process.is_alive():
            return True
        return self.log.exists() and "\n" in self.log.read_text()

    def _event_of_button(self, name: str) -> dict:
        """Return Gradio's description of what a click on a button does."""
        (button,) = (
            component["id"]
            for component in self.config["components"]
            if component["props"].get("elem_id") == name
        )
        (event,) = (
            event for event in self.config["dependencies"] if [button, "click"] in event["targets"]
        )
        return event

    def question(
        self, model: str, question: str, context: str, other: str = "", longest: str = ""
    ) -> dict:
        """Return the body that asks, as the page sends it."""
        return {
            "fn_index": self.ask_event["id"],
            "session_hash": os.urandom(5).hex(),
            "data": [model, other, context, question, longest],
        }

    def moved_slider(self, *values) -> dict:
        """Return the body that asks for the answer under another threshold, as the page sends it.

        The values are the paragraph, where the answer begins and ends, the margin, the threshold.
        """
        (number, *_) = (
            event["id"]
            for event in self.config["dependencies"]
            if len(event["inputs"]) == 5 and event["id"] != self.ask_event["id"]
        )
        return {"fn_index": number, "session_hash": os.urandom(5).hex(), "data": [*values]}

    def ask(self, *question: str, **more: str) -> tuple[dict | None, list]:
        """Ask as `question` says it.

        Returns what the first card keeps of the answer, None if there is none, and the card's nine
        values. Fails where the server says that the event failed.
        """
        message = self.outcome(self.question(*question, **more))
        assert message["success"], message
        card = message["output"]["data"][:9]
        context, begin, end, margin = card[5:]
        if not context:
            return None, card
        return {"context": context, "begin": begin, "end": end, "margin": margin}, card

    def outcome(self, body: dict) -> dict:
        """Return what the server says at the end of an event with this body."""
        self.client.post(gate.JOIN, json=body).raise_for_status()
        stream = self.client.get(f"{gate.ANSWERS}?session_hash={body['session_hash']}").text
        messages = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
        (completed,) = (each for each in messages if each["msg"] == "process_completed")
        return completed

    def stop(self, within_s: float) -> None:
        """Send SIGTERM, and wait that many seconds for its end."""
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(within_s)


def _serve(log: Path, touched: Path, runs: Path, environment: dict[str, str]) -> None:
    """Run the app in this process, in that environment.

    What it prints goes to one file, and what it touches to another.
    """
    os.environ.update(environment)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for stream in (1, 2):
        os.dup2(os.open(log, append), stream)
    touched_file = os.open(touched, append)

    def note(event, values):
        if event in TOUCHES:
            paths = [value for value in values if isinstance(value, str | bytes | tuple)]
            os.write(touched_file, f"{event} {paths}\n".encode(errors="replace"))

    sys.addaudithook(note)
    gate.ARRIVAL_SECONDS = ARRIVAL_SECONDS
    figures = runs.parent / "figures"
    os._exit(main(["app", "--runs", str(runs), "--figures", str(figures), "--port", "0"]))
