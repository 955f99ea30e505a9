"""Language modelling, the second task.

Text becomes tokens and windows, family L trains on a CPU, and perplexity is held to plain sums.
"""

import gzip
import json
import math
import random
import re
import shutil
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from functorch.compile import make_boxed_func
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from qa_lib.__main__ import main
from qa_lib.data import text as tokens
from qa_lib.data.batches import Batches
from qa_lib.data.load import batches_of, load_text
from qa_lib.data.text import learn_tokenizer, open_text, tokenize_text
from qa_lib.lab import sweep
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.search.plan import plan
from qa_lib.measure.meter import StepFlops
from qa_lib.model.build import build_model, model_config
from qa_lib.model.hf_checkpoint import SUMS
from qa_lib.records import record
from qa_lib.score import evaluate
from qa_lib.spec.presets import PRESETS
from qa_lib.spec.resolve import resolve
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.variants import VARIANTS, find_family
from qa_lib.train.compile import LossOf
from tests.conftest import slow
from tests.material import SQUAD, edited, refused
from tests.tiny import CPU, H200, losses_of, planned, quiet, resized

WIKITEXT = SQUAD.parent / "wikitext"
TINY = "gpt2:L2H64V400P80"


def short(row="L1", data="synthetic:60", steps=3, model=TINY, **more):
    """Return a spec of few steps of two micro-batches of 4 windows, uncompiled."""
    spec = planned(
        row, "lm-smoke", {"compile": "none"}, data=str(data), model=model, micro_batch=4, **more
    )
    return resized(spec, steps=steps, batch_tokens=8 * spec.preset.max_length, measure_from=1)


