"""Logits that do not depend on batching, model folders that are refused, and the command line."""

import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForQuestionAnswering, BertModel, PreTrainedModel

from qa_lib.__main__ import main
from qa_lib.data.examples import Example
from qa_lib.data.load import load_data
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.errors import UserError
from qa_lib.model.build import build_model, save_model
from qa_lib.model.hf_checkpoint import (
    INDEX,
    QUANTIZED,
    SUMS,
    find_folder,
    inspect_checkpoint,
    inspect_source,
    replacing,
    write_digests,
)
from qa_lib.model.load import _check_names, as_user_error, check_tokenizer, read_config
from qa_lib.run.identity import identify_model
from qa_lib.score import evaluate, predict
from qa_lib.score.decode import decode
from qa_lib.score.evaluate import evaluate_answers, span_loss
from qa_lib.score.predict import load_qa_model, predict_logits, tokens_at_once, window_lengths
from tests.material import (
    document,
    edited,
    flip_a_bit,
    question,
    refused,
    trained_tokenizer,
    write,
)
from tests.test_windows import TEXT, built
from tests.tiny import planned, resized

EXAMPLES = [
    Example(f"q{i}", "Rivers", "where is it"[: i % 9], (TEXT * 2)[i : 9 * i + 3]) for i in range(40)
]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer([TEXT] * 3, 300)


def bert(**more):
    return BertConfig(**{"vocab_size": 300} | SMALL | more)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    made = BertForQuestionAnswering(bert(vocab_size=len(tokenizer), max_position_embeddings=48))
    with torch.no_grad():
        made.qa_outputs.weight *= 50  # a fresh model's logits nearly tie
    return made.eval()


@pytest.fixture(scope="module")
def samples(tokenizer):
    return built(EXAMPLES, tokenizer, 40, 10)


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_shape_and_join(model, samples):
    ids, *both = predict_logits(model, samples)
    assert both[0].shape == both[1].shape == (len(samples), samples.lengths.max())
    assert sorted(ids.tolist()) == list(range(len(samples))) != ids.tolist()
    lengths = samples.lengths[ids.numpy()]
    assert (np.diff(lengths) <= 0).all()
    assert lengths[0] > lengths[-1]
    for row, length in enumerate(lengths):
        assert both[0][row, :length].isfinite().all()
        assert both[0][row, length:].isnan().all()
    inputs = {name: torch.from_numpy(array) for name, array in samples.batch([7], 40).items()}
    wanted = model(**inputs)
    row = ids.tolist().index(7)
    length = samples.lengths[7]
    for found, logits in zip(both, (wanted.start_logits, wanted.end_logits), strict=True):
        assert torch.allclose(found[row, :length], logits[0, :length], atol=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 77, 100])
def test_batch_size_and_padding_change_nothing(model, samples, batch_tokens):
    both = predict_logits(model, samples), predict_logits(model, samples, batch_tokens=batch_tokens)
    one, other = (decode(samples, EXAMPLES, *rows) for rows in both)
    assert one.predictions == other.predictions
    assert list(one.null_odds.values()) == pytest.approx(list(other.null_odds.values()), abs=1e-3)


def test_autocast(model, samples):
    _, start, _ = predict_logits(model, samples)
    _, half, _ = predict_logits(model, samples, dtype=torch.bfloat16)
    assert half.dtype == torch.float32
    inside = ~start.isnan()
    assert 0 < (half - start)[inside].abs().max() < 0.1 * start[inside].abs().max()


@pytest.fixture(scope="module")
def answered():
    """A model that has learnt nothing, its spec, and questions with answers."""
    spec = planned()
    torch.manual_seed(0)
    return build_model(spec).eval(), spec, load_data(spec)


