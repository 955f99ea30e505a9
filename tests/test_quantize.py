"""Models in 8 and 4 bits: what is trained on is what is saved, loaded and answered with.

Most of it needs torchao.
"""

import json
import re
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForQuestionAnswering, GPT2Config, GPT2LMHeadModel

from qa_lib.lab.app.choices import choices_of_runs, choices_of_user
from qa_lib.lab.tools import quantize as tools
from qa_lib.lab.tools.quantize import quantize_run
from qa_lib.model import qat
from qa_lib.model.build import build_model, save_model
from qa_lib.model.hf_checkpoint import QUANTIZED, SUMS
from qa_lib.model.qat import (
    WIDTHS,
    _pack,
    _unpack,
    fill_quantized,
    is_rounding,
    quantize,
    save_quantized,
)
from qa_lib.records.record import SCORING, RunTaken, lock, read_document, read_record
from qa_lib.records.schema import QUANTIZED_SCHEMA
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
    folder = tmp_path_factory.mktemp("runs")
    spec = spec_of("A1-fp32")
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
    packed = _pack(codes)
    assert packed.shape == (3, 16)
    assert torch.equal(_unpack(packed), codes)


# Training on rounded weights.


@pytest.fixture(scope="module", params=WIDTHS)
def width(request):
    return request.param


@pytest.fixture
def rounded(width):
    """A model whose layers round their weights while it trains."""
    return build_model(spec_of(f"A1-{width}"))


@pytest.mark.torchao
def test_every_linear_layer_of_the_encoder_rounds(rounded):
    names = [name for name, module in rounded.named_modules() if is_rounding(module)]
    assert len(names) == 6 * rounded.config.num_hidden_layers
    assert all(".layer." in name for name in names)


@pytest.mark.torchao
def test_weights_that_are_rounded_begin_as_those_that_are_not(rounded):
    native = dict(build_model(spec_of("A1-fp32")).named_parameters())
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, native[name]), name


@pytest.mark.torchao
def test_gradients_pass_the_rounding(rounded):
    rounded(torch.randint(5, 40, (3, 30))).start_logits.square().sum().backward()
    for name, parameter in rounded.named_parameters():
        if name.endswith("query.weight"):
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.torchao
def test_rounding_in_training_gives_the_answers_of_the_rounded_model(rounded, width, tmp_path):
    trained = logits(rounded)
    save_model(rounded, SimpleNamespace(save_pretrained=quiet), tmp_path / "model")
    plain = BertForQuestionAnswering.from_pretrained(tmp_path / "model")
    assert not torch.allclose(logits(plain), trained, atol=1e-4), "rounding changes something"
    quantize(plain, width)
    assert torch.allclose(logits(plain), trained, atol=1e-5)


@pytest.mark.torchao
def test_a_variant_trains_and_its_f1_is_that_of_its_quantized_model(tmp_path):
    spec = spec_of("A1-int8")
    entry = fit(spec, tmp_path, say=quiet)
    assert entry["status"] == "ok"
    comparison = quantize_run(tmp_path / spec.run_path, "int8", say=quiet)
    assert comparison["after"]["f1"] == entry["quality"]["f1"]


# A quantized model beside its run.


@pytest.mark.torchao
def test_what_is_saved_is_what_is_loaded(width, run):
    model, _ = load_qa_model(run / "model")
    quantize(model, width)
    loaded, _ = load_qa_model(run / f"model-{width}")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.torchao
def test_a_quantized_model_does_not_train(width, run):
    spec = planned("A1", "local", model=str(run / f"model-{width}"))
    refused("quantized, and train no more", build_model, spec)