def lengthened(variant, preset, length, **more):
    """Return a spec for a GPU with windows of another length."""
    return resolve(variant, preset, 0, H200, {}, {}, "", "", max_length=length, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two documents to train on, one to validate on; and how they were written."""
    path = tmp_path_factory.mktemp("text")
    lines = [
        " = A river = \n",
        "\n",
        *(f"the river {word} runs to the sea , and é back .\n" for word in "abcdefgh"),
    ]
    with gzip.open(path / "train.txt.gz", "wt", encoding="utf-8", newline="") as stream:
        stream.write("".join(lines) * 20 + "\f\n" + "".join(reversed(lines)) * 20)
    (path / "validation.txt").write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return learn_tokenizer(open_text(folder, "train"), 400)


# From text to tokens.


def test_a_text_becomes_one_array_that_gives_it_back(folder, tokenizer):
    source = open_text(folder, "train")
    text = tokenize_text(source, tokenizer)
    first, second = np.flatnonzero(text.tokens == tokenizer.eos_token_id)
    assert first == 0, "before each document"
    documents = [tokenizer.decode(part[1:]) for part in np.split(text.tokens, [second])]
    assert "\f\n".join(documents) == "".join(source.load_rows())


def test_words_and_bytes_of_a_text_are_counted_with_its_line_ends(folder, tokenizer):
    source = open_text(folder, "train")
    text = tokenize_text(source, tokenizer)
    whole = "".join(source.load_rows())
    assert text.words == len(whole.split()) + whole.count("\n")
    assert text.bytes == len(whole.encode())


def test_arrays_are_made_once_by_content_and_memory_mapped(
    folder, tokenizer, tmp_path, monkeypatch
):
    first = tokenize_text(open_text(folder, "validation"), tokenizer)
    assert isinstance(first.tokens.base, np.memmap)
    assert first.tokens.dtype == np.uint16
    same = open_text(shutil.copy(folder / "validation.txt", tmp_path / "other.txt"), "train")
    monkeypatch.setattr(same, "load_rows", lambda: pytest.fail("read again"))
    assert tokenize_text(same, tokenizer).tokens.tolist() == first.tokens.tolist()


def test_a_vocabulary_is_the_same_each_time_it_is_learnt(folder, tokenizer):
    assert learn_tokenizer(open_text(folder, "train"), 400).get_vocab() == tokenizer.get_vocab()
    first, second = (tokens._learn(open_text(folder, "train"), 400) for _ in range(2))
    assert first == second


def test_what_is_kept_of_a_text_is_of_its_tokenizer(folder, tokenizer):
    """Another vocabulary is learnt anew, and another end token begins the text."""
    source = open_text(folder, "validation")
    first = tokenize_text(source, tokenizer)
    smaller = learn_tokenizer(open_text(folder, "train"), 270)
    assert len(smaller) == 270 < len(tokenizer)
    assert len(tokenize_text(source, smaller).tokens) > len(first.tokens)
    other_end = learn_tokenizer(open_text(folder, "train"), 400)
    other_end.eos_token = other_end.convert_ids_to_tokens(7)
    assert tokenize_text(source, other_end).tokens[0] == 7
    assert tokenize_text(source, tokenizer).tokens[0] == 0


def test_a_text_that_speaks_of_an_end_token_has_none_there(folder, tokenizer, tmp_path):
    (tmp_path / "train.txt").write_text("the <|endoftext|> of the river\n")
    text = tokenize_text(open_text(tmp_path, "train"), tokenizer)
    assert (text.tokens == tokenizer.eos_token_id).sum() == 1, "at the start"
    assert tokenizer.decode(text.tokens[1:]) == "the <|endoftext|> of the river\n"


def test_how_many_lines_are_tokenized_at_a_time_changes_nothing(folder, tokenizer, monkeypatch):
    source = open_text(folder, "train")
    backend = tokenizer.backend_tokenizer
    whole = tokens._tokenize(source, backend, 0)
    monkeypatch.setattr(tokens, "LINES_PER_CALL", 7)
    in_parts = tokens._tokenize(source, backend, 0)
    assert in_parts.tokens.tolist() == whole.tokens.tolist()
    assert (in_parts.words, in_parts.bytes) == (whole.words, whole.bytes)


def test_a_table_of_the_hub_without_a_column_of_text_is_refused(monkeypatch):
    table = Dataset.from_dict({"line": ["the river"]})
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: table)
    refused("someone/lines: no column text", list, open_text("someone/lines", "train").load_rows())


def test_a_large_vocabulary_takes_wider_numbers(folder, tokenizer):
    """65,536 tokens fit into 16 bits; one more does not."""
    source = open_text(folder, "validation")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    for size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        backend.add_tokens([f"<{number}>" for number in range(backend.get_vocab_size(), size)])
        assert backend.get_vocab_size() == size
        assert tokens._tokenize(source, backend, size - 1).tokens.dtype == dtype
    assert tokens._tokenize(source, backend, 2**16).tokens[0] == 2**16


def test_the_hub_gives_the_same_lines_as_the_file(folder, monkeypatch):
    lines = (folder / "validation.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    rows = ["" if line == "\n" else line for line in lines]
    load = Mock(return_value=Dataset.from_dict({"text": rows}))
    monkeypatch.setattr("datasets.load_dataset", load)
    source = open_text(PRESETS["lm-full"].data, "validation")
    assert list(source.load_rows()) == list(open_text(folder, "validation").load_rows())
    assert len(source.sha256) == 64
    load.assert_called_once_with("Salesforce/wikitext", "wikitext-103-raw-v1", split="validation")


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="no ../shared/wikitext beside the repository")
def test_wikitext_has_as_many_words_as_its_authors_count():
    lines = list(open_text(WIKITEXT / "wiki.valid.tokens", "train").load_rows())
    assert sum(len(line.split()) + 1 for line in lines) == 217_646
    assert list(open_text(WIKITEXT, "validation").load_rows()) == lines


# Bad input: a clear error, or the right number.


def load(folder, tmp_path, **files):
    """Return what `load_text` makes of a folder with the good files, some of them replaced."""
    others = shutil.ignore_patterns(*(f"{name}.*" for name in files))
    place = shutil.copytree(folder, tmp_path / "-".join(files), ignore=others)
    for name, content in files.items():
        (place / f"{name}.txt").write_bytes(content)
    return load_text(short(data=place))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_text_is_refused(split, folder, tmp_path):
    refused(f"{split}.txt: an empty text", load, folder, tmp_path, **{split: b""})


def test_one_token_is_too_short_to_train_on(folder, tmp_path):
    said = r"train.txt: a text of 2 tokens, shorter than a window of 64"
    refused(said, load, folder, tmp_path, train=b"a")


def test_a_text_of_one_window_is_enough_to_train_on(folder, tmp_path):
    data = load(folder, tmp_path, train=b"a" + b"\n" * 62)
    assert len(data.samples.text.tokens) == 64, "the end token, and one for each byte"
    assert len(data.samples) == 1
    assert data.n == data.samples.text.words == 63
    assert data.load_s > 0


def test_one_token_is_enough_to_score(folder, tmp_path):
    data = load(folder, tmp_path, train=(b"the sea " * 20 + b"\n") * 9, validation=b"a")
    text = data.validation_samples
    assert (data.n_eval, text.words, text.bytes) == (1, 1, 1)
    token_ids = torch.from_numpy(text.tokens.astype("int64"))
    assert 0 < evaluate.total_nats(build_model(short()).eval(), token_ids, 64, 32) < 20


def test_windows_line_ends_are_line_ends(folder, tmp_path, tokenizer):
    whole = (folder / "validation.txt").read_bytes()
    (tmp_path / "wiki.valid.tokens").write_bytes(whole.replace(b"\n", b"\r\n"))
    text = tokenize_text(open_text(tmp_path, "validation"), tokenizer)
    plain = tokenize_text(open_text(folder, "validation"), tokenizer)
    assert text.tokens.tolist() == plain.tokens.tolist()
    assert (text.words, text.bytes) == (plain.words, plain.bytes)


def test_broken_text_is_named_by_its_line(folder, tmp_path):
    said = r"validation.txt: line 2 is not UTF-8: .* at byte 3 of it"
    refused(said, load, folder, tmp_path, validation=b"the\nsea\xff\n")


def test_a_compressed_file_that_is_cut_is_named_by_the_line_before(folder, tmp_path):
    path = tmp_path / "cut.txt.gz"
    path.write_bytes((folder / "train.txt.gz").read_bytes()[:-20])
    refused(r"cut.txt.gz: cannot be read after line", list, open_text(path, "train").load_rows())
    path.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 20)  # its header, and what cannot be
    refused(r"cut.txt.gz: cannot be read after line 0", list, open_text(path, "train").load_rows())


def test_what_is_no_text_is_refused(folder, tmp_path):
    refused("none of train.txt, train.txt.gz", open_text, tmp_path, "train")
    refused("no such file", open_text, tmp_path / "gone.txt", "train")
    refused("no such file", open_text, "no-folder/gone.txt", "train")
    refused("one file has no text to validate on", open_text, folder / "train.txt.gz", "validation")
    refused("not one of .txt", open_text, __file__, "train")
    for name in (
        "text",
        "json:all",
    ):  # would be read by datasets' own builders, out of the working directory
        refused("a format's name, by which datasets reads", open_text(name, "train").hash_content)


def test_a_tokenizer_without_a_name_or_an_end_token_is_named_by_its_class(folder):
    endless = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    source = open_text(folder, "train")
    refused("^TokenizersBackend: its tokenizer has no end token", tokenize_text, source, endless)


def test_a_folder_whose_tokenizer_has_no_end_token_is_named(run, folder, tmp_path):
    """The message names the model's folder, and what its tokenizer_config.json says."""
    endless = shutil.copytree(run / "model", tmp_path / "endless", ignore=lambda *_: [SUMS])
    edited(endless / "tokenizer_config.json", eos_token=None)
    refused(
        r"endless: its tokenizer has no end token",
        load_text,
        short(data=folder, model=str(endless)),
    )


def test_a_context_above_the_models_positions_is_refused_with_a_model_that_has_them():
    said = "has positions for 80 tokens and not for 128: give --model gpt2:L2H64V400P128"
    refused(said, short, max_length=128)


def test_a_context_above_the_models_positions_is_not_built():
    said = "takes 80 tokens, and samples of preset lm-smoke have 128"
    refused(said, build_model, resized(short(), max_length=128))


# Sizes, variants and presets.


def test_a_shape_is_a_model_by_its_sizes():
    small = model_config("gpt2:L12H768")
    assert (small.n_layer, small.n_embd, small.n_head, small.n_positions) == (12, 768, 12, 1024)
    assert model_config(TINY).n_positions == 80


def test_a_shapes_vocabulary_is_rounded_up_to_whole_tiles():
    assert model_config("gpt2:L12H768").vocab_size == 50_304
    assert model_config(TINY).vocab_size == 448


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2:L4H64V4096", 0.5), ("gpt2:L12H768", 124.5), ("gpt2:L24H1024", 354.9)],
)
def test_a_shape_has_as_many_parameters_as_gpt2_of_that_size(name, millions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(name))
    assert round(model.num_parameters() / 1e6, 1) == millions


