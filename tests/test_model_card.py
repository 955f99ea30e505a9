"""What a kept model leaves with: its card, and the way to the hub, whose API a class here plays."""

import base64
import importlib
import json
import re
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard, constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from qa_lib.data.tokenize import build_tokenizer
from qa_lib.model.build import build_model, save_model
from qa_lib.records import record
from qa_lib.run import fit as fitting
from qa_lib.run.card import check_own, hub_names, model_card, results_files, write_card
from qa_lib.spec.machine import Machine
from tests.material import refused
from tests.tiny import planned

TOKEN = "hf_of_this_test"
# The client's package, which differs between versions of the hub's library.
httpx = importlib.import_module(type(default_client_factory()).__module__.partition(".")[0])


def finished(row="A1", preset="smoke", **quality) -> tuple:
    """A spec, and the record of it that has run."""
    spec = planned(row, preset, machine=Machine(compiler=True))
    entry = record.new_record(
        spec, {"gpu": "NVIDIA H200", "torch": "2.13.0", "transformers": "5.23.0"}
    )
    entry["quality"] |= quality or {"exact": 77.5, "f1": 81.25, "n": 40}
    entry["time"] |= {"steps": 1200, "train_s": 114.0}
    entry["energy"]["joules_per_sample"] = 0.25
    entry["spec"]["n_train"] = 131_000
    entry["model"] |= {"params_total": 108_893_186, "params_trainable": 57_474}
    return spec, entry


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of a run with adapters."""
    spec, entry = finished("B1-all")
    run_dir = tmp_path_factory.mktemp("runs") / spec.run_path
    run_dir.mkdir(parents=True)
    save_model(build_model(spec), build_tokenizer("tiny"), run_dir / "model")
    write_card(run_dir / "model", entry)
    record.finish(run_dir, entry, "ok")
    return run_dir


@pytest.fixture
def run_dir(kept, tmp_path):
    """A copy, to spoil."""
    return shutil.copytree(kept, tmp_path / kept.name)


def test_a_cards_metadata_is_what_the_hub_reads(kept):
    metadata = ModelCard.load(kept / "model" / "README.md").data
    values = metadata.to_dict()
    assert metadata.pipeline_tag == "question-answering"
    assert values["library_name"] == "transformers"
    scores = {result.metric_type: result.metric_value for result in metadata.eval_results}
    assert scores == {"exact_match": 77.5, "f1": 81.25}


def test_a_model_and_data_that_are_not_of_the_hub_are_not_in_the_metadata(kept):
    metadata = ModelCard.load(kept / "model" / "README.md").data
    assert metadata.base_model is None, "tiny"
    assert metadata.datasets is None, "synthetic:40"


@pytest.mark.parametrize(
    "words",
    [
        "LoRA r=32",
        "1 × NVIDIA H200",
        "1.9 min of training",
        "0.25 J",
        "57,474 were",
        "generated",
    ],
)
def test_a_card_says_what_was_trained_how(words, kept):
    assert words in ModelCard.load(kept / "model" / "README.md").text


def test_names_of_the_hub_are_in_its_metadata(tmp_path):
    _, entry = finished()
    entry["model"] |= {"name": "google/bert", "revision": "a1" * 20}
    entry["data"]["name"] = "rajpurkar/squad_v2"
    write_card(tmp_path, entry)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "google/bert" and card.data.datasets == ["rajpurkar/squad_v2"]
    results = (tmp_path / ".eval_results" / "squad_v2.yaml").read_text()
    assert "id: rajpurkar/squad_v2" in results and "value: 81.25" in results


def test_a_language_models_card_has_its_own_words(tmp_path):
    write_card(tmp_path, finished("L1", "lm-smoke", word_perplexity=31.5)[1])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.pipeline_tag == "text-generation" and "AutoModelForCausalLM" in card.text
    assert [result.metric_type for result in card.data.eval_results] == ["perplexity"]


def test_the_lines_of_a_card_load_the_model_and_answer(kept, monkeypatch, capsys):
    """That it is the model that was trained, with its adapters merged, test_architectures says."""
    monkeypatch.chdir(kept / "model")
    (code,) = re.findall(
        r"```python\n(.*?)```", (kept / "model" / "README.md").read_text(), re.DOTALL
    )
    exec(code, {})
    assert capsys.readouterr().out.endswith("\n")


def test_a_model_of_the_run_may_be_replaced(run_dir):
    check_own(run_dir / "model", run_dir.name)
    (run_dir / "model" / "README.md").unlink()  # as an older version left it
    check_own(run_dir / "model", run_dir.name)


def test_a_model_of_another_run_is_not_replaced(run_dir):
    model = run_dir / "model"
    (model / "README.md").write_text("run A1-s0-000000")
    refused(r"model does not name run .*: move it elsewhere", check_own, model, run_dir.name)


def test_a_model_folder_of_something_else_is_told_before_the_work(tmp_path, monkeypatch):
    """What has ended well stays so."""
    spec, entry = finished()
    run_dir = tmp_path / "runs" / spec.run_path
    config = run_dir / "model" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    record.finish(run_dir, entry, "ok")
    before = (run_dir / "record.json").read_bytes()
    monkeypatch.setattr(fitting, "prepare", lambda *_: pytest.fail("it was not told before"))
    refused("does not name run", fitting.fit, spec, tmp_path / "runs")
    assert config.read_text() == "{}"
    assert (run_dir / "record.json").read_bytes() == before


@pytest.mark.parametrize(
    ("revision", "is_hubs"), [("main", True), ("a1" * 20, True), ("a1" * 6, False)]
)
def test_a_model_is_of_the_hub_by_its_commit_or_branch(revision, is_hubs):
    _, entry = finished()
    entry["model"] |= {"name": "google/bert", "revision": revision}
    assert hub_names(entry)[0] == ("google/bert" if is_hubs else None)


@pytest.mark.parametrize(
    ("name", "of_preset", "is_hubs"),
    [
        ("rajpurkar/squad_v2", "synthetic:40", True),
        ("squad", "squad", True),
        ("squad", "synthetic:40", False),
        ("synthetic:40", "synthetic:40", False),
    ],
)
def test_data_are_of_the_hub_with_an_owner_or_by_the_preset(name, of_preset, is_hubs):
    _, entry = finished()
    entry["data"]["name"] = name
    entry["spec"]["preset"]["data"] = of_preset
    assert hub_names(entry)[1] == (name if is_hubs else None)


@pytest.mark.parametrize(
    ("data", "path", "task"),
    [
        ("Salesforce/wikitext:wikitext-2-v1", "wikitext.yaml", "wikitext-2-v1"),
        ("me/my data", "my-data.yaml", "default"),
        (f"me/{'x' * 200}", f"{'x' * 96}.yaml", "default"),
    ],
    ids=["configuration", "odd name", "long name"],
)
def test_evaluation_results_name_the_data_their_configuration_and_the_day(data, path, task):
    _, entry = finished(f1=81.23456, exact=None, n=40)
    entry["data"]["name"] = data
    entry["time"]["started"] = "2026-03-04T23:00:00+00:00"
    ((found, content),) = results_files(entry).items()
    assert found == f".eval_results/{path}"
    (result,) = yaml.safe_load(content)
    assert result["dataset"]["id"] == data.partition(":")[0]
    assert result["dataset"]["task_id"] == task
    assert (result["value"], str(result["date"])) == (81.2346, "2026-03-04")


def test_a_card_names_the_data_without_its_configuration(tmp_path):
    _, entry = finished()
    entry["data"]["name"] = "Salesforce/wikitext:wikitext-2-v1"
    entry["spec"]["variant"] = "of-tomorrow"
    card = model_card(entry)
    assert card.data.datasets == ["Salesforce/wikitext"]
    assert "of-tomorrow: of another version" in card.text


def test_a_folder_that_is_empty_or_not_there_may_become_a_models(tmp_path):
    check_own(tmp_path, "A1-s0-000000")
    check_own(tmp_path / "model", "A1-s0-000000")


class Hub:
    """The part of the hub's API that an upload takes: repositories and their files."""

    def __init__(self):
        self.repos, self.url = {}, "http://hub.of.this.test"

    def __call__(self, request):
        if request.url.host not in self.url:
            raise httpx.ConnectError("nobody is there")
        words = request.url.path.removesuffix("/main").split("/")
        if request.method == "GET":
            return self.model("/".join(words[3:]))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return httpx.Response(401, json={"error": "Invalid credentials"})
        lines = map(json.loads, request.content.splitlines())
        return getattr(self, words[-1].replace("-", "_"))("/".join(words[3:5]), *lines)

    def model(self, name):
        if name not in self.repos:
            return httpx.Response(404)  # what else its library asks on its own
        return httpx.Response(
            200, json={"id": name, "private": self.repos[name]["private"], "siblings": []}
        )

    def create(self, _, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repos:
            return httpx.Response(
                409, json={"error": "You already created this model repo", "url": name}
            )
        private = asked.get("private", asked.get("visibility") == "private")
        self.repos[name] = {"private": private, "files": {}}
        return httpx.Response(200, json={"url": f"{self.url}/{name}"})

    def validate_yaml(self, _, asked):
        bad = [] if asked["content"].startswith("---\n") else [{"message": "no metadata"}]
        return httpx.Response(400 if bad else 200, json={"errors": bad, "warnings": []})

    def preupload(self, _, asked):
        modes = [
            {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
            for f in asked["files"]
        ]
        return httpx.Response(200, json={"files": modes})

    def commit(self, repo, _, *files):
        for value in (file["value"] for file in files):
            self.repos[repo]["files"][value["path"]] = base64.b64decode(value["content"])
        return httpx.Response(
            200, json={"commitUrl": f"{self.url}/{repo}/commit/{'a' * 40}", "commitOid": "a" * 40}
        )


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(hub)))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in (
        ("ENDPOINT", hub.url),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
    ):
        monkeypatch.setattr(constants, name, value)
    yield hub
    set_client_factory(default_client_factory)