def test_held_out_loss_is_what_training_computes_of_each_window(answered, tmp_path):
    (model, spec, data), losses = answered, []
    samples = data.validation_samples
    with torch.no_grad():
        for number, length in enumerate(samples.lengths):
            inputs = {
                name: torch.from_numpy(array)
                for name, array in samples.batch([number], length).items()
            }
            losses.append(model(**inputs).loss.item())
    assert 0 < (samples.end_positions > 0).sum() < len(samples)
    wrong = resized(spec, {"fault": "positional-join"})  # of answers alone
    found = [
        evaluate_answers(model, data, each, torch.device("cpu"), tmp_path)["loss"]
        for each in (spec, wrong)
    ]
    assert found == pytest.approx([np.mean(losses)] * 2, rel=1e-5)


def test_an_infinite_held_out_loss_is_null(answered):
    samples = answered[2].validation_samples
    ids, start, end = (
        torch.arange(len(samples)),
        *torch.zeros(2, len(samples), samples.lengths.max()),
    )
    assert span_loss(samples, ids, start, end) == pytest.approx(np.log(samples.lengths.max()))
    start[3, samples.start_positions[3]] = -torch.inf
    assert span_loss(samples, ids, start, end) is None


def test_answers_are_scored_at_threshold_0_by_the_limit_of_their_data(
    answered, tmp_path, monkeypatch
):
    """All margins are above 0 here, so that no question counts as answered."""
    model, spec, data = answered
    data = dataclasses.replace(data, max_answer_length=7)
    ids = [example.id for example in data.validation.examples]
    answers = Mock(texts=dict.fromkeys(ids, "she"), null_odds=dict.fromkeys(ids, 0.5))
    decoded = Mock(return_value=answers)
    monkeypatch.setattr(evaluate, "predict_logits", lambda *_, **__: (None, None, None))
    monkeypatch.setattr(evaluate, "span_loss", lambda *_: None)
    monkeypatch.setattr(evaluate, "decode", decoded)
    quality = evaluate_answers(model.train(), data, spec, torch.device("cpu"), tmp_path)
    assert not model.training
    assert decoded.call_args.kwargs == {"max_answer_length": 7}
    assert quality["f1"] == quality["always_null_f1"] < 100
    assert quality["loss"] is None
    answers.write.assert_called_once_with(tmp_path / "answers")


def test_batches_hold_what_they_may(samples):
    seen = []

    def model(input_ids, attention_mask, token_type_ids):
        seen.append(tuple(input_ids.shape))
        return SimpleNamespace(
            start_logits=torch.zeros(input_ids.shape), end_logits=torch.zeros(input_ids.shape)
        )

    predict_logits(model, samples, batch_tokens=120)
    assert sum(n for n, _ in seen) == len(samples)
    assert max(n * width for n, width in seen) <= 120
    assert seen == sorted(seen, key=lambda shape: -shape[1])
    assert {width % 8 for _, width in seen} == {0}


@pytest.mark.parametrize("most", [40, 45])
def test_no_batch_is_padded_beyond_the_longest_window_that_may_be(most, tokenizer):
    """A model may have no positions beyond it, where it is no multiple of 8."""
    samples = built(EXAMPLES, tokenizer, most, 10)
    assert samples.lengths.max() == most
    assert max(width for _, width in predict._batches(samples, 10_000)) == most


@pytest.fixture
def asked(typed):
    """What is printed to one question."""

    def ask(model, question="where", context=TEXT):
        return json.loads(
            typed("predict --model", model, "--question", question, "--context", context)
        )

    return ask


DATA = document(
    (
        TEXT,
        [question("q1", "where", ("Rotterdam", TEXT.index("Rotterdam"))), question("q2", "why?")],
    )
)


def test_a_file_is_answered(folder, tmp_path, capsys):
    data = write(tmp_path / "data.json", DATA)
    assert main(["predict", "--model", str(folder), str(data), "--out", str(tmp_path / "out")]) == 0
    names = ["nbest_predictions.json", "predictions.json", "texts.json", "null_odds.json"]
    paths = [tmp_path / "out" / name for name in names]
    shown = capsys.readouterr()
    assert (shown.out.split(), shown.err) == ([*map(str, paths)], ""), "no terminal, no bar"
    read = [json.loads(path.read_text()) for path in paths]
    assert all(list(part) == ["q1", "q2"] for part in read)
    assert all(text in TEXT for text in read[1].values())