WRONG_SHAPES = [
    "gpt2:",
    "gpt2:L2H65",
    "gpt2:L0H64",
    "gpt2:L2H64V256",
    "gpt2:L2H64P0",
    "gpt2:l2h64",
    "gpt2:L²H64",
]


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_shape_that_cannot_be_is_refused_with_how_one_is_written(name):
    refused("a shape is written like gpt2:L12H768", find_shape, name)


def test_another_name_is_no_shape():
    assert find_shape("gpt2") is None


@pytest.mark.parametrize(
    ("row", "preset", "said"),
    [
        ("L1", "smoke", "L1 is a variant of task lm, and preset 'smoke' of task qa"),
        ("A1", "lm-smoke", "A1 is a variant of task qa, and preset 'lm-smoke' of task lm"),
    ],
)
def test_a_variant_of_another_task_than_the_presets_is_refused(row, preset, said):
    refused(said, plan, [row], preset, machine=CPU)


def test_variants_of_language_models_take_whole_windows():
    for name in find_family("L"):
        settings = VARIANTS[name].settings
        assert (settings.padding, settings.qkv) == ("max_length", "separate"), name


def test_a_context_length_is_part_of_the_hash_and_not_of_the_group():
    specs = [short(model="gpt2:L2H64V400", max_length=length) for length in (None, 128, 256)]
    assert len({spec.hash for spec in specs}) == 3
    assert {spec.group for spec in specs} == {"cpu-lm-smoke"}