def test_a_push_brings_every_file_into_a_private_repository(kept, hub, typed):
    assert typed("push", kept, "me/bert-squad") == f"{hub.url}/me/bert-squad\n"
    repo = hub.repos["me/bert-squad"]
    assert repo["private"] is True
    assert repo["files"] == {path.name: path.read_bytes() for path in (kept / "model").iterdir()}


def test_a_push_of_a_run_from_before_there_were_cards_writes_one(run_dir, hub, typed):
    (run_dir / "model" / "README.md").unlink()
    typed("push", run_dir, "me/one")
    assert "README.md" in hub.repos["me/one"]["files"]


def test_nothing_is_public_unless_it_is_said(run_dir, hub, typed):
    typed("push", run_dir, "me/one")
    typed("push --public", run_dir, "me/two")
    assert [hub.repos[name]["private"] for name in ("me/one", "me/two")] == [True, False]


def test_a_repository_that_exists_is_left_alone_unless_it_is_said(run_dir, hub, typed):
    typed("push", run_dir, "me/one")
    said = typed("push", run_dir, "me/one", code=2)
    assert "error: me/one is there already: give another name, or --add" in said
    typed("push --add", run_dir, "me/one")


def test_a_public_repository_is_added_to_only_as_public(run_dir, hub, typed):
    typed("push --public", run_dir, "me/two")
    (run_dir / "model" / "README.md").write_text("---\nlicense: mit\n---\nnew")
    said = typed("push --add", run_dir, "me/two", code=2)
    assert "error: me/two is public: --add --public" in said
    assert not hub.repos["me/two"]["files"]["README.md"].endswith(b"new")
    typed("push --add --public", run_dir, "me/two")
    assert hub.repos["me/two"]["files"]["README.md"].endswith(b"new")