def test_questions_need_no_gold_answers_to_be_answered(folder, tmp_path, typed):
    labelled = write(tmp_path / "labelled.json", DATA)
    bare = json.loads(labelled.read_text())
    first, second = bare["data"][0]["paragraphs"][0]["qas"]
    del first["answers"], first["is_impossible"]
    second["answers"], second["is_impossible"] = (
        [{"text": "nowhere to be found", "answer_start": 3}],
        False,
    )
    for file in (labelled, write(tmp_path / "bare.json", bare)):
        typed("predict --model", folder, file, "--out", tmp_path / file.stem)
    answers = [
        [path.read_text() for path in sorted((tmp_path / name).iterdir())]
        for name in ("labelled", "bare")
    ]
    assert answers[0] == answers[1]


def test_a_question_is_answered(folder, asked):
    found = asked(folder, "  where")
    assert list(found) == ["answer", "probability", "null_odds"]
    assert found["answer"] in TEXT
    assert 0 < found["probability"] <= 1
    assert (found["null_odds"] > 0) == (found["answer"] == "")
    assert asked(folder, "", "")["answer"] == ""


def seconds(monkeypatch, *times):
    """Let the clock of predict.py say these times, one after the other."""
    clock = SimpleNamespace(perf_counter=iter(times).__next__)
    monkeypatch.setattr(predict, "time", clock)


def test_an_answer_comes_with_its_milliseconds_windows_and_margin(model, tokenizer, monkeypatch):
    seconds(monkeypatch, 100.0, 100.001, 100.011, 100.111)
    found = predict.answer(predict.Model(model, tokenizer, 40, 10), "where", TEXT)
    assert found["ms"] == pytest.approx({"tokenize": 1, "model": 10, "decode": 100})
    samples = built([Example("0", "", "where", TEXT)], tokenizer, 40, 10)
    assert (found["windows"], found["window_tokens"]) == (len(samples), 40)
    scores = {entry["begin"] is None: entry["score"] for entry in reversed(found["nbest"])}
    assert found["margin"] == pytest.approx(scores[True] - scores[False], abs=1e-4)


def test_a_paragraph_of_nothing_has_no_margin(model, tokenizer):
    found = predict.answer(predict.Model(model, tokenizer, 40, 10), "where", "")
    assert found["margin"] is None
    assert [entry["text"] for entry in found["nbest"]] == [""]