@pytest.mark.parametrize(("length", "windows"), [(256, 128), (1024, 32)])
def test_a_context_length_keeps_the_tokens_of_a_step(length, windows):
    spec = lengthened("L1", "lm-bench", length)
    assert spec.micro_batches * spec.settings.micro_batch == windows


@pytest.mark.parametrize("length", [1, 2, 2048])
def test_a_context_length_that_cannot_be_is_refused(length):
    said = "tokens are too few or too many"
    refused(said, plan, ["L1"], "lm-smoke", machine=CPU, max_length=length)


@pytest.mark.parametrize(
    ("preset", "length", "said"),
    [
        ("lm-bench", 1000, r"1000 tokens do not make up the 32,768 .* take 512 or 1024 tokens"),
        ("lm-smoke", 3, r"3 tokens do not make up the 1,024 .* take 4 tokens"),
    ],
)
def test_a_context_length_that_divides_no_step_is_refused_with_the_nearest(preset, length, said):
    refused(said, lengthened, "L1", preset, length)


def test_any_context_length_goes_with_a_batch_of_ones_own():
    assert lengthened("L1", "lm-bench", 1000, batch=32).preset.batch == 32


def test_a_sweep_takes_the_variants_of_its_presets_task_and_hands_on_the_length(
    monkeypatch, tmp_path
):
    asked = Mock(return_value=[])
    monkeypatch.setattr(sweep, "probe", lambda: (CPU, {}))
    monkeypatch.setattr(sweep, "plan", asked)
    for preset in ("smoke", "lm-smoke"):
        words = ["--plan", "--runs", str(tmp_path), "--max-length", "128"]
        main(["sweep", "--preset", preset, *words])
    questions, text = (call.kwargs["variants"] for call in asked.call_args_list)
    assert text == find_family("L")
    assert questions == [name for name in VARIANTS if name not in text]
    assert asked.call_args.kwargs["max_length"] == [128]


