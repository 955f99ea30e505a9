"""A run is of the model and the data that were planned.

What is opened decides its identity, what is loaded is compared with it, and what was made of
another model does not stay beside the new one.
"""

import dataclasses
import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
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
from qa_lib.run.identity import (
    go_offline_without_network,
    identify_data,
    identify_model,
    inspect_model,
)
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.score.predict import load_qa_model, window_lengths
from qa_lib.train import checkpoint as checkpoints
from tests.conftest import slow
from tests.material import (
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
    """A tiny checkpoint of each encoder, like those of `save_model` but for the digests."""
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
    """Change all weights a little."""
    weights = {name: tensor + 1e-3 for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


# What decides an identity.

OPTIONAL_FILES = [
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "README.md",
    "other.json",
]


def identity_files(model: Path) -> set[str]:
    """Return the names of the files by which a model's folder is identified."""
    return {path.name for path in inspect_checkpoint(model).files}


def test_every_file_that_python_opens_is_in_the_identity(model):
    """Rust opens the tokenizer and the weights, under names that are listed, too."""
    for name in OPTIONAL_FILES:
        if not (model / name).exists():
            (model / name).write_text("{}")
    opened = set()

    def note(event, words):
        if event == "open":
            opened.add(Path(str(words[0])).name)

    sys.addaudithook(note)  # for good: a hook cannot be removed
    build_tokenizer(model)
    AutoModelForQuestionAnswering.from_pretrained(model)
    opened &= {path.name for path in model.iterdir()}
    assert "tokenizer_config.json" in opened
    assert opened <= identity_files(model)


def test_a_file_that_nothing_opens_is_not_in_the_identity(model):
    for name in ("README.md", "other.json"):
        (model / name).write_text("{}")
    assert identity_files(model).isdisjoint({"README.md", "other.json"})


def test_what_changes_tokens_or_logits_changes_the_identity(model):
    """Also what is added, and what moves from one file to another."""
    identities = [identify_model(str(model))]

    def expect_new(why: str) -> None:
        identities.append(identify_model(str(model)))
        assert identities[-1] not in identities[:-1], why

    edited(model / "tokenizer_config.json", do_lower_case=False, sep_token="[PAD]")
    expect_new("another tokenizer")
    for name in ("merges.txt", "vocab.json", "added_tokens.json", "special_tokens_map.json"):
        assert not (model / name).exists()
        (model / name).write_text('{"x": 9}')
        expect_new(name)
    (model / "merges.txt").rename(model / "vocab.txt")
    expect_new("the same bytes under another name")
    nudge(model / "model.safetensors")
    expect_new("other weights")


def test_a_card_does_not_change_the_identity(model):
    before = identify_model(str(model))
    (model / "README.md").write_text("A card.")
    assert identify_model(str(model)) == before


# Files that change after the plan.

OF_DATA = ["train.json", "validation.json"]
OF_A_MODEL = ["tokenizer_config.json", "model.safetensors"]


def change(path):
    if path.suffix == ".json":
        content = path.read_bytes().replace(b"where 3?", b"where 4?").replace(b"true", b"false", 1)
        path.write_bytes(content + b"\n")
    else:
        nudge(path)


def changed_while_loading(monkeypatch, path):
    """Let a file change after the data were loaded, and before the model is."""

    def load_and_change(spec):
        data = load_data(spec)
        change(path)
        return data

    workflow = dataclasses.replace(WORKFLOWS["qa"], load=load_and_change)
    monkeypatch.setitem(WORKFLOWS, "qa", workflow)


def expect_error_that_names(name, spec, runs):
    """Run a spec, which must fail for a file that is not what the run was planned with."""
    said = rf"is not what the run was planned with \(its file that was written last: {name}\)"
    refused(said, fit, spec, runs, say=quiet)
    status, message = end_of(runs / spec.run_path)
    assert status == "error"
    assert name in message


@pytest.mark.parametrize("name", [*OF_DATA, *OF_A_MODEL])
def test_a_file_that_changes_after_the_plan_ends_the_run_and_is_named(name, squad, model, tmp_path):
    spec = local(squad, model)
    change((squad if name in OF_DATA else model) / name)
    expect_error_that_names(name, spec, tmp_path / "runs")


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_file_of_a_model_that_changes_while_data_are_loaded_ends_the_run_and_is_named(
    name, squad, model, tmp_path, monkeypatch
):
    spec = local(squad, model)
    changed_while_loading(monkeypatch, model / name)
    expect_error_that_names(name, spec, tmp_path / "runs")


@pytest.mark.parametrize("name", OF_DATA)
def test_data_that_change_after_they_were_loaded_are_those_that_were_planned(
    name, squad, model, tmp_path, monkeypatch
):
    spec = local(squad, model)
    changed_while_loading(monkeypatch, squad / name)
    assert fit(spec, tmp_path / "runs", say=quiet)["status"] == "ok"


# Data sets that `datasets` has saved.


@pytest.fixture
def saved(tmp_path):
    """The folder of a saved data set of two files."""
    folder = tmp_path / "saved"
    answer = ("Alps", TEXT.index("Alps"))
    rows = [hub_row(f"{i}", "", f"where {i}?", TEXT, answer) for i in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=2)
    return folder


def digest_of(folder: Path) -> str:
    return identify_data(str(folder), with_validation=False)["sha256"]


def state_of(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def test_what_a_saved_data_sets_state_does_not_list_is_not_in_its_identity(saved):
    before = digest_of(saved)
    shard = min(saved.glob("*.arrow"))
    shutil.copy(shard, saved / "cache-0123456789abcdef.arrow")  # a cache of datasets' map()
    edited(saved / "state.json", _fingerprint="other")
    assert digest_of(saved) == before


def test_which_files_a_saved_data_set_has_and_in_which_order_is_in_its_identity(saved):
    before = digest_of(saved)
    state = state_of(saved)
    for files in (state["_data_files"][:1], state["_data_files"][::-1]):
        write(saved / "state.json", state | {"_data_files": files})
        assert digest_of(saved) != before, files


def test_a_saved_data_set_without_parts_has_no_questions_to_validate_on(saved):
    refused("by the same questions", identify_data, str(saved), with_validation=True)


def test_a_saved_data_set_has_no_file_of_another_folder(saved, tmp_path):
    shutil.copy(min(saved.glob("*.arrow")), tmp_path / "outside.arrow")
    outside = [{"filename": "../outside.arrow"}]
    write(saved / "state.json", state_of(saved) | {"_data_files": outside})
    refused(r"lists 'outside\.arrow' of another folder", digest_of, saved)


@pytest.mark.parametrize("state", [{}, [], {"_data_files": 3}, {"_data_files": [{}]}], ids=repr)
def test_a_saved_data_set_with_a_spoilt_state_is_refused(state, saved):
    write(saved / "state.json", state)
    refused("saved: not a data set that datasets can load", digest_of, saved)


# Checkpoints and models.


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
    assert (folder / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_adapters_are_refused(model):
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    for ask in (load_qa_model, identify_model):
        refused(r"adapter_config\.json; merge the adapter into the weights", ask, str(model))


# Values of a model's configuration: each ends in a sentence, by whichever verb, or changes nothing.
SPOILT = {
    "hidden_size": ["64", 0, -64, 1.5, None, []],
    "layer_norm_eps": [0, "x", None, -1],
    "hidden_dropout_prob": ["x", 2, -0.5, None],
    "attention_probs_dropout_prob": ["x", 2],
    "num_attention_heads": [0, 5, "4", None],
    "num_hidden_layers": ["2", 0, 1_000_000_000_000, None],
    "max_position_embeddings": [0, "x", 4],
    "vocab_size": [0, "x", 3],
    "pad_token_id": [None, "x", 3, 1_000_000_000],
    "hidden_act": ["swiglu", 3, None],
    "position_embedding_type": ["relative_key", 3],
    "is_decoder": [True],
    "num_labels": [5, "x"],
    "id2label": [{"0": "a"}, 3],
    "model_type": ["x", 3, None, "gpt2", [], {}],
    "dtype": ["float1", 3],
    "architectures": [3, None, ["X"]],
}


@pytest.mark.parametrize(
    ("name", "value", "built"),
    [("position_embedding_type", "relative_key", "absolute"), ("is_decoder", True, "False")],
)
def test_a_configuration_that_asks_for_what_is_not_built_is_refused(model, name, value, built):
    edited(model / "config.json", **{name: value})
    said = f"{name} is '{value}' in config.json, and {built} alone is built"
    refused(said, load_qa_model, model)


@pytest.mark.parametrize("name", SPOILT)
def test_a_models_configuration_is_read_inside_one_guard_in_every_verb(model, squad, name):
    uses = [
        lambda: load_qa_model(model),
        lambda: trained_two_steps(squad, model),
        lambda: plan(["P-tensor"], "bench", data=str(squad), model=str(model), machine=H200),
    ]
    for value in SPOILT[name]:
        edited(model / "config.json", **{name: value})
        for use in uses:
            try:
                use()
            except UserError as problem:
                assert "\n" not in str(problem), (name, value)
                assert model.name in str(problem), (name, value)


def trained_two_steps(squad, model):
    _, built, batches = prepare(local(squad, model))
    for step in range(2):
        (samples, *_) = batches.step(step)
        built(**batches.collate(samples, torch.device("cpu"))).loss.backward()


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
    """Neither its tokens nor a vocabulary that was learnt from it.

    The next run would take them for the old text's.
    """
    path = tmp_path / "train.txt"
    old = "".join(f"the river number {i} ends in a port\n" for i in range(200))
    path.write_text(old)
    tokenizer = learn_tokenizer(open_text(path, "train"), 300)
    for use, by in ((tokenize_text, tokenizer), (learn_tokenizer, 290)):
        source = open_text(path, "train")
        assert source.sha256
        path.write_text(old.upper())
        refused(r"train\.txt: it has changed since it was first looked at", use, source, by)
        path.write_text(old)
    token_ids = tokenize_text(open_text(path, "train"), tokenizer).tokens
    assert tokenizer.decode(token_ids[1:40].tolist()) in old
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
    users = [
        folder / name
        for name in ("model-backup/precious", "checkpoint.keep/mine", "model-notes.txt")
    ]
    for path in users:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert fit(spec, tmp_path / "runs", say=quiet, force=True)["status"] == "ok"
    for path in users:
        assert path.exists(), path
    for name in ("model-int8", "model-int4", "model/stale.json"):  # of the older model
        assert not (folder / name).exists(), name
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns > before
    assert window_lengths(load_qa_model(folder / "model")[0])[0] == 48, "the run's, not the default"


@pytest.mark.parametrize("name", ["", "model", "record.json", "steps.jsonl", "answers/texts.json"])
def test_a_run_writes_over_nothing_that_a_link_leads_to(squad, model, tmp_path, name):
    spec = local(squad, model)
    place = tmp_path / "runs" / spec.run_path / name
    place.parent.mkdir(parents=True)
    theirs = tmp_path / "theirs"
    is_folder = name in ("", "model")
    if is_folder:
        theirs.mkdir()
    else:
        theirs.write_text("mine")
    place.symlink_to(theirs)
    refused("a link", fit, spec, tmp_path / "runs", say=quiet)
    if is_folder:
        assert list(theirs.iterdir()) == []
    else:
        assert theirs.read_text() == "mine"


def test_the_same_data_of_another_folder_are_taken(squad, model, tmp_path):
    spec = local(squad, model)
    same = load_data(local(shutil.copytree(squad, tmp_path / "other"), model))
    assert fit(spec, tmp_path / "runs", data=same, say=quiet)["status"] == "ok"


def test_other_data_than_the_plans_are_refused(squad, model, tmp_path):
    spec = local(shutil.copytree(squad, tmp_path / "other"), model)
    write(squad / "train.json", document((TEXT, [question("q", "who?")])))
    others = load_data(local(squad, model))
    said = "other is not what the run was planned with"
    refused(said, fit, spec, tmp_path / "runs", data=others, say=quiet)


def test_questions_are_not_validated_by_the_same_in_other_bytes(squad, model):
    questions = json.loads((squad / "train.json").read_text())
    (squad / "validation.json").write_text(json.dumps(questions, indent=1))
    said = r"validation\.json: has the questions of .*train\.json"
    refused(said, load_data, local(squad, model))


RIVERS = "".join(f"the river number {i} ends in a port\n" for i in range(300)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("validation.txt.gz", gzip.compress(RIVERS)),
        ("validation.txt", RIVERS.replace(b"\n", b"\r\n")),
    ],
    ids=["compressed", "other line ends"],
)
def test_a_text_is_not_validated_by_the_same_in_other_bytes(name, content, tmp_path):
    (tmp_path / "train.txt").write_bytes(RIVERS)
    (tmp_path / name).write_bytes(content)
    spec = planned("L1", "lm-smoke", data=str(tmp_path))
    refused(rf"{name}: is the text of .*train\.txt", load_text, spec)


def test_a_link_is_called_by_its_own_name_wherever_it_is_asked_for(
    squad, model, tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(squad)
    spec = local(tmp_path / "link", model)
    passed = sweep.notebook_parameters(spec, tmp_path / "runs")
    monkeypatch.chdir(sweep.ROOT)
    words = {"data": passed["data"], "model": passed["model"], "max_length": 48}
    (again,) = plan(["A1"], "local", machine=CPU, **words)
    assert spec.data["name"] == "link"
    assert (again.data, again.model) == (spec.data, spec.model)


def test_the_working_directory_is_called_by_its_own_name(squad, model, monkeypatch):
    by_name = identify_data(str(squad), with_validation=True)
    monkeypatch.chdir(squad)
    assert identify_data(".", with_validation=True) == by_name
    monkeypatch.chdir(model)
    assert identify_model(".") == identify_model(str(model))


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    commit = "a1" * 20
    snapshot = f"{tmp_path}/snapshots/{commit}"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: snapshot)
    assert identify_model("someone/tiny") == {"name": "someone/tiny", "revision": commit}


def test_a_model_of_the_hub_that_is_not_to_be_had_is_known_by_its_branch():
    name = "someone/nobody-has-this"
    assert identify_model(name) == {"name": name, "revision": "main"}


@pytest.mark.parametrize("source", ["./x", "/x/y", "~/x", "x/", "a/b/c"])
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    refused(f"^model folder {re.escape(source)} does not exist$", identify_model, source)


def test_a_name_that_the_hub_cannot_have_is_one_line():
    refused("^model 'a b' is neither a folder nor a name of the hub: ", identify_model, "a b")


def test_the_config_of_a_model_of_the_hub_is_read_if_it_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))
    assert inspect_model("someone/tiny")[1] == {}
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert inspect_model("someone/tiny")[1] == {"model_type": "bert"}


def test_a_shape_is_known_by_its_sizes():
    shapes = ["gpt2:L2H192", "gpt2:L3H192", "gpt2:L2H192V512", "gpt2:L2H192P128"]
    identities = [identify_model(shape) for shape in shapes]
    assert [identity["name"] for identity in identities] == shapes
    assert len({identity["revision"] for identity in identities}) == 4
    _, config = inspect_model("gpt2:L2H192")
    assert config == {"model_type": "gpt2", "num_hidden_layers": 2, "num_attention_heads": 3}


def test_data_that_are_not_scored_are_known_by_their_training_part(squad):
    scored = identify_data(str(squad), with_validation=True)
    trained_on = identify_data(str(squad), with_validation=False)
    assert scored["name"] == trained_on["name"] == "squad"
    assert scored["sha256"] != trained_on["sha256"]
    change(squad / "validation.json")
    assert identify_data(str(squad), with_validation=False) == trained_on
    assert identify_data(str(squad), with_validation=True) != scored


@pytest.mark.slow
def test_a_model_of_the_hub_trains_from_its_cache(kept, tmp_path, squad):
    """Without a network, in a process that knows no other cache."""
    hub = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(kept, hub / "snapshots" / ("0" * 40))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0" * 40)
    words = f"run A1-fp32 --preset local --data {squad} --model someone/tiny --max-length 48"
    words = [*words.split(), "--runs", str(tmp_path / "runs")]
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = python("-m", "qa_lib", *words, **cache)
    assert "A1-fp32: ok" in done.stdout


@pytest.mark.parametrize(
    ("sources", "answers", "is_asked"),
    [
        (["tiny", "synthetic:40", "gpt2:tiny"], False, False),
        (["someone/bert", "synthetic:40"], False, True),
        (["someone/bert", "synthetic:40"], True, True),
    ],
)
def test_the_hub_is_asked_once_and_left_alone_where_it_does_not_answer(
    sources, answers, is_asked, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    session = Mock()
    session.head.side_effect = None if answers else ConnectionError("no network")
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    for _ in range(2):
        go_offline_without_network(*sources)
    is_offline = is_asked and not answers
    assert constants.HF_HUB_OFFLINE is is_offline
    assert os.environ.pop("HF_HUB_OFFLINE", "0") == str(int(is_offline))
    assert session.head.call_count == is_asked + (is_asked and answers)