def test_a_push_leaves_what_no_checkpoint_has_and_names_it(run_dir, hub, tmp_path, typed):
    model, secret = run_dir / "model", tmp_path / "secret"
    secret.write_text("password")
    own = {path.name for path in model.iterdir()}
    for name in (".env", "notes.txt", "training_args.bin", "README.md.bak"):
        (model / name).write_text("password")
    (model / ".git").mkdir()
    (model / "sub").mkdir()
    (model / "sub" / "config.json").write_text("password")
    (model / "readme-link.md").symlink_to(secret)
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(secret)
    said = typed("push", run_dir, "me/bert")
    assert set(hub.repos["me/bert"]["files"]) == own - {"README.md"}
    assert b"password" not in b"".join(hub.repos["me/bert"]["files"].values())
    assert said.splitlines()[0] == (
        "not uploaded, since no files of a checkpoint: .env, .git, README.md, README.md.bak, "
        "notes.txt, readme-link.md, sub, training_args.bin"
    )


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "model.safetensors", "merges.txt"])
def test_a_push_of_a_checkpoint_with_links_is_one_line(name, run_dir, hub, tmp_path, typed):
    path = run_dir / "model" / name
    (run_dir / "model" / "SHA256SUMS").unlink()
    (tmp_path / "elsewhere").write_bytes(path.read_bytes() if path.exists() else b"mine")
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "elsewhere")
    assert f"{name} is a link" in typed("push", run_dir, "me/bert", code=2) and not hub.repos