def test_a_notebook_is_given_the_length_that_was_asked_for(tmp_path):
    assert sweep.notebook_parameters(short(max_length=32), tmp_path)["max_length"] == 32
    assert "max_length" not in sweep.notebook_parameters(short(), tmp_path)


def test_a_text_of_less_than_a_step_is_too_short(folder):
    spec = resized(short(data=folder), steps=None, epochs=1, batch_tokens=2**30)
    refused("too few for --batch", Batches, load_text(spec).samples, spec)


def test_batches_are_a_function_of_seed_and_step(folder):
    spec = short(data=folder)
    samples = load_text(spec).samples
    one = Batches(samples, spec)
    one.step(0)
    assert np.array_equal(one.step(7), Batches(samples, spec).step(7))


def test_batches_are_windows_of_the_text(folder):
    spec = short(data=folder)
    samples = load_text(spec).samples
    batches = Batches(samples, spec)
    for numbers in batches.step(7):
        arrays = batches.arrays(numbers)
        windows = [samples.text.tokens[64 * number :][:64] for number in numbers]
        assert np.array_equal(arrays["input_ids"], windows)
        assert np.array_equal(arrays["labels"], windows)


def test_the_searched_rival_of_a_language_model_takes_windows_and_packs_nothing(folder):
    data = load_text(short(data=folder))
    assert type(batches_of(data.samples, short("L-searched", data=folder))) is Batches


def test_the_arithmetic_of_a_step_is_that_of_its_products():
    model = build_model(short(max_length=64))
    ids = torch.zeros((4, 64), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    cost = StepFlops(model)
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if ".h." in name and p.ndim == 2
    )
    tokens_ = 4 * 64
    # The formula counts a product with vectors, forward and back, and no masked half of attention,
    # which eager attention computes, too.
    vectors = 4 * tokens_ * (cost.parameters - matrices)
    masked = 12 * 2 * 64 * 4 * 64**2 / 2
    counted = counter.get_total_flops()
    assert cost.flops(tokens_, 4 * 64**2) + masked - vectors == counted


def test_fused_attention_is_told_causal_and_given_no_mask(monkeypatch):
    """Eager and compiled: with a mask PyTorch would not take FlashAttention.

    The logits are those of eager attention.
    """
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*inputs, attn_mask=None, is_causal=False, **more):
        calls.append((attn_mask, is_causal))
        return real(*inputs, attn_mask=attn_mask, is_causal=is_causal, **more)

    ids = torch.randint(0, 400, (2, 64))
    expected = build_model(short("L-bf16")).eval()(ids).logits
    model = build_model(short("L-sdpa")).eval()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        for forward in (model, torch.compile(model, backend="eager")):
            assert torch.allclose(forward(ids).logits, expected, atol=1e-5)
    layers = 2
    assert calls == [(None, True)] * 2 * layers


def test_fused_attention_writes_the_same_with_a_cache_and_without():
    model = build_model(short("L-sdpa")).eval()
    prompt = torch.randint(0, 400, (1, 9))
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(prompt, use_cache=True, **how)
    without = model.generate(prompt, use_cache=False, **how)
    assert with_cache.tolist() == without.tolist()


# Runs.


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """The folder of a run of L1 over the small text, for as long as it takes to learn it."""
    runs = tmp_path_factory.mktemp("runs")
    spec = short(data=folder, steps=40)
    fit(spec, runs, say=quiet)
    return runs / spec.run_path


