"""What a kept model leaves with: its card, and the way to the hub, whose API a server on 127.0.0.1 plays."""

import base64
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForQuestionAnswering

from qa_lib import record
from qa_lib.__main__ import main
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.model.build import build_model, save_model
from qa_lib.model.hf_checkpoint import inspect_checkpoint
from qa_lib.run import fit
from qa_lib.run.hub import check_own, write_card
from qa_lib.run.plan import plan
from qa_lib.spec import Machine
from tests.material import ROOT, refused

CPU = Machine(backends=("inductor", "aot_eager"), compiler=True)
TOKEN = "hf_of_this_test"


def finished(spec, quality=81.25) -> dict:
    """The record of a spec that has run."""
    entry = record.new_record(spec, {"gpu": "NVIDIA H200", "torch": "2.13.0", "transformers": "5.23.0"})
    entry["quality"] |= {"exact": 77.5, "f1": quality, "n": 40}
    entry["time"] |= {"steps": 1200, "train_s": 114.0}
    entry["energy"]["joules_per_sample"] = 0.25
    entry["spec"]["n_train"] = 131_000
    entry["model"] |= {"params_total": 108_893_186, "params_trainable": 57_474}
    return entry


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of a run with adapters, and what its model gives before it is saved."""
    (spec,) = plan(["B1-all"], "smoke", data="synthetic:40", machine=CPU)
    torch.manual_seed(3)
    model = build_model(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ids = torch.randint(5, 100, (2, 32))
    logits, run_dir = model(ids).start_logits, tmp_path_factory.mktemp("runs") / spec.run_path
    run_dir.mkdir(parents=True)
    save_model(model, build_tokenizer("tiny"), run_dir / "model")
    entry = finished(spec)
    write_card(run_dir / "model", entry)
    record.finish(run_dir, entry, "ok")
    return run_dir, ids, logits


@pytest.fixture
def run_dir(kept, tmp_path):
    """A copy, to spoil."""
    return shutil.copytree(kept[0], tmp_path / kept[0].name)


def test_a_card_says_what_was_trained_how(kept):
    card = ModelCard.load(kept[0] / "model" / "README.md")
    metadata = card.data.to_dict()
    assert (metadata["pipeline_tag"], metadata["library_name"]) == ("question-answering", "transformers")
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores == {"exact_match": 77.5, "f1": 81.25}
    assert card.data.base_model is None and card.data.datasets is None  # tiny and synthetic:40 are not of the hub
    for words in ("LoRA r=32", "1 × NVIDIA H200", "1.9 min of training", "0.25 J", "57,474 were", "generated"):
        assert words in card.text


def test_names_of_the_hub_are_in_its_metadata(tmp_path):
    (spec,) = plan(["A1"], "smoke", data="synthetic:40", machine=CPU)
    entry = finished(spec)
    entry["model"] |= {"name": "google/bert", "revision": "a1" * 20}
    entry["data"]["name"] = "rajpurkar/squad_v2"
    write_card(tmp_path, entry)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "google/bert" and card.data.datasets == ["rajpurkar/squad_v2"]
    results = (tmp_path / ".eval_results" / "squad_v2.yaml").read_text()
    assert "id: rajpurkar/squad_v2" in results and "value: 81.25" in results


def test_a_language_models_card_has_its_own_words(tmp_path):
    (spec,) = plan(["L1"], "lm-smoke", data="synthetic:40", machine=CPU)
    entry = record.new_record(spec, {}) | {"model": finished(spec)["model"], "time": finished(spec)["time"]}
    entry["spec"]["n_train"], entry["quality"]["word_perplexity"] = 10, 31.5
    write_card(tmp_path, entry)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.pipeline_tag == "text-generation" and "AutoModelForCausalLM" in card.text
    assert [result.metric_type for result in card.data.eval_results] == ["perplexity"]


def test_the_lines_of_a_card_load_the_merged_model(kept, monkeypatch):
    run_dir, ids, logits = kept
    again, loading = AutoModelForQuestionAnswering.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.allclose(again.eval()(ids).start_logits, logits, atol=1e-5)
    monkeypatch.chdir(run_dir / "model")
    (code,) = re.findall(r"```python\n(.*?)```", (run_dir / "model" / "README.md").read_text(), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, {})
    assert said.getvalue().endswith("\n")


def test_a_card_may_be_changed_and_the_weights_may_not(run_dir):
    (run_dir / "model" / "README.md").write_text("Mine.")
    inspect_checkpoint(run_dir / "model")
    (run_dir / "model" / "config.json").write_text("{}")
    refused("is not the file that was saved", inspect_checkpoint, run_dir / "model")


def test_a_model_folder_of_something_else_is_not_replaced(run_dir, tmp_path, monkeypatch):
    model = run_dir / "model"
    check_own(model, run_dir.name)
    (model / "README.md").unlink()  # as an older version left it
    check_own(model, run_dir.name)
    (model / "README.md").write_text("run A1-s0-000000")
    refused(r"model does not name run .*: move it elsewhere", check_own, model, run_dir.name)

    (spec,) = plan(["A1"], "smoke", data="synthetic:40", machine=CPU)
    theirs, folder = tmp_path / "my-bert", tmp_path / "runs" / spec.run_path
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(theirs)
    monkeypatch.setattr(fit, "prepare", lambda *_: pytest.fail("it was not told before the work"))
    record.finish(folder, record.new_record(spec, {}), "ok")
    before = (folder / "record.json").read_bytes()
    refused("does not name run", fit.fit, spec, tmp_path / "runs")
    assert (theirs / "config.json").read_text() == "{}"
    assert (folder / "record.json").read_bytes() == before, "what has ended well stays so"


class Hub(ThreadingHTTPServer):
    """As much of the hub's API as an upload takes: repositories with `private`, and the files that came."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.repos, self.blobs = {}, {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path == "/api/validate-yaml":
            bad = [] if json.loads(body)["content"].startswith("---\n") else [{"message": "no metadata"}]
            return self.answer({"errors": bad, "warnings": []}, 400 if bad else 200)
        repo = re.search(r"^/(?:api/models/)?(\w+/[\w-]+)", self.path)[1]
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
            return self.answer(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            found = [
                one | {"actions": {"upload": {"href": f"{self.server.url}/blob/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": found})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.repos[repo]["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.repos[repo]["files"][value["path"]] = self.server.blobs[value["oid"]]
        self.answer({"commitUrl": f"{self.server.url}/{repo}/commit/{'a' * 40}", "commitOid": "a" * 40})

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.server.repos:
            return self.answer({"error": "You already created this model repo", "url": name}, 409)
        private = asked.get("private", asked.get("visibility") == "private")
        self.server.repos[name] = {"private": private, "files": {}}
        self.answer({"url": f"{self.server.url}/{name}"})

    def do_PUT(self):
        self.server.blobs[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def do_GET(self):
        if not (found := re.search(r"^/api/models/(\w+/[\w-]+)", self.path)):
            return self.answer({}, 404)  # what else its library asks on its own
        name = found[1]
        self.answer({"id": name, "private": self.server.repos[name]["private"], "siblings": []})


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in (("ENDPOINT", server.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
        monkeypatch.setattr(constants, name, value)
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_from_the_command_line_brings_every_file(kept, hub):
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    words = [sys.executable, "-m", "qa_lib", "push", str(kept[0]), "me/bert-squad"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.url}/me/bert-squad\n"
    repo, folder = hub.repos["me/bert-squad"], kept[0] / "model"
    assert repo["private"] and repo["files"] == {path.name: path.read_bytes() for path in folder.iterdir()}


def push(run_dir, *words):
    return main(["push", str(run_dir), *words])


def test_nothing_is_public_and_nothing_is_replaced_unless_it_is_said(run_dir, hub, capsys):
    (run_dir / "model" / "README.md").unlink()
    assert push(run_dir, "me/one") == 0
    assert "README.md" in hub.repos["me/one"]["files"]
    assert push(run_dir, "me/one") == 2
    assert "error: me/one is there already: give another name, or --add" in capsys.readouterr().err
    assert push(run_dir, "me/one", "--add") == 0
    assert push(run_dir, "me/two", "--public") == 0
    assert [hub.repos[name]["private"] for name in ("me/one", "me/two")] == [True, False]
    (run_dir / "model" / "new.txt").write_text("new")
    assert push(run_dir, "me/two", "--add") == 2
    assert "error: me/two is public: --add --public" in capsys.readouterr().err
    assert "new.txt" not in hub.repos["me/two"]["files"]
    assert push(run_dir, "me/two", "--add", "--public") == 0
    assert "new.txt" in hub.repos["me/two"]["files"]


def test_what_keeps_a_push_from_the_hub_is_one_line(run_dir, hub, tmp_path, capsys, monkeypatch):
    def told(*words):
        assert push(*words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and not hub.repos
        return said

    assert "'bert' is no name of the hub with its owner" in told(run_dir, "bert")
    assert "'me/a b' is no name of the hub" in told(run_dir, "me/a b")
    assert "no record" in told(tmp_path / "nothing", "me/bert")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "the hub refuses the token: type `hf auth login`" in told(run_dir, "me/bert")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert "no token for the hub: type `hf auth login`, or set HF_TOKEN" in told(run_dir, "me/bert")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "me/bert: not uploaded: ConnectError" in told(run_dir, "me/bert")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    card = (run_dir / "model" / "README.md").read_text()
    (run_dir / "model" / "README.md").write_text("Mine.")
    assert push(run_dir, "me/begun") == 2 and list(hub.repos.pop("me/begun")["files"]) == []
    assert "me/begun: not uploaded: ValueError: Invalid metadata in README.md" in capsys.readouterr().err
    (run_dir / "model" / "README.md").write_text(card)
    (run_dir / "model" / "config.json").write_text("{}")
    assert "is not the file that was saved" in told(run_dir, "me/bert")
    with record.lock(run_dir):
        assert "another process is working on this run" in told(run_dir, "me/bert")
    record.finish(run_dir, record.read_record(run_dir), "killed")
    assert "it has ended as 'killed'" in told(run_dir, "me/bert")
    shutil.rmtree(run_dir / "model")
    assert "no model/ in it; a run keeps its model at a preset that measures quality" in told(run_dir, "me/bert")