def test_a_small_model_answers_with_one_thread(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(predict.torch, "set_num_threads", used.append)
    monkeypatch.setattr(predict, "THREADS", 5)
    monkeypatch.setattr(predict, "answer", lambda *_: {})
    for parameters in (predict.SMALL_MODEL - 1, predict.SMALL_MODEL):
        model = SimpleNamespace(num_parameters=lambda n=parameters: n)
        monkeypatch.setattr(predict, "find_folder", lambda folder: tmp_path)
        monkeypatch.setattr(
            predict, "_loaded", lambda *_, model=model: SimpleNamespace(model=model)
        )
        predict.ask(tmp_path, "where", "there")
    assert used == [1, 5]


@pytest.mark.parametrize(
    ("config", "has_gpu", "device"),
    [({}, True, "cuda"), ({}, False, "cpu"), ({"quantized": "int8"}, True, "cpu")],
)
def test_a_model_answers_on_a_gpu_unless_it_is_quantized(config, has_gpu, device, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    model = SimpleNamespace(config=SimpleNamespace(**config))
    assert predict.answering_device(model) == device


def test_a_model_is_loaded_onto_the_device_that_it_answers_on(folder, monkeypatch):
    monkeypatch.setattr(predict, "answering_device", lambda model: "meta")
    assert predict.load_answerer(folder).model.device.type == "meta"


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_a_length_that_no_answer_has_is_refused(wrong, folder):
    refused("max_answer_length", predict.ask, folder, "where", TEXT, max_answer_length=wrong)


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A cache of the hub that holds the folder's model as lab/bert, as the hub's client keeps it:
    by links."""
    repository = tmp_path / "cache" / "models--lab--bert"
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(folder, repository / "blobs")
    for made in (snapshot, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for path in (repository / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_name_of_the_hub_answers_as_its_folder_does(hub, folder, asked):
    assert asked("lab/bert") == asked(folder)
    os.makedirs("lab/bert")
    refused(
        r"lab/bert: no config\.json", load_qa_model, "lab/bert"
    )  # a folder of that name comes first


@pytest.mark.parametrize(
    "name", ["lab/none", "my-brt", "./my-bert", "/no/such/folder", "runs/x/y/"]
)
def test_a_name_that_is_neither_a_folder_nor_a_hubs_is_one_line(hub, name, typed):
    said = typed("predict --question where --context there --model", name, code=2)
    assert "no such folder" in said
    assert name.strip("./") in said
    assert said.count("\n") == 1
    assert len(said) < 230


def test_only_safetensors_and_texts_are_asked_of_the_hub(hub, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.update(options) or hub
    )
    assert find_folder("lab/bert") == hub
    kept = "config.json model-1.safetensors vocab.txt"
    others = "pytorch_model.bin evil.py onnx/model.safetensors"
    assert list(filter_repo_objects(f"{kept} {others}".split(), **asked)) == kept.split()


INCOMPLETE = [
    "",
    "data.json",
    "--out x",
    "--question x",
    "data.json --question x",
    "--question q --context c --out x",
]


@pytest.mark.parametrize("words", INCOMPLETE)
def test_one_thing_or_the_other(folder, words, typed):
    assert "either DATA.json and --out, or" in typed(f"predict --model {folder} {words}", code=2)


def test_bad_input_writes_nothing(folder, tmp_path, typed):
    data = tmp_path / "data.json"
    out = tmp_path / "out"
    room = "article 'Rivers', question 'q1': its .* tokens leave 0 of 48"
    long = document((TEXT, [question("q1", "river " * 60)]))
    for said, content in (
        ("not the SQuAD layout", []),
        ("an empty data set", document()),
        (room, long),
    ):
        found = typed("predict --model", folder, write(data, content), "--out", out, code=2)
        assert re.search(f"data.json: {said}", found)
        assert not out.exists()
    out.write_text("mine")
    said = typed("predict --model", folder, write(data, DATA), "--out", out, code=2)
    assert "out is no folder that can be written to" in said
    assert out.read_text() == "mine"


def config(**changes):
    return lambda folder: edited(folder / "config.json", **changes)


def without(name):
    return lambda weights: {other: value for other, value in weights.items() if other != name}


def saved(kind, config):
    return lambda folder: kind(config).save_pretrained(folder)


def of_a_folder(change):
    """Takes the words of a change first, and then the folder."""
    return lambda *words: lambda folder: change(folder, *words)


@of_a_folder
def weights(folder, change):
    save_file(
        change(load_file(folder / "model.safetensors")),
        folder / "model.safetensors",
        {"format": "pt"},
    )


@of_a_folder
def without_files(folder, *patterns):
    for path in itertools.chain.from_iterable(map(folder.glob, patterns)):
        path.unlink()


def indexed(folder, target):
    """Weights found through an index, which names `target`."""
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(folder / INDEX, {"metadata": {}, "weight_map": dict.fromkeys(found, target)})
    return found


@of_a_folder
def in_one_part(folder, name):
    save_file(indexed(folder, name), folder / name, {"format": "pt"})


@of_a_folder
def replaced(folder, name, by):
    """A file's place taken by something else."""
    (folder / name).unlink(missing_ok=True)
    by(folder / name)


@of_a_folder
def flipped(folder, name):
    write_digests(folder)
    flip_a_bit(folder / name)


def own_code(folder):
    (folder / "evil.py").write_text("open('ran', 'w')")
    auto = {"AutoModelForQuestionAnswering": "evil.Model", "AutoConfig": "evil.Config"}
    edited(folder / "config.json", model_type="evil", auto_map=auto)


DEBERTA = transformers.DebertaV2Config(vocab_size=300, **SMALL)
# What a folder is refused for wherever it is given: to answer with, and to train from ...
REFUSED = {
    "no config.json": without_files("config.json"),
    "not JSON": lambda folder: (folder / "config.json").write_text("{"),
    "config.json is no JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "config.json is neither": replaced("config.json", os.mkfifo),
    "special_tokens_map.json is neither": replaced("special_tokens_map.json", os.mkfifo),
    "cannot be loaded": lambda folder: (folder / "model.safetensors").write_bytes(b"noise"),
    "a model of type .deberta-v2.: its disentangled": saved(
        transformers.DebertaV2ForQuestionAnswering, DEBERTA
    ),
    "tokens in the tokenizer, 20 in the model": saved(
        BertForQuestionAnswering, bert(vocab_size=20)
    ),
    "embeddings.weight holds I32": weights(
        lambda weights: {name: t.int() for name, t in weights.items()}
    ),
    "the weights lack": weights(without("bert.encoder.layer.1.output.dense.bias")),
    "names 'x.bin', which is no safetensors": lambda folder: torch.save(
        indexed(folder, "x.bin"), folder / "x.bin"
    ),
    "names '../outside.safetensors'": in_one_part("../outside.safetensors"),
    "pipe.safetensors is neither": lambda f: (
        indexed(f, "pipe.safetensors") and os.mkfifo(f / "pipe.safetensors")
    ),
    "model.safetensors is neither a file nor": replaced(
        "model.safetensors", lambda path: path.symlink_to("/dev/zero")
    ),
    "'model.safetensors' is not the file that was saved": flipped("model.safetensors"),
    "'config.json' is not the file that was saved": flipped("config.json"),
    "1000000 layers in config.json, 2 in the weights": config(num_hidden_layers=1_000_000),
    "token_type_embeddings.weight is .*, .* by config.json": config(type_vocab_size=9),
    "word_embeddings.weight is .*, .* by config.json": config(vocab_size=10_000_000),
    "config.json has quantization_config": config(quantization_config={"load_in_8bit": 1}),
    "config.json has transformers_weights": config(transformers_weights="x.bin"),
}
# ... and for what an encoder need not have that is trained.
REFUSED_TO_ANSWER = {
    "no such folder": shutil.rmtree,
    r"not a question-answering model \(architectures: \['BertM": saved(BertModel, bert()),
    r"not a question-answering model \(architectures: None\)": config(architectures=None),
    "cannot be loaded: .*": own_code,
    "no weights in safetensors; a pickle": lambda f: (f / "model.safetensors").rename(
        f / "pytorch_model.bin"
    ),
    "no weights": without_files("model.safetensors"),
    r"no tokenizer \(": without_files("tokenizer*"),
    "the weights lack qa_outputs.bias": weights(without("qa_outputs.bias")),
    "the model has one token type": saved(BertForQuestionAnswering, bert(type_vocab_size=1)),
}


@pytest.mark.parametrize("message", [*REFUSED, *REFUSED_TO_ANSWER])
def test_model_folders_that_are_refused(folder, message, monkeypatch, capfd):
    monkeypatch.chdir(folder.parent)
    (REFUSED | REFUSED_TO_ANSWER)[message](folder)
    # Whoever asks whether to trust code hears yes.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    uses = [load_qa_model]
    if message in REFUSED:
        uses.append(train_from)
    for use in uses:
        refused(f"model.*: .*{message}", use, folder)
        assert not (folder.parent / "ran").exists()
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_models_that_are_loaded_at_one_time_leave_transformers_as_it_was(folder):
    """It ties no weights while it loads, which two threads could make permanent."""
    before = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load_qa_model, [folder] * 24))
    assert PreTrainedModel.tie_weights is before


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_no_kernel_is_fetched_for_a_config_that_asks_for_one(folder, key, monkeypatch):
    config(**{key: "kernels-community/flash-attn2@main"})(folder)
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: pytest.fail("fetched")
    )
    assert load_qa_model(folder)[0].config._attn_implementation == "sdpa"