def test_a_run_leaves_a_whole_record(run):
    entry = record.read_record(run)
    assert entry["status"] == "ok"
    assert entry["group"] == "cpu-lm-smoke"
    assert entry["quality"].keys() == set(entry["task"]["scores"])
    assert entry["quality"]["n"] == entry["spec"]["n_eval"]
    assert entry["speed"]["tokens_per_s_padded"] == entry["speed"]["tokens_per_s"] > 0


def test_a_run_learns(run):
    """An untrained model thinks all of the 400 tokens equally likely."""
    assert record.read_record(run)["quality"]["token_perplexity"] < 30


def test_perplexities_are_of_the_nats_and_of_what_is_counted(run, folder):
    quality = record.read_record(run)["quality"]
    text = (folder / "validation.txt").read_text(encoding="utf-8")
    assert quality["words"] == len(text.split()) + text.count("\n")
    nats = quality["nats"]
    assert quality["word_perplexity"] == pytest.approx(math.exp(nats / quality["words"]))
    assert quality["token_perplexity"] == pytest.approx(math.exp(nats / quality["n"]))
    assert quality["bits_per_byte"] == pytest.approx(nats / math.log(2) / quality["bytes"])


def test_a_compiled_loss_has_no_gradient_of_logits():
    """Seen at what enters the backward pass: a gradient of each thing that was returned."""
    entering = []

    def compile_forward(graph, _):
        return make_boxed_func(graph.forward)

    def compile_backward(graph, _):
        inputs = graph.graph.find_nodes(op="placeholder")
        gradients = [node for node in inputs if node.name.startswith("tangents")]
        entering.append([tuple(node.meta["val"].shape) for node in gradients])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
    model = build_model(short())
    ids = torch.arange(128).view(2, 64)
    torch.compile(LossOf(model), backend=backend)(input_ids=ids, labels=ids).backward()
    torch.compile(model, backend=backend)(input_ids=ids, labels=ids).loss.backward()
    assert entering == [[()], [(), (2, 64, model.config.vocab_size)]]


def test_a_model_that_has_diverged_ends_its_run_as_an_error(folder, tmp_path, monkeypatch):
    spec = short(data=folder)
    monkeypatch.setattr(evaluate, "total_nats", lambda *_: math.nan)
    refused(r"text has nan nats \(the model has diverged\)", fit, spec, tmp_path, say=quiet)
    entry = record.read_record(tmp_path / spec.run_path)
    assert entry["status"] == "error"
    assert entry["error"]["kind"] == "DataError"
    assert entry["quality"]["nats"] is None


def test_a_run_goes_on_from_a_checkpoint_and_its_tokenizer(run, folder, tmp_path):
    before = record.read_record(run)["quality"]
    spec = short(data=folder, model=str(run / "model"), steps=2)
    after = fit(spec, tmp_path, say=quiet)["quality"]
    assert after["n"] == before["n"]
    assert after["nats"] < 1.5 * before["nats"]


def test_a_folder_without_weights_will_do_where_no_score_is_measured(run, tmp_path):
    bare = shutil.copytree(run / "model", tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    spec = short(model=str(bare))
    refused(r"no model.safetensors, which lm-smoke needs", build_model, spec)
    build_model(resized(spec, quality=False))


def test_a_model_of_the_other_task_is_refused(run):
    model = str(run / "model")
    refused(r"of type 'gpt2'; this lab knows bert, .* for task qa", planned, model=model)
    refused(r"of type 'bert'; this lab knows gpt2 for task lm", short, model="tiny")


TRAINED = ["L0", "L-recompute", "L-lora", "L-qlora"]
TRAINED += [slow(name) for name in ("L-sdpa", "L-adamw", "L-dropout", "L-8bit")]


@pytest.mark.parametrize("row", TRAINED)
def test_a_variant_trains_what_it_says_and_saves_a_plain_model(row, tmp_path):
    spec = short(row)
    before = dict(build_model(spec).named_parameters())
    adapters = sum(parameter.numel() for name, parameter in before.items() if ".lora_" in name)
    entry = fit(spec, tmp_path, say=quiet)
    assert entry["status"] == "ok"
    losses = losses_of(tmp_path / spec.run_path)
    assert len(losses) == 3
    assert losses[0] == pytest.approx(math.log(448), abs=0.3)

    path = tmp_path / spec.run_path / "model"
    plain, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]

    counts = entry["model"]
    assert (counts["params_trainable"] < counts["params_total"]) == (adapters > 0)
    # Also of weights that it held in 4 bits.
    assert counts["params_total"] == plain.num_parameters() + adapters

    source = open_text(spec.data_source, "validation")
    token_ids = tokenize_text(source, AutoTokenizer.from_pretrained(path)).tokens.astype("int64")
    nats = evaluate.total_nats(plain.eval(), torch.from_numpy(token_ids), 64, 32)
    assert nats == pytest.approx(entry["quality"]["nats"], rel=1e-6)