@pytest.mark.torchao
def test_a_quantized_model_answers_on_the_cpu(width, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    quantized, _ = load_qa_model(run / f"model-{width}")
    plain, _ = load_qa_model(run / "model")
    assert answering_device(quantized) == "cpu"
    assert answering_device(plain) == "cuda"


@pytest.fixture
def comparison(width, run):
    """What was written of both models."""
    return read_document(run / f"model-{width}" / "quantized.json", QUANTIZED_SCHEMA)


@pytest.mark.torchao
def test_a_comparison_says_of_what_it_is(comparison, width):
    assert comparison["width"] == width
    assert comparison["data"]["n"] == 60


@pytest.mark.torchao
def test_a_comparison_has_the_sizes_on_disk(comparison, width, run):
    size = (run / f"model-{width}" / QUANTIZED).stat().st_size
    assert comparison["after"]["weights_bytes"] == size
    assert size < 0.6 * comparison["before"]["weights_bytes"], "embeddings keep their 32 bits"


@pytest.mark.torchao
def test_a_comparison_has_scores_and_times(comparison, run):
    before = comparison["before"]
    assert before["f1"] == read_record(run)["quality"]["f1"]
    assert before["latency_ms"] > 0
    assert comparison["after"]["latency_ms"] > 0


@pytest.mark.torchao
def test_predict_takes_a_quantized_model(run, typed):
    asked = ["--question", "who wrote it", "--context", "it was written by ada"]
    assert "answer" in json.loads(typed("predict --model", run / "model-int8", *asked))


@pytest.mark.torchao
def test_the_app_offers_a_quantized_model(runs, run):
    choices = {choice.key: choice for choice in choices_of_runs(runs)}
    assert [key.rpartition("/")[2] for key in sorted(choices)] == [
        run.name,
        "model-int4",
        "model-int8",
    ]
    eighth = choices[f"{run.parent.name}/{run.name}/model-int8"]
    after = json.loads((run / "model-int8" / "quantized.json").read_text())["after"]
    assert " · int8 · smoke" in eighth.name
    assert eighth.f1 == after["best_f1"]
    assert choices_of_user([run / "model-int8"])[0].name == eighth.name


NAME = "bert.encoder.layer.0.output.dense.weight"


@pytest.fixture
def without_digests(run, tmp_path):
    """A copy of a quantized model, as somebody might write it."""
    return shutil.copytree(
        run / "model-int8", tmp_path / "model", ignore=shutil.ignore_patterns(SUMS)
    )


OTHER_WIDTHS = [
    ("int2", "weights of 'int2': int8 or int4 can be had"),
    (None, "weights of None"),
    ("int4", "query.weight.scale of [64, 2]"),
]


@pytest.mark.torchao
@pytest.mark.parametrize(("named", "message"), OTHER_WIDTHS)
def test_a_folder_that_names_another_width_is_refused(named, message, without_digests):
    edited(without_digests / "config.json", quantized=named)
    refused(re.escape(message), load_qa_model, without_digests)


def without_scale(tensors):
    del tensors[f"{NAME}.scale"]


def with_one_more(tensors):
    tensors["more"] = torch.ones(1)


def with_another_shape(tensors):
    tensors[f"{NAME}.scale"] = torch.ones(3, 1)


def with_another_type(tensors):
    tensors[f"{NAME}.qdata"] = tensors[f"{NAME}.qdata"].float()


OTHER_TENSORS = [
    (without_scale, f"no {NAME}.scale"),
    (with_one_more, "has more, which the model"),
    (with_another_shape, f"no {NAME}.scale"),
    (with_another_type, f"no {NAME}.qdata"),
]


@pytest.mark.torchao
@pytest.mark.parametrize(("change", "message"), OTHER_TENSORS)
def test_a_folder_of_other_tensors_is_refused(change, message, without_digests):
    tensors = load_file(without_digests / QUANTIZED)
    change(tensors)
    save_file(tensors, without_digests / QUANTIZED)
    refused(re.escape(message), load_qa_model, without_digests)


@pytest.mark.torchao
def test_layers_of_another_kind_cannot_be_quantized():
    conv = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=40))
    refused(r"GPT2LMHeadModel: its layers have no torch\.nn\.Linear", quantize, conv, "int8")


@pytest.mark.torchao
def test_layers_of_odd_widths_cannot_be_quantized():
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
    """A record has the last part of a path alone, which may be something else in this folder."""
    change_record(again, data={"name": "squad"})
    squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(tools, "go_offline_without_network", asked.append)
    refused(
        r"'squad' is not the data of A1-fp32-s0-.* here: give --data",
        quantize_run,
        again,
        "int8",
        say=quiet,
    )
    assert asked == ["squad"], "its name may be of the hub, which need not answer"


def test_a_run_without_a_model_is_one_line(run, tmp_path, typed):
    shutil.copy(run / "record.json", tmp_path)
    assert "no model/ in it" in typed("quantize", tmp_path, code=2)


def test_a_language_model_is_one_line(run, tmp_path, typed):
    shutil.copy(run / "record.json", tmp_path)
    change_record(tmp_path, task={"name": "lm"}, quality=dict.fromkeys(SCORING["lm"]["scores"]))
    assert "its task is 'lm'" in typed("quantize", tmp_path, code=2)