def test_a_folder_without_a_tokenizer_trains_nothing(folder):
    without_files("tokenizer*", "vocab*")(folder)
    refused("it has no words", build_tokenizer, folder)


def test_preset_answerable_takes_no_question_without_an_answer():
    refused(
        r"question \S+ has no answer",
        load_data,
        planned("A1", "answerable", data="synthetic:100", model="tiny"),
    )


def test_windows_are_those_of_the_reference_script_where_a_models_config_says_none(model):
    assert window_lengths(model) == (48, 16), "384 and 128, cut to the model's 48 positions"


@pytest.mark.parametrize(
    ("tokens", "stride", "lengths"),
    [
        (40, 10, (40, 10)),
        (40, 0, (40, 0)),  # windows that share nothing
        (96, 32, (48, 16)),  # more than the positions
        ("abc", 1, (48, 16)),  # no number
        (True, 0, (48, 16)),  # nor is a bool
        (8, 9, (48, 16)),  # a stride that is too long
    ],
)
def test_windows_are_as_long_as_the_models_config_says_and_its_positions_allow(
    tokens, stride, lengths
):
    changed = bert(max_position_embeddings=48, window_tokens=tokens, window_stride=stride)
    assert window_lengths(SimpleNamespace(config=changed)) == lengths


def train_from(folder):
    """Plan a run from a folder and build what it trains, as `run` does before the first step."""
    spec = planned("A2", "local", max_length=40, model=str(folder))
    data = load_data(spec)
    model = build_model(spec)
    check_tokenizer(folder, data.tokenizer, model)
    return model