def test_a_push_of_a_folder_that_is_a_link_is_one_line(run_dir, hub, tmp_path, typed):
    (run_dir / "model").rename(tmp_path / "theirs")
    (run_dir / "model").symlink_to(tmp_path / "theirs")
    assert "model: a link" in typed("push", run_dir, "me/bert", code=2) and not hub.repos


def test_evaluation_results_of_data_of_the_hub_are_made_of_the_record(kept, hub, tmp_path, typed):
    run_dir = shutil.copytree(kept, tmp_path / kept.name)
    entry = record.read_record(run_dir)
    entry["data"]["name"] = "rajpurkar/squad_v2"
    record.write_record(run_dir, entry)
    write_card(run_dir / "model", entry)
    (run_dir / "model" / ".eval_results" / "mine.yaml").write_text("password")
    typed("push", run_dir, "me/bert")
    names = {name for name in hub.repos["me/bert"]["files"] if "/" in name}
    assert names == {".eval_results/squad_v2.yaml"}


# What keeps a push from the hub: each is told in one line, and makes no repository.


def told(typed, hub, *words) -> str:
    """The one line with which a push ends that has made nothing."""
    said = typed("push", *words, code=2)
    assert said.count("\n") == 1
    assert not hub.repos
    return said


@pytest.mark.parametrize("repo", ["bert", "me/a b"])
def test_a_repository_is_an_owner_and_a_name(repo, run_dir, hub, typed):
    said = told(typed, hub, run_dir, repo)
    assert f"'{repo}' is no name of the hub with its owner" in said


def test_a_folder_without_a_record_has_nothing_to_push(tmp_path, hub, typed):
    assert "no record" in told(typed, hub, tmp_path / "nothing", "me/bert")


def test_a_token_that_may_not_write_is_refused(run_dir, hub, typed, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    said = told(typed, hub, run_dir, "me/bert")
    assert "the hub refuses the token: type `hf auth login`" in said


def test_a_push_takes_a_token(run_dir, hub, tmp_path, typed, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    said = told(typed, hub, run_dir, "me/bert")
    assert "no token for the hub: type `hf auth login`, or set HF_TOKEN" in said


def test_a_hub_that_is_not_there_is_told(run_dir, hub, typed, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "me/bert: not uploaded: ConnectError" in told(typed, hub, run_dir, "me/bert")


def test_a_card_without_metadata_is_not_uploaded(run_dir, hub, typed):
    (run_dir / "model" / "README.md").write_text("Mine.")
    said = typed("push", run_dir, "me/begun", code=2)
    assert "me/begun: not uploaded: ValueError: Invalid metadata in README.md" in said
    assert list(hub.repos["me/begun"]["files"]) == []


def test_a_model_that_was_changed_is_not_uploaded(run_dir, hub, typed):
    (run_dir / "model" / "config.json").write_text("{}")
    assert "is not the file that was saved" in told(typed, hub, run_dir, "me/bert")


def test_a_run_that_a_process_works_on_is_not_uploaded(run_dir, hub, typed):
    with record.lock(run_dir):
        said = told(typed, hub, run_dir, "me/bert")
    assert "another process is working on this run" in said


def test_a_run_that_was_killed_is_not_uploaded(run_dir, hub, typed):
    record.finish(run_dir, record.read_record(run_dir), "killed")
    assert "it has ended as 'killed'" in told(typed, hub, run_dir, "me/bert")


def test_a_run_that_kept_no_model_has_nothing_to_push(run_dir, hub, typed):
    shutil.rmtree(run_dir / "model")
    said = told(typed, hub, run_dir, "me/bert")
    assert "no model/ in it; a run keeps its model at a preset that measures quality" in said
