"""A run is of the model and the data that were planned: what is opened decides its identity, what is loaded is compared
with it, and what was made of another model does not stay beside the new one."""

import gzip
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForQuestionAnswering

from qa_lib.data.load import load_data, load_text
from qa_lib.data.text import learn_tokenizer, open_text, tokenize_text
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.errors import UserError
from qa_lib.lab import sweep
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.search.plan import plan
from qa_lib.measure import hardware
from qa_lib.model.hf_checkpoint import inspect_checkpoint, replacing
from qa_lib.run import fit as fitting
from qa_lib.run.fit import prepare
from qa_lib.run.identity import identify_data, identify_model
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.score.predict import load_qa_model, window_lengths
from qa_lib.train import checkpoint as checkpoints
from tests.conftest import slow
from tests.material import (
    cases,
    document,
    edited,
    end_of,
    hub_row,
    python,
    question,
    refused,
    squad_folder,
    write,
)
from tests.tiny import CPU, H200, checkpoint, planned, quiet, stop_after

TEXT = "The river Rhine rises in the Alps and ends near Rotterdam, which is a port."


@pytest.fixture(scope="module", params=["bert", slow("roberta"), slow("electra")])
def kept(request, tmp_path_factory):
    """A tiny checkpoint of each encoder, as `save_model` leaves it but for the digests."""
    return Path(checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model"))


@pytest.fixture
def model(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "model")


@pytest.fixture
def squad(tmp_path):
    """A folder of questions in two files."""
    return squad_folder(tmp_path / "squad", TEXT, "Alps", "where {number}?")


def local(squad, model, steps=4, every=0):
    sizes = {"steps": steps, "epochs": None, "measure_from": 1, "checkpoint_every": every}
    return planned("A1", "local", sizes=sizes, data=str(squad), model=str(model), max_length=48)


def nudge(path):
    """Other weights."""
    save_file(
        {name: tensor + 1e-3 for name, tensor in load_file(path).items()}, path, {"format": "pt"}
    )


# What Python opens of a folder; the tokenizer and the weights are opened by Rust, under names that are listed too.
def test_every_file_that_is_opened_is_in_the_identity(model):
    for name in (
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "README.md",
        "other.json",
    ):
        if not (model / name).exists():
            (model / name).write_text("{}")
    opened = []
    sys.addaudithook(
        lambda event, words: event == "open" and opened.append(str(words[0]))
    )  # for good
    build_tokenizer(model)
    AutoModelForQuestionAnswering.from_pretrained(model)
    found = {Path(path).name for path in opened}
    files = {path.name for path in inspect_checkpoint(model).files}
    assert (
        found & {path.name for path in model.iterdir()} <= files
        and "tokenizer_config.json" in found
    )
    assert files.isdisjoint({"README.md", "other.json"})


def test_what_changes_tokens_or_logits_changes_the_identity(model):
    """Also what is added, and what moves from one file to another."""
    identities = [identify_model(str(model))]

    def is_new():
        identities.append(identify_model(str(model)))
        return identities[-1] not in identities[:-1]

    edited(model / "tokenizer_config.json", do_lower_case=False, sep_token="[PAD]")
    assert is_new()
    for name in ("merges.txt", "vocab.json", "added_tokens.json", "special_tokens_map.json"):
        assert not (model / name).exists()
        (model / name).write_text('{"x": 9}')
        assert is_new(), name
    (model / "merges.txt").rename(model / "vocab.txt")
    assert is_new(), "the same bytes under another name"
    nudge(model / "model.safetensors")
    assert is_new()
    (model / "README.md").write_text("A card.")
    assert not is_new()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize(
    "what", ["train.json", "validation.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_file_that_changes_after_the_plan_ends_the_run_and_is_named(
    squad, model, tmp_path, what, when, monkeypatch
):
    spec = local(squad, model)
    path = next(folder / what for folder in (squad, model) if (folder / what).exists())
    if when == "before":
        change(path)
    else:
        workflow = replace(WORKFLOWS["qa"], load=lambda spec: (load_data(spec), change(path))[0])
        monkeypatch.setitem(WORKFLOWS, "qa", workflow)
    if when == "meanwhile" and path.parent == squad:  # what was loaded is what was planned
        assert fit(spec, tmp_path / "runs", say=quiet)["status"] == "ok"
        return
    said = rf"is not what the run was planned with \(its file that was written last: {what}\)"
    refused(said, fit, spec, tmp_path / "runs", say=quiet)
    status, message = end_of(tmp_path / "runs" / spec.run_path)
    assert status == "error" and what in message


def change(path):
    if path.suffix == ".json":
        content = path.read_bytes().replace(b"where 3?", b"where 4?").replace(b"true", b"false", 1)
        path.write_bytes(content + b"\n")
    else:
        nudge(path)


def test_a_saved_data_set_is_what_its_state_lists(tmp_path):
    folder = tmp_path / "saved"
    rows = [
        hub_row(f"{i}", "", f"where {i}?", TEXT, ("Alps", TEXT.index("Alps"))) for i in range(20)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=2)
    before = identify_data(str(folder), with_validation=False)["sha256"]
    first, second = sorted(folder.glob("*.arrow"))

    shutil.copy(first, folder / "cache-0123456789abcdef.arrow")  # as datasets' own map() leaves
    state = json.loads((folder / "state.json").read_text())
    edited(folder / "state.json", _fingerprint="other")
    assert identify_data(str(folder), with_validation=False)["sha256"] == before

    for files in (state["_data_files"][:1], state["_data_files"][::-1]):
        write(folder / "state.json", state | {"_data_files": files})
        assert identify_data(str(folder), with_validation=False)["sha256"] != before, files
    write(folder / "state.json", state)
    refused(
        "by the same questions", identify_data, str(folder), with_validation=True
    )  # a data set without parts

    outside = shutil.copy(second, tmp_path / "outside.arrow")
    write(
        folder / "state.json", state | {"_data_files": [{"filename": f"../{Path(outside).name}"}]}
    )
    refused(
        r"lists 'outside\.arrow' of another folder",
        identify_data,
        str(folder),
        with_validation=False,
    )
    for spoilt in ({}, [], {"_data_files": 3}, {"_data_files": [{}]}):
        write(folder / "state.json", spoilt)
        refused(
            "saved: not a data set that datasets can load",
            identify_data,
            str(folder),
            with_validation=False,
        )


def test_a_run_that_goes_on_under_other_libraries_says_which(squad, model, tmp_path, monkeypatch):
    spec = local(squad, model, steps=6, every=2)
    usual, before = fitting.batches_of, hardware.libraries()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fitting, "batches_of", lambda *of: stop_after(usual(*of), 4))
        fit(spec, tmp_path / "runs", say=quiet)
    monkeypatch.setattr(checkpoints, "libraries", lambda: before | {"torch": "9.9"})
    entry = fit(spec, tmp_path / "runs", say=quiet)
    assert entry["time"]["resumed_from_step"] == 4 and entry["status"] == "ok"
    assert (
        f"checkpoint: went on under torch 9.9 (it began with {before['torch']})"
        in entry["spec"]["adjusted"]
    )


def test_a_model_that_is_not_whole_takes_no_ones_place(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    with pytest.raises(OSError, match="full"), replacing(folder) as work:
        (work / "config.json").write_text("new")
        raise OSError("full")
    assert (folder / "config.json").read_text() == "old" and [
        path.name for path in tmp_path.iterdir()
    ] == ["model"]


def test_adapters_are_refused(model):
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    for ask in (load_qa_model, identify_model):
        refused(r"adapter_config\.json; merge the adapter into the weights", ask, str(model))


# Values of a model's configuration: each ends in a sentence, by whichever verb, or changes no answer.
SPOILT = cases("spoilt configurations")


@pytest.mark.parametrize("name", SPOILT)
def test_a_models_configuration_is_read_inside_one_guard_in_every_verb(model, squad, name):
    asks = [lambda: load_qa_model(model), lambda: trained_two_steps(squad, model)]
    asks += [lambda: plan(["P-tensor"], "bench", data=str(squad), model=str(model), machine=H200)]
    for value in SPOILT[name]:
        edited(model / "config.json", **{name: value})
        for ask in asks:
            try:
                ask()
            except UserError as problem:
                assert "\n" not in str(problem) and model.name in str(problem), (name, value)


def trained_two_steps(squad, model):
    _, made, batches = prepare(local(squad, model))
    for step in range(2):
        (samples, *_) = batches.step(step)
        made(**batches.collate(samples, torch.device("cpu"))).loss.backward()


RETURNED = {
    "return_dict": False,
    "chunk_size_feed_forward": 7,
    "output_attentions": True,
    "output_hidden_states": True,
}


@pytest.mark.parametrize(("name", "value"), RETURNED.items())
def test_how_results_are_returned_is_not_for_a_folder_to_say(model, name, value):
    ids = torch.arange(5, 25)[None]
    before, _ = load_qa_model(model)
    edited(model / "config.json", **{name: value})
    after, _ = load_qa_model(model)
    with torch.no_grad():
        assert torch.equal(before(ids).start_logits, after(ids).start_logits)


def test_surplus_weights_are_told_or_refused(model, caplog):
    weights = load_file(model / "model.safetensors")
    prefix = json.loads((model / "config.json").read_text())["model_type"]

    def load_with(*surplus):
        caplog.clear()
        save_file(
            weights | {name: torch.zeros(2) for name in surplus},
            model / "model.safetensors",
            {"format": "pt"},
        )
        load_qa_model(model)
        return [entry.getMessage() for entry in caplog.records]

    assert load_with("cls.predictions.bias", "lm_head.bias") == []  # which pretraining leaves
    (said,) = load_with("foo.bar")
    assert "1 weights are of no use here and are left out, such as foo.bar" in said
    for name in (
        f"{prefix}.encoder.layer.0.attention.self.query.lora_A",
        "qa_outputs.extra",
        "x.lora_B",
    ):
        refused(r"for which a .* has no place", load_with, name)


def test_padding_tokens_that_disagree_are_told(model, squad):
    own = json.loads((model / "config.json").read_text())["pad_token_id"]
    edited(model / "config.json", pad_token_id=own + 3)
    for ask in (lambda: load_qa_model(model), lambda: trained_two_steps(squad, model)):
        refused(f"pads with token {own}, pad_token_id in config.json is {own + 3}", ask)


def test_a_text_that_changes_while_it_is_read_is_cached_under_no_ones_name(tmp_path):
    """Neither its tokens nor a vocabulary that was learnt from it: the next run would take them for the old text's."""
    path, old = (
        tmp_path / "train.txt",
        "".join(f"the river number {i} ends in a port\n" for i in range(200)),
    )
    path.write_text(old)
    tokenizer = learn_tokenizer(open_text(path, "train"), 300)
    for use, by in ((tokenize_text, tokenizer), (learn_tokenizer, 290)):
        source = open_text(path, "train")
        assert source.sha256
        path.write_text(old.upper())
        refused(r"train\.txt: it has changed since it was first looked at", use, source, by)
        path.write_text(old)
    assert (
        tokenizer.decode(tokenize_text(open_text(path, "train"), tokenizer).tokens[1:40].tolist())
        in old
    )
    vocabulary = learn_tokenizer(open_text(path, "train"), 290).get_vocab()
    assert not any(letter in token for token in vocabulary for letter in ("RI", "TH"))


def test_a_run_again_leaves_nothing_of_the_first_ones_model_and_what_is_ones_own_beside_it(
    squad, model, tmp_path
):
    spec = local(squad, model)
    folder = tmp_path / "runs" / spec.run_path
    fit(spec, tmp_path / "runs", say=quiet)
    for name in ("model-int8", "model-int4"):
        shutil.copytree(folder / "model", folder / name)
    (folder / "model" / "stale.json").write_text("{}")
    own = [
        folder / name
        for name in ("model-backup/precious", "checkpoint.keep/mine", "model-notes.txt")
    ]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert fit(spec, tmp_path / "runs", say=quiet, force=True)["status"] == "ok"
    assert all(path.exists() for path in own)
    assert not {path.name for path in folder.iterdir()} & {"model-int8", "model-int4"}, (
        "of the older model"
    )
    assert not (folder / "model" / "stale.json").exists()
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns > before
    assert window_lengths(load_qa_model(folder / "model")[0])[0] == 48, "the run's, not the default"


@pytest.mark.parametrize("name", ["", "model", "record.json", "steps.jsonl", "answers/texts.json"])
def test_a_run_writes_over_nothing_that_a_link_leads_to(squad, model, tmp_path, name):
    spec = local(squad, model)
    place = tmp_path / "runs" / spec.run_path / name
    place.parent.mkdir(parents=True)
    theirs = tmp_path / "theirs"
    theirs.mkdir() if name in ("", "model") else theirs.write_text("mine")
    place.symlink_to(theirs)
    refused("a link", fit, spec, tmp_path / "runs", say=quiet)
    assert not list(theirs.iterdir()) if theirs.is_dir() else theirs.read_text() == "mine"


def test_data_of_another_plan_are_refused(squad, model, tmp_path):
    spec, other = local(squad, model), local(shutil.copytree(squad, tmp_path / "other"), model)
    assert fit(spec, tmp_path / "runs", data=load_data(other), say=quiet)["status"] == "ok", (
        "the same questions"
    )
    write(squad / "train.json", document((TEXT, [question("q", "who?")])))
    changed = load_data(local(squad, model))
    refused(
        "other is not what the run was planned with",
        fit,
        other,
        tmp_path / "runs",
        data=changed,
        say=quiet,
    )


def test_the_same_content_in_other_bytes_is_not_scored_by(squad, model):
    (squad / "validation.json").write_text(
        json.dumps(json.loads((squad / "train.json").read_text()), indent=1)
    )
    refused(r"validation\.json: has the questions of .*train\.json", load_data, local(squad, model))
    text = "".join(f"the river number {i} ends in a port\n" for i in range(300)).encode()
    (squad / "train.txt").write_bytes(text)
    for name, content in (("txt.gz", gzip.compress(text)), ("txt", text.replace(b"\n", b"\r\n"))):
        (squad / f"validation.{name}").write_bytes(content)
        said = rf"validation\.{name}: is the text of .*train\.txt"
        refused(said, load_text, planned("L1", "lm-smoke", data=str(squad)))


def test_a_link_is_called_by_its_own_name_wherever_it_is_asked_for(
    squad, model, tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(squad)
    spec = local(tmp_path / "link", model)
    passed = sweep.notebook_parameters(spec, tmp_path / "runs")
    monkeypatch.chdir(sweep.ROOT)
    (again,) = plan(
        ["A1"], "local", data=passed["data"], model=passed["model"], machine=CPU, max_length=48
    )
    assert (again.data, again.model) == (spec.data, spec.model) and spec.data["name"] == "link"
    monkeypatch.chdir(squad)
    assert identify_data(".", with_validation=True) == identify_data(
        str(squad), with_validation=True
    )
    monkeypatch.chdir(model)
    assert identify_model(".") == identify_model(str(model))


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    assert identify_model("someone/nobody-has-this") == {
        "name": "someone/nobody-has-this",
        "revision": "main",
    }
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: f"{tmp_path}/snapshots/{'a1' * 20}"
    )
    assert identify_model("someone/tiny") == {"name": "someone/tiny", "revision": "a1" * 20}


@pytest.mark.slow
def test_a_model_of_the_hub_trains_from_its_cache(kept, tmp_path, squad):
    """Without a network, in a process that knows no other cache."""
    hub = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(kept, hub / "snapshots" / ("0" * 40))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0" * 40)
    words = f"run A1-fp32 --preset local --data {squad} --model someone/tiny --max-length 48 --runs {tmp_path}/runs"
    done = python(
        "-m", "qa_lib", *words.split(), HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1"
    )
    assert "A1-fp32: ok" in done.stdout