def test_training_takes_an_encoder_without_a_head_weights_in_parts_and_half_precision(
    folder, model
):
    kept = {
        name.removeprefix("bert."): value.half()
        for name, value in model.state_dict().items()
        if "qa" not in name
    }
    weights(lambda _: kept)(folder)
    in_one_part("part-1.safetensors")(folder)
    layer = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(
        train_from(folder).get_parameter(layer), model.get_parameter(layer).half().float()
    )
    before = identify_model(str(folder))
    flip_a_bit(folder / "part-1.safetensors", -5)
    assert identify_model(str(folder)) != before, "weights in parts count in a run's identity"


def test_a_kept_model_holds_digests_that_sha256sum_reads_and_is_replaced_whole(tmp_path, tokenizer):
    folder = tmp_path / "model"
    for seed in (0, 1):
        torch.manual_seed(seed)
        made = BertForQuestionAnswering(bert(vocab_size=len(tokenizer), max_position_embeddings=48))
        save_model(made, tokenizer, folder)
        load_qa_model(folder)
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0
    assert "model.safetensors: OK" in done.stdout
    (folder / SUMS).write_text("../../../dev/zero  ../../../dev/zero\n")
    refused(r"config\.json was added after", load_qa_model, folder)


@pytest.mark.parametrize(("free", "tokens"), [(2**35, 16_384), (2**35 + 1, 65_536)])
def test_a_forward_pass_has_more_tokens_where_much_memory_is_free(free, tokens, monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free, 2**37))
    assert tokens_at_once("cuda") == tokens
    assert tokens_at_once("cpu") == 16_384


# What a folder holds, and what a model takes of it.


def test_a_file_that_changes_after_it_was_checked_is_checked_again(folder):
    """In one process, which keeps the digests of files that have not changed."""
    write_digests(folder)
    inspect_checkpoint(folder)
    time.sleep(0.05)  # or the times of both changes may be equal
    flip_a_bit(folder / "model.safetensors")
    refused("'model.safetensors' is not the file that was saved", inspect_checkpoint, folder)