# Perplexity.


@pytest.mark.parametrize(
    ("count", "length", "shared"),
    [(2, 8, 4), (8, 8, 4), (9, 8, 4), (100, 8, 1), (101, 8, 7), (1000, 64, 32)],
)
def test_each_token_is_scored_once_from_enough_context(count, length, shared):
    scored_tokens = []
    for begin, scored in evaluate.windows(count, length, shared):
        assert scored - begin >= (shared if begin else 1)
        scored_tokens += range(scored, min(begin + length, count))
    assert scored_tokens == list(range(1, count))


def test_nats_of_a_model_in_fp32_are_summed_in_double_precision(monkeypatch):
    """And the perplexity per word with them: a plain loop over the same logits is the reference."""
    torch.manual_seed(1)
    # Products of several windows at once round otherwise.
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 1)
    model = build_model(short()).eval()
    text = torch.randint(0, 400, (150,))
    total = 0.0
    done = 1
    with torch.no_grad():
        for begin in (0, 32, 64, 86):
            logits = model(text[None, begin : begin + 64]).logits[0].tolist()
            for place in range(done - begin, 64):
                row = logits[place - 1]
                total += math.log(math.fsum(map(math.exp, row))) - row[text[begin + place]]
            done = begin + 64
        nats = evaluate.total_nats(model, text, 64, 32)
    assert nats == pytest.approx(total, rel=1e-12)
    assert evaluate._perplexity(nats, 70) == pytest.approx(math.exp(total / 70), rel=1e-9)


def test_a_perplexity_that_no_float_holds_is_none():
    assert evaluate._perplexity(800.0, 1) is None
    assert evaluate._perplexity(1.0, 0) is None
    assert evaluate._perplexity(690.0, 1) == pytest.approx(math.exp(690))


@pytest.mark.parametrize("positions", [4, 16, 24, 25, 80])
def test_a_model_of_few_positions_goes_on_with_what_it_has_room_for(positions, tokenizer):
    """A prompt of more tokens than positions is cut, and what is written fits behind it."""
    model = build_model(short(model=f"gpt2:L2H64V400P{positions}", max_length=4)).eval()
    with torch.no_grad():
        (said,) = evaluate.continuations(model, tokenizer, [("the river runs " * 30, "to the sea")])
    assert said["text"] == "to the sea"
    assert isinstance(said["continuation"], str)


class Writer:
    """A model of so many positions that writes two tokens, and how it was asked to."""

    device = "cpu"

    def __init__(self, positions):
        self.config = model_config(f"gpt2:L2H64V400P{positions}", "lm")
        self.asked = []

    def generate(self, ids, max_new_tokens, **_):
        self.asked.append((ids[0].tolist(), max_new_tokens))
        return torch.cat([ids, torch.tensor([[5, 0]])], dim=1)