def test_an_unknown_width_is_one_line(run):
    refused("weights of 'int3': int8 or int4 can be had", quantize_run, run, "int3")


def test_without_torchao_one_line_says_how_to_get_it(run, monkeypatch, typed):
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


# Files of quantized models, without torchao.


class Rounded:
    """A quantized model of one layer, in the parts that torchao makes."""

    def __init__(self, width, seed):
        torch.manual_seed(seed)
        low, high = {"int8": (-128, 128), "int4": (-8, 8)}[width]
        qdata = torch.randint(low, high, (3, 64), dtype=torch.int8)
        weight = SimpleNamespace(qdata=qdata, scale=torch.rand(3, 2))
        self.parts = {"weight": weight, "bias": torch.rand(3)}
        self.config = SimpleNamespace(quantized=width, save_pretrained=quiet)

    def state_dict(self):
        return self.parts

    def tensors(self):
        weight = self.parts["weight"]
        return [weight.qdata, weight.scale, self.parts["bias"]]


TOKENIZER = SimpleNamespace(save_pretrained=quiet)


@pytest.fixture
def rounded_folder(width, tmp_path):
    save_quantized(Rounded(width, seed=0), TOKENIZER, tmp_path / "model")
    return tmp_path / "model"


def test_whole_numbers_and_scales_come_back_as_they_were_saved(width, rounded_folder):
    other = Rounded(width, seed=1)
    fill_quantized(other, rounded_folder)
    assert all(map(torch.equal, other.tensors(), Rounded(width, seed=0).tensors()))


def test_whole_numbers_of_4_bits_take_half_a_byte(width, rounded_folder):
    stored = load_file(rounded_folder / QUANTIZED)
    assert stored["weight.qdata"].nbytes == 3 * 64 * {"int8": 8, "int4": 4}[width] // 8


SPOILT = {
    "has no bias of": lambda stored: stored.pop("bias"),
    "has more, which": lambda stored: stored.update(more=torch.ones(1)),
    r"has no weight\.scale of \[3, 2\]": lambda s: s.update({"weight.scale": torch.ones(3, 1)}),
    r"has no bias of \[3\] in torch\.float32": lambda s: s.update(bias=torch.ones(3).half()),
}


@pytest.mark.parametrize("said", SPOILT)
def test_a_file_of_other_tensors_is_refused(said, rounded_folder, width):
    stored = load_file(rounded_folder / QUANTIZED)
    SPOILT[said](stored)
    save_file(stored, rounded_folder / QUANTIZED)
    refused(f"model: {QUANTIZED} {said}", fill_quantized, Rounded(width, seed=1), rounded_folder)