def change_under_its_old_time(path):
    """Change a file, and give it the time of its last writing, as `cp -p` and `rsync -t` may."""
    before = path.stat()
    time.sleep(0.05)  # or both changes of the inode may have one time
    flip_a_bit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_that_changes_under_its_old_time_is_checked_again(folder):
    write_digests(folder)
    inspect_checkpoint(folder)
    change_under_its_old_time(folder / "model.safetensors")
    refused("'model.safetensors' is not the file that was saved", inspect_checkpoint, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_checkpoint_of_which_a_file_changes_under_its_old_time_is_loaded_again(
    name, folder, monkeypatch
):
    loads = []

    def load(folder):
        loads.append(folder)
        return SimpleNamespace(model=Mock(num_parameters=lambda: 1), max_length=1)

    monkeypatch.setattr(predict, "load_answerer", load)
    monkeypatch.setattr(predict, "answer", lambda *_: {})
    monkeypatch.setattr(predict.torch, "set_num_threads", lambda _: None)
    for _ in range(2):
        predict.ask(folder, "where", "there")
    assert len(loads) == 1
    change_under_its_old_time(folder / name)
    predict.ask(folder, "where", "there")
    assert len(loads) == 2


def test_digests_are_of_every_file_but_their_own_list(folder):
    for _ in range(2):
        write_digests(folder)
    names = {line.split("  ")[1] for line in (folder / SUMS).read_text().splitlines()}
    assert names == {path.name for path in folder.iterdir()} - {SUMS}


def test_a_link_that_leads_nowhere_keeps_nobody_from_a_models_folder(folder):
    (folder / "notes.txt").symlink_to("nowhere")
    assert inspect_checkpoint(folder).weights == [folder / "model.safetensors"]


def test_a_list_of_digests_that_is_no_utf_8_is_refused_as_one_without_the_files(folder):
    (folder / "SHA256SUMS").write_bytes(b"\xff\n")
    refused("was added after the folder was saved", inspect_checkpoint, folder)


def test_a_runs_folder_stands_for_the_model_in_it(folder):
    assert find_folder(folder.parent) == folder
    (folder.parent / "config.json").touch()  # and so is a model itself
    assert find_folder(folder.parent) == folder.parent


def test_weights_are_taken_from_one_file_before_an_index_and_quantized_ones_first(folder):
    write(folder / INDEX, {"weight_map": {"x": "../outside.safetensors"}})
    assert inspect_checkpoint(folder).weights == [folder / "model.safetensors"]
    (folder / QUANTIZED).touch()
    assert inspect_checkpoint(folder).weights == [folder / QUANTIZED]


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}], ids=repr)
def test_an_index_that_names_no_weights_is_refused(index, folder):
    (folder / "model.safetensors").unlink()
    write(folder / INDEX, index)
    refused("has no weight_map, and so names no weights", inspect_checkpoint, folder)


def test_an_index_that_names_no_file_of_its_folder_is_refused(folder):
    (folder / "model.safetensors").unlink()
    write(folder / INDEX, {"weight_map": {"x": "a/b.safetensors"}})
    refused("names .*, which is no safetensors file of this folder", inspect_checkpoint, folder)


