"""Models in 8 and 4 bits: what is trained on is what is saved, loaded and answered with. Most needs torchao."""

import json
import re
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForQuestionAnswering, GPT2Config, GPT2LMHeadModel

from qa_lib.lab.app.choices import named, offered
from qa_lib.lab.tools.quantize import quantize_run
from qa_lib.model.build import build_model, save_model
from qa_lib.model.hf_checkpoint import QUANTIZED, SUMS
from qa_lib.model.qat import WIDTHS, _pack, _unpack, is_rounding, quantize
from qa_lib.records.record import QUANTIZED_SCHEMA, SCORING, RunTaken, document, lock, read_record
from qa_lib.run.fit import fit
from qa_lib.score.predict import answering_device, load_qa_model
from qa_lib.spec.machine import Machine
from tests.material import change_record, edited, refused, squad_folder
from tests.tiny import planned, quiet


def spec_of(variant):
    sizes = {"steps": 4, "measure_from": 1, "checkpoint_every": 0}
    return planned(variant, sizes=sizes, data="synthetic:60", machine=Machine(torchao=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in fp32 that has its model, and was quantized to both widths where that can be."""
    folder, spec = tmp_path_factory.mktemp("runs"), spec_of("A1-fp32")
    fit(spec, folder, say=quiet)
    for width in WIDTHS if find_spec("torchao") else ():
        quantize_run(folder / spec.run_path, width, say=quiet)
    return folder


@pytest.fixture
def run(runs):
    return runs / spec_of("A1-fp32").run_path


def logits(model):
    torch.manual_seed(0)
    with torch.no_grad():
        return model.eval()(torch.randint(5, 40, (3, 30))).start_logits


def test_two_numbers_of_4_bits_are_a_byte():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert _pack(codes).shape == (3, 16) and torch.equal(_unpack(_pack(codes)), codes)


@pytest.mark.torchao
@pytest.mark.parametrize("width", WIDTHS)
def test_rounding_in_training_gives_the_answers_of_the_rounded_model(width, tmp_path):
    model = build_model(spec_of(f"A1-{width}"))
    rounding = [name for name, module in model.named_modules() if is_rounding(module)]
    assert len(rounding) == 6 * model.config.num_hidden_layers and all(
        ".layer." in name for name in rounding
    )
    native = dict(build_model(spec_of("A1-fp32")).named_parameters())
    assert all(torch.equal(p, native[name]) for name, p in model.named_parameters())
    trained = logits(model)
    model(torch.randint(5, 40, (3, 30))).start_logits.square().sum().backward()
    assert all(
        p.grad.abs().sum() > 0
        for name, p in model.named_parameters()
        if name.endswith("query.weight")
    )
    save_model(model, SimpleNamespace(save_pretrained=quiet), tmp_path / "model")
    plain = BertForQuestionAnswering.from_pretrained(tmp_path / "model")
    assert not torch.allclose(logits(plain), trained, atol=1e-4), "rounding changes something"
    quantize(plain, width)
    assert torch.allclose(logits(plain), trained, atol=1e-5)


@pytest.mark.torchao
def test_a_variant_trains_and_its_f1_is_that_of_its_quantized_model(tmp_path):
    spec = spec_of("A1-int8")
    entry = fit(spec, tmp_path, say=quiet)
    found = quantize_run(tmp_path / spec.run_path, "int8", say=quiet)
    assert entry["status"] == "ok" and entry["quality"]["f1"] == found["after"]["f1"]


@pytest.mark.torchao
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_saved_is_what_is_loaded_and_not_trained(width, run, monkeypatch):
    model, _ = load_qa_model(run / "model")
    quantize(model, width)
    loaded, _ = load_qa_model(run / f"model-{width}")
    assert torch.equal(logits(loaded), logits(model))
    refused(
        "quantized, and train no more",
        build_model,
        planned("A1", "local", model=str(run / f"model-{width}")),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        answering_device(loaded) == "cpu"
        and answering_device(load_qa_model(run / "model")[0]) == "cuda"
    )
    found = document(run / f"model-{width}" / "quantized.json", QUANTIZED_SCHEMA)
    before, after, size = (
        found["before"],
        found["after"],
        (run / f"model-{width}" / QUANTIZED).stat().st_size,
    )
    assert (found["width"], found["data"]["n"], after["weights_bytes"]) == (width, 60, size)
    assert size < 0.6 * before["weights_bytes"], "embeddings keep their 32 bits"
    assert (
        before["f1"] == read_record(run)["quality"]["f1"]
        and min(before["latency_ms"], after["latency_ms"]) > 0
    )


@pytest.mark.torchao
def test_predict_and_the_app_take_it(runs, run, typed):
    asked = ["--question", "who wrote it", "--context", "it was written by ada"]
    assert "answer" in json.loads(typed("predict --model", run / "model-int8", *asked))
    choices = {choice.key: choice for choice in offered(runs)}
    assert [key.rpartition("/")[2] for key in sorted(choices)] == [
        run.name,
        "model-int4",
        "model-int8",
    ]
    eighth = choices[f"{run.parent.name}/{run.name}/model-int8"]
    after = json.loads((run / "model-int8" / "quantized.json").read_text())["after"]
    assert " · int8 · smoke" in eighth.name and eighth.f1 == after["best_f1"]
    assert named([run / "model-int8"])[0].name == eighth.name


NAME = "bert.encoder.layer.0.output.dense.weight"
FAULTS = {
    "another width": ("int2", None, "weights of 'int2': int8 or int4 can be had"),
    "no width": (None, None, "weights of None"),
    "the other width": ("int4", None, "query.weight.scale of [64, 2]"),
    "a tensor missing": (
        "int8",
        lambda t: {k: v for k, v in t.items() if k != f"{NAME}.scale"},
        f"no {NAME}.scale",
    ),
    "a tensor more": ("int8", lambda t: t | {"more": torch.ones(1)}, "has more, which the model"),
    "another shape": (
        "int8",
        lambda t: t | {f"{NAME}.scale": torch.ones(3, 1)},
        f"no {NAME}.scale",
    ),
    "another type": (
        "int8",
        lambda t: t | {f"{NAME}.qdata": t[f"{NAME}.qdata"].float()},
        f"no {NAME}.qdata",
    ),
}


@pytest.mark.torchao
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_of_other_numbers_is_refused(fault, run, tmp_path):
    """And without digests, as somebody might write it."""
    width, tensors, said = FAULTS[fault]
    folder = shutil.copytree(
        run / "model-int8", tmp_path / "model", ignore=shutil.ignore_patterns(SUMS)
    )
    edited(folder / "config.json", quantized=width)
    if tensors:
        save_file(tensors(load_file(folder / QUANTIZED)), folder / QUANTIZED)
    refused(re.escape(said), load_qa_model, folder)


@pytest.mark.torchao
def test_layers_that_cannot_be_quantized_are_named():
    conv = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=40))
    refused(r"GPT2LMHeadModel: its layers have no torch\.nn\.Linear", quantize, conv, "int8")
    odd = BertConfig(
        hidden_size=24,
        num_attention_heads=1,
        num_hidden_layers=1,
        intermediate_size=32,
        vocab_size=40,
    )
    refused("a linear layer of 24 inputs", quantize, BertForQuestionAnswering(odd), "int4")


@pytest.fixture
def again(run, tmp_path):
    """The run without quantized models, in another folder."""
    return shutil.copytree(
        run, tmp_path / "cpu-smoke" / run.name, ignore=shutil.ignore_patterns("model-int*")
    )


@pytest.mark.torchao
def test_what_is_found_names_the_questions_without_the_folders_above_them(again, tmp_path):
    questions = (
        squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
        / "train.json"
    )
    assert quantize_run(again, "int8", str(questions), say=quiet)["data"]["name"] == "train.json"


def test_other_questions_of_the_same_name_are_refused(again, tmp_path, monkeypatch):
    """A record has the last part of a path alone, which may be something else in the folder that this is called in."""
    change_record(again, data={"name": "squad"})
    squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
    monkeypatch.chdir(tmp_path)
    refused(
        r"'squad' is not the data of A1-fp32-s0-.* here: give --data",
        quantize_run,
        again,
        "int8",
        say=quiet,
    )


def test_a_run_without_a_model_an_unknown_width_and_a_missing_package_are_one_line(
    run, tmp_path, monkeypatch, typed
):
    shutil.copy(run / "record.json", tmp_path)
    assert "no model/ in it" in typed("quantize", tmp_path, code=2)
    change_record(tmp_path, task={"name": "lm"}, quality=dict.fromkeys(SCORING["lm"]["scores"]))
    assert "its task is 'lm'" in typed("quantize", tmp_path, code=2)
    refused("weights of 'int3': int8 or int4 can be had", quantize_run, run, "int3")
    for module in ("torchao", "torchao.quantization", "torchao.quantization.qat"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "pip install torchao" in typed("quantize", run, code=2)
    refused("pip install torchao", build_model, spec_of("A1-int8"))


@pytest.mark.torchao
def test_a_second_time_gives_a_model_that_can_be_used(again):
    for _ in range(2):
        quantize_run(again, "int8", say=quiet)
        load_qa_model(again / "model-int8")
    assert sorted(path.name for path in again.glob("model*")) == ["model", "model-int8"]


@pytest.mark.torchao
def test_a_run_that_is_at_work_is_not_quantized(run):
    with lock(run), pytest.raises(RunTaken):
        quantize_run(run, "int8", say=quiet)