def test_an_older_torchao_is_told_with_the_version_that_is_needed(monkeypatch):
    quantization = SimpleNamespace(qat=None)
    modules = {
        "torchao": SimpleNamespace(quantization=quantization),
        "torchao.quantization": quantization,
        "torchao.quantization.qat": quantization,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(qat, "version_of", lambda _: "0.1")
    monkeypatch.setattr(qat, "is_torchao_usable", lambda: False)
    refused(f"need torchao {qat.TORCHAO} or newer, here 0.1: pip install -U torchao", qat._torchao)
    monkeypatch.setattr(qat, "is_torchao_usable", lambda: True)
    assert qat._torchao() is quantization


def bert_of(hidden: int) -> BertForQuestionAnswering:
    config = BertConfig(
        hidden_size=hidden,
        num_attention_heads=1,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=40,
    )
    return BertForQuestionAnswering(config)


def test_every_layer_is_rounded_where_its_inputs_are_multiples_of_a_group(monkeypatch):
    rounded = []
    monkeypatch.setattr(
        qat, "_torchao", lambda: SimpleNamespace(quantize_=lambda layer, _: rounded.append(layer))
    )
    model = bert_of(32)
    qat._quantize_layers(model, None)
    assert rounded == list(model.bert.encoder.layer)
    refused("a linear layer of 48 inputs .* groups of 32", qat._quantize_layers, bert_of(48), None)


# The comparison, by its numbers: of models that are not quantized.


@pytest.fixture
def threads(monkeypatch):
    """The numbers of threads that were set, on a machine where PyTorch has seven."""
    numbers = [7]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_models_take_turns_at_the_same_questions_on_one_thread(threads, monkeypatch):
    asked = []

    def answer(model, question, context):
        assert threads[-1] == 1
        asked.append((model, question))
        is_first = len(asked) < 3  # which takes longer
        return {"ms": {"tokenize": 1.0, "model": 100.0 * (model == "slow") + 900.0 * is_first}}

    examples = [SimpleNamespace(question=f"q{n}", context="") for n in range(12)]
    monkeypatch.setattr(tools, "answer", answer)
    found = tools.latencies(["quick", "slow"], SimpleNamespace(examples=examples))
    assert found == [1.0, 101.0]
    assert asked[:3] == [("quick", "q0"), ("slow", "q0"), ("quick", "q1")]
    assert len(asked) == 2 * tools.REPEATS * tools.TIMED_QUESTIONS
    assert asked[-1] == ("slow", f"q{tools.TIMED_QUESTIONS - 1}")


def test_threads_are_given_back_where_a_question_cannot_be_answered(threads, monkeypatch):
    monkeypatch.setattr(tools, "answer", Mock(side_effect=RuntimeError("no answer")))
    source = SimpleNamespace(examples=[SimpleNamespace(question="q", context="")])
    with pytest.raises(RuntimeError, match="no answer"):
        tools.latencies(["model"], source)
    assert threads == [7, 1, 7]


def test_a_model_is_scored_at_threshold_0_with_the_bytes_of_all_its_weights(tmp_path, monkeypatch):
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_bytes(b"12345")
    scores = {"f1": 60.0, "best_f1": 70.0, "best_f1_thresh": -1.5, "exact": 1.0}
    score = Mock(return_value=scores)
    answers = SimpleNamespace(texts={"q": "she"}, null_odds={"q": 0.5})
    monkeypatch.setattr(tools, "score", score)
    monkeypatch.setattr(tools, "answers_to", lambda source, loaded: answers)
    monkeypatch.setattr(tools, "inspect_checkpoint", lambda folder: SimpleNamespace(weights=files))
    loaded = SimpleNamespace(model=Mock())
    found = tools.scored(loaded, tmp_path, SimpleNamespace(examples=["q"]))
    assert found == {
        "f1": 60.0,
        "best_f1": 70.0,
        "best_f1_threshold": -1.5,
        "weights_bytes": 10,
    }
    assert score.call_args.args == (["q"], answers.texts, answers.null_odds, 0.0)
    assert loaded.model.to.call_args.args == ("cpu",)


def test_the_verb_prints_what_quantizing_changes(monkeypatch, tmp_path, typed):
    before = {"f1": 81.5, "weights_bytes": 12_340_000, "latency_ms": 7.125}
    after = {"f1": 80.25, "weights_bytes": 5_000_000, "latency_ms": 4.0}
    quantized = Mock(return_value={"before": before, "after": after})
    monkeypatch.setattr(tools, "quantize_run", quantized)
    lines = typed("quantize", tmp_path, "--weights", "int4", "--data", "d", "--max-answer-length=9")
    assert quantized.call_args.args == (tmp_path, "int4", "d", 9)
    assert lines.splitlines() == [
        f"{tmp_path}/model-int4:",
        "  81.50 -> 80.25 F1",
        "  12.34 -> 5.00 MB",
        "  7.12 -> 4.00 ms a question on a thread",
    ]


def test_a_comparison_is_of_what_was_saved_and_says_which_was_before(again, monkeypatch):
    """Rounding is played by a copy; times and scores are those of the folder that is asked."""

    def saved(model, tokenizer, folder):
        shutil.copytree(again / "model", folder)

    def scores_of(loaded, folder, source):
        return {"f1": {"model": 80.0, "model-int8": 70.0}[folder.name]}

    monkeypatch.setattr(tools, "quantize", lambda model, width: None)
    monkeypatch.setattr(tools, "save_quantized", saved)
    monkeypatch.setattr(tools, "scored", scores_of)
    monkeypatch.setattr(tools, "latencies", lambda models, source: [2.0, 1.0])
    said = []
    found = quantize_run(again, "int8", max_answer_length=3, say=said.append)
    assert found["before"] == {"f1": 80.0, "latency_ms": 2.0}
    assert found["after"] == {"f1": 70.0, "latency_ms": 1.0}
    assert found["data"] | {"sha256": ""} == {"name": "synthetic:60", "sha256": "", "n": 60}
    assert found["run_id"] == again.name
    assert json.loads((again / "model-int8" / "quantized.json").read_text()) == found
    assert said == [f"{again.name}: 60 questions, twice"]