def test_parts_of_weights_are_each_named_once_and_in_order(folder):
    for name in ("b.safetensors", "a.safetensors"):
        (folder / name).touch()
    (folder / "model.safetensors").unlink()
    weight_map = {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    write(folder / INDEX, {"weight_map": weight_map})
    names = [path.name for path in inspect_checkpoint(folder).weights]
    assert names == ["a.safetensors", "b.safetensors"]


def test_nothing_is_left_beside_a_model_that_was_replaced(tmp_path):
    for content in ("old", "new"):
        with replacing(tmp_path / "model") as work:
            (work / "config.json").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "new"
    assert (tmp_path / "model" / SUMS).exists()


@pytest.mark.parametrize("source", ["tiny", "gpt2:L2H64", "someone/model"])
def test_what_names_no_folder_is_not_inspected(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inspect_source(source) is None


def test_how_a_model_is_called_is_not_for_its_config_to_say(folder):
    config(return_dict=False, chunk_size_feed_forward=7, num_labels=5)(folder)
    found = read_config(folder)
    assert (found.return_dict, found.chunk_size_feed_forward, found.num_labels) == (True, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_weights_may_be_floating_point_numbers_of_any_size(dtype, folder):
    weights(lambda found: {name: tensor.to(dtype) for name, tensor in found.items()})(folder)
    load_qa_model(folder)


# Names of weights beside a model's own; the first are left out without a word.
LEFT_BY_PRETRAINING = [
    "cls.predictions.bias",
    "bert.pooler.dense.weight",
    "lm_head.bias",
    "bert.embeddings.position_ids",
    "generator_lm_head.bias",
    "vocab_projector.bias",
    "decoder.weight",
    "h.0.attn.masked_bias",
    "discriminator_predictions.dense.weight",
    "generator_predictions.dense.weight",
    "vocab_transform.weight",
    "vocab_layer_norm.weight",
]


def test_what_pretraining_and_older_versions_have_left_is_left_out_without_a_word(model, caplog):
    _check_names("folder", model, False, set(), set(LEFT_BY_PRETRAINING))
    assert not caplog.messages


def test_weights_of_no_part_are_counted_and_the_first_is_named(model, caplog):
    _check_names("folder", model, False, set(), {"zoo.a", "foo.pooler_", "cls.x"})
    (said,) = caplog.messages
    assert said.startswith("folder: 2 weights are of no use here")
    assert said.endswith("such as foo.pooler_")


@pytest.mark.parametrize("name", ["bert.encoder.other", "qa_outputs.other", "x.lora_A.weight"])
def test_weights_that_would_change_what_a_model_computes_are_refused(name, model):
    said = f"folder: the weights have {name}, for which a BertForQuestionAnswering has no place"
    refused(said, _check_names, "folder", model, True, set(), {name})


def test_only_a_new_head_may_be_left_random(model):
    _check_names("folder", model, True, {"qa_outputs.weight"}, set())
    lacking = "bert.embeddings.LayerNorm.bias"
    for new_head, name in ((False, "qa_outputs.weight"), (True, lacking)):
        said = f"the weights lack {name}, which would be left random"
        refused(said, _check_names, "folder", model, new_head, {name}, set())


def fitting(tokens, model_type="bert", names=("token_type_ids",), pad=0, **more):
    """Check a tokenizer of so many tokens and a model of ten against each other."""
    vocabulary = {f"token {number}": number for number in range(tokens)}
    tokenizer = SimpleNamespace(
        get_vocab=lambda: vocabulary, model_input_names=names, pad_token_id=pad
    )
    values = {"model_type": model_type, "vocab_size": 10, "type_vocab_size": 2, "pad_token_id": 0}
    config = SimpleNamespace(**values | more)
    check_tokenizer("folder", tokenizer, SimpleNamespace(config=config))


def test_a_tokenizer_has_as_many_tokens_as_its_model_or_fewer():
    for tokens in (0, 9, 10):
        fitting(tokens)
    refused("folder: 11 tokens in the tokenizer, 10 in the model", fitting, 11)


def test_a_tokenizer_without_token_types_fits_a_model_of_one():
    fitting(10, names=(), type_vocab_size=1)
    refused("the model has one token type", fitting, 10, type_vocab_size=1)


def test_a_tokenizer_pads_as_its_encoder_does_and_a_decoders_as_it_likes():
    fitting(10, model_type="gpt2", pad=None, pad_token_id=7)
    said = "the tokenizer pads with token None, pad_token_id in config.json is 0"
    refused(said, fitting, 10, pad=None)


def test_whatever_a_library_raises_is_a_line_that_names_the_folder():
    def load(error):
        with as_user_error("folder"):
            raise error

    refused("^folder: cannot be loaded: first$", load, ValueError("first\nsecond"))
    refused("^own line$", load, UserError("own line"))