@pytest.mark.parametrize(("positions", "written", "read"), [(80, 24, 7), (10, 5, 5)])
def test_a_model_writes_after_the_end_token_and_the_prompt(positions, written, read, tokenizer):
    """What it has written is kept without the prompt and without the end token."""
    model = Writer(positions)
    (said,) = evaluate.continuations(model, tokenizer, [("abcdef", "g")])
    prompt = [tokenizer.eos_token_id, *tokenizer("abcdef")["input_ids"]]
    assert len(prompt) == 7, "a token for each letter"
    assert model.asked == [(prompt[:read], written)]
    assert said == {"prompt": "abcdef", "continuation": tokenizer.decode([5]), "text": "g"}


def test_prompts_are_the_beginnings_of_the_first_five_lines_of_24_words():
    lines = [" ".join(f"{line}-{word}" for word in range(23 + line % 2)) for line in range(20)]
    found = evaluate.prompts(f" {line}\n" for line in lines)
    assert [prompt.split()[0] for prompt, _ in found] == ["1-0", "3-0", "5-0", "7-0", "9-0"]
    prompt, text = found[0]
    assert prompt.split() == lines[1].split()[:12]
    assert text.split() == lines[1].split()[12:24]


def test_a_texts_quality_is_of_a_model_without_dropout(folder, tmp_path, monkeypatch):
    spec = short(data=folder)
    data = load_text(spec)
    text = data.validation_samples
    model = build_model(spec).train()
    asked = []

    def total_nats(model, token_ids, length, shared):
        asked.append((model.training, len(token_ids), length, shared))
        return 100.0

    monkeypatch.setattr(evaluate, "total_nats", total_nats)
    monkeypatch.setattr(evaluate, "continuations", lambda *_: ["written"])
    found = evaluate.evaluate_text(model, data, spec, torch.device("cpu"), tmp_path)
    assert asked == [(False, len(text.tokens), spec.preset.max_length, spec.preset.stride)]
    assert found == {
        "word_perplexity": pytest.approx(math.exp(100 / text.words)),
        "token_perplexity": pytest.approx(math.exp(100 / (len(text.tokens) - 1))),
        "bits_per_byte": pytest.approx(100 / math.log(2) / text.bytes),
        "nats": 100.0,
        "n": len(text.tokens) - 1,
        "words": text.words,
        "bytes": text.bytes,
    }
    written = (tmp_path / "answers" / "continuations.json").read_text()
    assert json.loads(written) == ["written"]


STRIDES = [
    ("A1", "sizing", {128: 42, 129: 43, 255: 85, 256: 128, 512: 128}),
    ("L1", "lm-sizing", {96: 32, 128: 64, 16_384: 64}),
]


@pytest.mark.parametrize(("row", "preset", "strides"), STRIDES)
def test_neighbours_of_a_short_length_share_a_third_of_it(row, preset, strides):
    """Where the preset's own stride would be more than half; other lengths keep it."""
    for length, stride in strides.items():
        assert lengthened(row, preset, length).preset.stride == stride


# Words without end.


LETTERS = "".join(random.Random(0).choices("abcdefghijklmnop", k=200_000))


@pytest.mark.parametrize(
    "line",
    [LETTERS, " " * 80_000, f"short  {LETTERS[:2500]} words\n", "no long word\n"],
    ids=["letters", "blanks", "a long word", "short words"],
)
def test_a_line_is_cut_into_pieces_without_long_words(line):
    pieces = tokens._pieces(line)
    words = [word for piece in pieces for word in re.findall(r"\s+|\S+", piece)]
    assert "".join(pieces) == line
    assert max(map(len, words)) <= tokens.LONGEST


def test_a_line_of_short_words_is_one_piece():
    assert tokens._pieces("no long word\n") == ["no long word\n"]


def test_a_word_without_end_is_learnt_from_within_seconds(tmp_path):
    """400,000 letters without a blank took 34 s, in which no signal was heard."""
    (tmp_path / "train.txt").write_text(LETTERS + "\n" + " " * 80_000)
    begin = time.process_time()
    learn_tokenizer(open_text(tmp_path / "train.txt", "train"), 512)
    assert time.process_time() - begin < 4
