"""Language modelling, the second task: text to tokens to windows, family L on a CPU, perplexity held to plain sums."""

import gzip
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
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from qa_lib.__main__ import main
from qa_lib.data import text as tokens
from qa_lib.data.batches import Batches
from qa_lib.data.load import load_text
from qa_lib.data.text import learn_tokenizer, open_text, tokenize_text
from qa_lib.lab import sweep
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.search.plan import plan
from qa_lib.measure.meter import StepFlops
from qa_lib.model.build import build_model, model_config
from qa_lib.model.hf_checkpoint import SUMS
from qa_lib.records import record
from qa_lib.score import evaluate
from qa_lib.spec.presets import PRESETS, find_shape
from qa_lib.spec.spec import resolve
from qa_lib.spec.variants import VARIANTS, find_family
from qa_lib.train.compile import LossOf
from tests.material import SQUAD, edited, refused
from tests.tiny import CPU, H200, losses_of, planned, quiet, resized

WIKITEXT = SQUAD.parent / "wikitext"
TINY = "gpt2:L2H64V400P80"


def short(row="L1", data="synthetic:60", steps=3, model=TINY, **more):
    """A spec of few steps of two micro-batches of 4 windows, uncompiled."""
    spec = planned(
        row, "lm-smoke", {"compile": "none"}, data=str(data), model=model, micro_batch=4, **more
    )
    return resized(spec, steps=steps, batch_tokens=8 * spec.preset.max_length, measure_from=1)


def lengthened(variant, preset, length, **more):
    """A spec of a GPU for windows of another length."""
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
    text, whole = tokenize_text(source, tokenizer), "".join(source.rows())
    first, second = np.flatnonzero(text.tokens == tokenizer.eos_token_id)
    assert first == 0, "before each document"
    assert (
        "\f\n".join(tokenizer.decode(part[1:]) for part in np.split(text.tokens, [second])) == whole
    )
    assert (text.words, text.bytes) == (len(whole.split()) + whole.count("\n"), len(whole.encode()))


def test_arrays_are_made_once_by_content_and_memory_mapped(
    folder, tokenizer, tmp_path, monkeypatch
):
    first = tokenize_text(open_text(folder, "validation"), tokenizer)
    assert isinstance(first.tokens.base, np.memmap) and first.tokens.dtype == np.uint16
    same = open_text(shutil.copy(folder / "validation.txt", tmp_path / "other.txt"), "train")
    monkeypatch.setattr(same, "rows", lambda: pytest.fail("read again"))
    assert tokenize_text(same, tokenizer).tokens.tolist() == first.tokens.tolist()
    assert learn_tokenizer(open_text(folder, "train"), 400).get_vocab() == tokenizer.get_vocab()
    assert tokens._learn(open_text(folder, "train"), 400) == tokens._learn(
        open_text(folder, "train"), 400
    )


def test_a_large_vocabulary_takes_wider_numbers(folder, tokenizer):
    """65,536 tokens fit into 16 bits; one more does not."""
    source, backend = (
        open_text(folder, "validation"),
        Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
    )
    for tokens_in_all, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        backend.add_tokens(
            [f"<{number}>" for number in range(backend.get_vocab_size(), tokens_in_all)]
        )
        assert backend.get_vocab_size() == tokens_in_all
        assert tokens._tokenize(source, backend, tokens_in_all - 1).tokens.dtype == dtype
    assert tokens._tokenize(source, backend, 2**16).tokens[0] == 2**16


def test_the_hub_gives_the_same_lines_as_the_file(folder, monkeypatch):
    lines = (folder / "validation.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    table = Dataset.from_dict(
        {"text": [line.removesuffix("\n") if line == "\n" else line for line in lines]}
    )
    load = Mock(return_value=table)
    monkeypatch.setattr("datasets.load_dataset", load)
    source = open_text(PRESETS["lm-full"].data, "validation")
    assert (
        list(source.rows()) == list(open_text(folder, "validation").rows())
        and len(source.sha256) == 64
    )
    load.assert_called_once_with("Salesforce/wikitext", "wikitext-103-raw-v1", split="validation")


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="no ../shared/wikitext beside the repository")
def test_wikitext_has_as_many_words_as_its_authors_count():
    lines = list(open_text(WIKITEXT / "wiki.valid.tokens", "train").rows())
    assert sum(len(line.split()) + 1 for line in lines) == 217_646
    assert list(open_text(WIKITEXT, "validation").rows()) == lines


# Bad input: a clear error, or the right number.


def load(folder, tmp_path, **files):
    """load_text of a folder with the good files, some of them replaced."""
    others = shutil.ignore_patterns(*(f"{name}.*" for name in files))
    place = shutil.copytree(folder, tmp_path / "-".join(files), ignore=others)
    for name, content in files.items():
        (place / f"{name}.txt").write_bytes(content)
    return load_text(short(data=place))


def test_an_empty_text_is_refused_and_one_token_is_too_short_to_train_on_and_enough_to_score(
    folder, tmp_path
):
    for split in ("train", "validation"):
        refused(f"{split}.txt: an empty text", load, folder, tmp_path / "empty", **{split: b""})
    refused(
        r"train.txt: a text of 2 tokens, shorter than a window of 64",
        load,
        folder,
        tmp_path,
        train=b"a",
    )
    data = load(folder, tmp_path, train=(b"the sea " * 20 + b"\n") * 9, validation=b"a")
    assert (data.n_eval, data.validation_samples.words, data.validation_samples.bytes) == (1, 1, 1)
    tokens_ = torch.from_numpy(data.validation_samples.tokens.astype("int64"))
    assert 0 < evaluate.total_nats(build_model(short()).eval(), tokens_, 64, 32) < 20


def test_windows_line_ends_are_line_ends(folder, tmp_path, tokenizer):
    whole = (folder / "validation.txt").read_bytes()
    (tmp_path / "wiki.valid.tokens").write_bytes(whole.replace(b"\n", b"\r\n"))
    text, plain = (
        tokenize_text(open_text(path, "validation"), tokenizer) for path in (tmp_path, folder)
    )
    assert text.tokens.tolist() == plain.tokens.tolist() and (text.words, text.bytes) == (
        plain.words,
        plain.bytes,
    )


def test_broken_text_is_named_by_its_line(folder, tmp_path):
    said = r"validation.txt: line 2 is not UTF-8: .* at byte 3 of it"
    refused(said, load, folder, tmp_path, validation=b"the\nsea\xff\n")
    path = tmp_path / "cut.txt.gz"
    path.write_bytes((folder / "train.txt.gz").read_bytes()[:-20])
    refused(r"cut.txt.gz: cannot be read after line", list, open_text(path, "train").rows())


def test_what_is_no_text_is_refused(folder, tmp_path):
    refused("none of train.txt, train.txt.gz", open_text, tmp_path, "train")
    refused("no such file", open_text, tmp_path / "gone.txt", "train")
    refused("one file has no text to validate on", open_text, folder / "train.txt.gz", "validation")
    refused("not one of .txt", open_text, __file__, "train")
    for name in (
        "text",
        "json:all",
    ):  # would be read by datasets' own builders, out of the working directory
        refused("a format's name, by which datasets reads", open_text(name, "train").digest)


def test_a_folder_whose_tokenizer_has_no_end_token_is_named(run, folder, tmp_path):
    """As a user meets it: a model's folder, and what its tokenizer_config.json says."""
    endless = shutil.copytree(run / "model", tmp_path / "endless", ignore=lambda *_: [SUMS])
    edited(endless / "tokenizer_config.json", eos_token=None)
    refused(
        r"endless: its tokenizer has no end token",
        load_text,
        short(data=folder, model=str(endless)),
    )


def test_a_context_above_the_models_positions_is_refused():
    refused(
        "has positions for 80 tokens and not for 128: give --model gpt2:L2H64V400P128",
        short,
        max_length=128,
    )
    refused(
        r"takes 80 tokens, and samples of preset lm-smoke have 128",
        build_model,
        resized(short(), max_length=128),
    )


# Sizes, variants and presets.


def test_a_shape_is_a_model_by_its_sizes():
    small, tiny = model_config("gpt2:L12H768"), model_config(TINY)
    assert (small.n_layer, small.n_embd, small.n_head, small.n_positions) == (12, 768, 12, 1024)
    assert small.vocab_size == 50_304 and (tiny.vocab_size, tiny.n_positions) == (448, 80)
    with torch.device("meta"):
        sizes = [AutoModelForCausalLM.from_config(model_config(name)).num_parameters()
                 for name in ("gpt2:L4H64V4096", "gpt2:L12H768", "gpt2:L24H1024")]  # fmt: skip
    assert [round(size / 1e6, 1) for size in sizes] == [0.5, 124.5, 354.9]
    for wrong in (
        "gpt2:",
        "gpt2:L2H65",
        "gpt2:L0H64",
        "gpt2:L2H64V256",
        "gpt2:L2H64P0",
        "gpt2:l2h64",
        "gpt2:L²H64",
    ):
        refused("a shape is written like gpt2:L12H768", find_shape, wrong)
    assert find_shape("gpt2") is None


def test_variants_and_presets_belong_to_a_task():
    for row, preset, said in (
        ("L1", "smoke", "lm, and preset 'smoke' of task qa"),
        ("A1", "lm-smoke", "qa"),
    ):
        refused(f"{row} is a variant of task {said}", plan, [row], preset, machine=CPU)
    for name, row in VARIANTS.items():
        assert (row.settings.padding, row.settings.qkv) == (
            "max_length",
            "separate",
        ) or row.task == "qa", name
        assert (
            not row.settings.cuda_graph or row.settings.padding == "packed" or row.task == "lm"
        ), name


def test_a_context_length_is_asked_for_and_keeps_the_tokens_of_a_step():
    specs = [short(model="gpt2:L2H64V400", max_length=length) for length in (None, 128, 256)]
    assert len({spec.hash for spec in specs}) == 3 and {spec.group for spec in specs} == {
        "cpu-lm-smoke"
    }
    found = [lengthened("L1", "lm-bench", length) for length in (256, 1024)]
    assert [spec.micro_batches * spec.settings.micro_batch for spec in found] == [128, 32]
    for length in (1, 2, 2048):
        refused(
            "tokens are too few or too many",
            plan,
            ["L1"],
            "lm-smoke",
            machine=CPU,
            max_length=length,
        )
    refused(
        r"1000 tokens do not make up the 32,768 .* take 512 or 1024 tokens",
        lengthened,
        "L1",
        "lm-bench",
        1000,
    )
    refused(
        r"3 tokens do not make up the 1,024 .* take 4 tokens",
        plan,
        ["L1"],
        "lm-smoke",
        machine=CPU,
        max_length=3,
    )
    assert lengthened("L1", "lm-bench", 1000, batch=32).preset.batch == 32


def test_a_sweep_takes_the_variants_of_its_presets_task_and_hands_on_the_length(
    monkeypatch, tmp_path
):
    asked = Mock(return_value=[])
    monkeypatch.setattr(sweep, "probe", lambda: (CPU, {}))
    monkeypatch.setattr(sweep, "plan", asked)
    for preset in ("smoke", "lm-smoke"):
        main(
            ["sweep", "--preset", preset, "--plan", "--runs", str(tmp_path), "--max-length", "128"]
        )
    questions, text = (each.args[0] for each in asked.call_args_list)
    assert (
        text == find_family("L")
        and not set(questions) & set(text)
        and len(questions + text) == len(VARIANTS)
    )
    assert asked.call_args.kwargs["max_length"] == [128]
    assert sweep.notebook_parameters(short(max_length=32), tmp_path)["max_length"] == 32
    assert "max_length" not in sweep.notebook_parameters(short(), tmp_path)


def test_batches_are_windows_and_a_function_of_seed_and_step(folder):
    spec = short(data=folder)
    samples = load_text(spec).samples
    refused(
        "too few for --batch",
        Batches,
        samples,
        resized(spec, steps=None, epochs=1, batch_tokens=2**30),
    )
    one, other = Batches(samples, spec), Batches(samples, spec)
    one.step(0)
    for mine, theirs in zip(one.step(7), other.step(7), strict=True):
        batch, windows = (
            one.arrays(mine),
            [samples.text.tokens[64 * number :][:64] for number in mine],
        )
        assert np.array_equal(mine, theirs)
        assert np.array_equal(batch["input_ids"], windows) and np.array_equal(
            batch["labels"], windows
        )


def test_the_arithmetic_of_a_step_is_that_of_its_products():
    model = build_model(short(max_length=64))
    ids = torch.zeros((4, 64), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    cost = StepFlops(model)
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if ".h." in name and p.ndim == 2
    )
    vectors = cost.parameters - matrices  # StepFlops counts a product with them forward and back
    masked = 12 * 2 * 64 * 4 * 64**2 / 2  # eager attention computes the masked half, too
    assert (
        cost.flops(4 * 64, 4 * 64**2) + masked - 4 * 4 * 64 * vectors == counter.get_total_flops()
    )


def test_fused_attention_is_told_causal_and_given_no_mask(monkeypatch):
    """Eager and compiled: with a mask PyTorch would not take FlashAttention. The sums are those of eager attention."""
    seen, real = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*inputs, attn_mask=None, is_causal=False, **more):
        seen.append((attn_mask, is_causal))
        return real(*inputs, attn_mask=attn_mask, is_causal=is_causal, **more)

    ids = torch.randint(0, 400, (2, 64))
    with torch.no_grad():
        expected = build_model(short("L-bf16")).eval()(ids).logits
        model = build_model(short("L-sdpa")).eval()
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        for forward in (model, torch.compile(model, backend="eager")):
            assert torch.allclose(forward(ids).logits, expected, atol=1e-5)
        how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        written, plain = (
            model.generate(ids[:1, :9], use_cache=cache, **how).tolist() for cache in (True, False)
        )
    assert seen[:4] == [(None, True)] * 4 and written == plain


# Runs.


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """The folder of L1 over the small text, for as long as it takes to learn it."""
    runs, spec = tmp_path_factory.mktemp("runs"), short(data=folder, steps=40)
    fit(spec, runs, say=quiet)
    return runs / spec.run_path


def test_a_run_learns_and_leaves_a_whole_record(run, folder):
    entry = record.read_record(run)
    quality = entry["quality"]
    assert (entry["status"], entry["group"], set(quality)) == (
        "ok",
        "cpu-lm-smoke",
        set(entry["task"]["scores"]),
    )
    whole, nats = (folder / "validation.txt").read_text(encoding="utf-8"), quality["nats"]
    assert quality["n"] == entry["spec"]["n_eval"] and quality["words"] == len(
        whole.split()
    ) + whole.count("\n")
    wanted = {
        f"{each}_perplexity": math.exp(nats / quality[n])
        for each, n in (("word", "words"), ("token", "n"))
    }
    wanted["bits_per_byte"] = nats / math.log(2) / quality["bytes"]
    assert {name: quality[name] for name in wanted} == pytest.approx(wanted)
    assert quality["token_perplexity"] < 30, (
        "of 400 tokens that an untrained model thinks equally likely"
    )
    assert entry["speed"]["tokens_per_s_padded"] == entry["speed"]["tokens_per_s"] > 0


def test_a_compiled_loss_has_no_gradient_of_logits():
    """What enters the backward pass from outside: of the loss alone, or of the logits that a model returns as well."""
    entering = []

    def look(graph, _):
        inputs = graph.graph.find_nodes(op="placeholder")
        entering.append(
            [tuple(node.meta["val"].shape) for node in inputs if node.name.startswith("tangents")]
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=look
    )
    model, ids = build_model(short()), torch.arange(128).view(2, 64)
    torch.compile(LossOf(model), backend=backend)(input_ids=ids, labels=ids).backward()
    torch.compile(model, backend=backend)(input_ids=ids, labels=ids).loss.backward()
    assert entering == [[()], [(), (2, 64, model.config.vocab_size)]]


def test_a_model_that_has_diverged_ends_its_run_as_an_error(folder, tmp_path, monkeypatch):
    spec = short(data=folder)
    monkeypatch.setattr(evaluate, "total_nats", lambda *_: math.nan)
    refused(r"text has nan nats \(the model has diverged\)", fit, spec, tmp_path, say=quiet)
    entry = record.read_record(tmp_path / spec.run_path)
    assert (entry["status"], entry["error"]["kind"], entry["quality"]["nats"]) == (
        "error",
        "DataError",
        None,
    )


def test_a_run_goes_on_from_a_checkpoint_and_its_tokenizer(run, folder, tmp_path):
    before = record.read_record(run)["quality"]
    after = fit(short(data=folder, model=str(run / "model"), steps=2), tmp_path, say=quiet)[
        "quality"
    ]
    assert after["n"] == before["n"] and after["nats"] < 1.5 * before["nats"]
    bare = shutil.copytree(run / "model", tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    refused(r"no model.safetensors, which lm-smoke needs", build_model, short(model=str(bare)))
    build_model(resized(short(model=str(bare)), quality=False))  # random weights will do for speed


def test_a_model_of_the_other_task_is_refused(run):
    refused(
        r"of type 'gpt2'; this lab knows bert, .* for task qa", planned, model=str(run / "model")
    )
    refused(r"of type 'bert'; this lab knows gpt2 for task lm", short, model="tiny")


@pytest.mark.parametrize(
    "row", "L0 L-sdpa L-adamw L-dropout L-recompute L-8bit L-lora L-qlora".split()
)
def test_a_variant_trains_what_it_says_and_saves_a_plain_model(row, tmp_path):
    spec = short(row)
    before = dict(build_model(spec).named_parameters())
    entry = fit(spec, tmp_path, say=quiet)
    assert entry["status"] == "ok" and entry["quality"]["nats"] > 0
    losses = losses_of(tmp_path / spec.run_path)
    assert len(losses) == 3 and losses[0] == pytest.approx(math.log(448), abs=0.3)
    assert ("lora_A" in " ".join(before)) == (
        entry["model"]["params_trainable"] < entry["model"]["params_total"]
    )
    path = tmp_path / spec.run_path / "model"
    plain, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    adapters = sum(parameter.numel() for name, parameter in before.items() if ".lora_" in name)
    assert entry["model"]["params_total"] == plain.num_parameters() + adapters, (
        "also of weights that it held in 4 bits"
    )
    text = tokenize_text(
        open_text(spec.data_source, "validation"), AutoTokenizer.from_pretrained(path)
    )
    nats = evaluate.total_nats(plain.eval(), torch.from_numpy(text.tokens.astype("int64")), 64, 32)
    assert nats == pytest.approx(entry["quality"]["nats"], rel=1e-6)


# Perplexity.


def test_each_token_is_scored_once_from_enough_context():
    for count, length, shared in (
        (2, 8, 4),
        (8, 8, 4),
        (9, 8, 4),
        (100, 8, 1),
        (101, 8, 7),
        (1000, 64, 32),
    ):
        seen = []
        for begin, scored in evaluate.windows(count, length, shared):
            assert scored - begin >= (shared if begin else 1)
            seen += range(scored, min(begin + length, count))
        assert seen == list(range(1, count))


def test_nats_of_a_model_in_fp32_are_summed_in_double_precision(monkeypatch):
    """And the perplexity per word that comes of them, too: to 1e-9 that of a plain loop over the same logits."""
    torch.manual_seed(1)
    monkeypatch.setattr(
        evaluate, "BATCH_TOKENS", 1
    )  # products of several windows at once round otherwise
    model, text = build_model(short()).eval(), torch.randint(0, 400, (150,))
    total, done = 0.0, 1
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
    assert evaluate._perplexity(800.0, 1) is None and evaluate._perplexity(1.0, 0) is None
    assert evaluate._perplexity(690.0, 1) == pytest.approx(math.exp(690))


@pytest.mark.parametrize("positions", [4, 16, 24, 25, 80])
def test_a_model_of_few_positions_goes_on_with_what_it_has_room_for(positions, tokenizer):
    """A prompt of more tokens than positions is cut, and what is written fits behind it."""
    model = build_model(short(model=f"gpt2:L2H64V400P{positions}", max_length=4)).eval()
    with torch.no_grad():
        (said,) = evaluate.continuations(model, tokenizer, [("the river runs " * 30, "to the sea")])
    assert said["text"] == "to the sea" and isinstance(said["continuation"], str)


# Report.


def test_neighbours_of_a_short_length_share_a_third_of_it():
    """Of lengths for which the preset's own would be more than half; the others keep it, and their runs their names."""
    questions, text = {128: 42, 129: 43, 255: 85, 256: 128, 512: 128}, {96: 32, 128: 64, 16_384: 64}
    for row, preset, strides in (("A1", "sizing", questions), ("L1", "lm-sizing", text)):
        assert {
            length: lengthened(row, preset, length).preset.stride for length in strides
        } == strides


def test_a_word_without_end_is_learnt_from_in_pieces(tmp_path):
    """400,000 letters without a blank took 34 s, in which no signal was heard."""
    chance = random.Random(0)
    letters = "".join(chance.choice("abcdefghijklmnop") for _ in range(200_000))
    for line in (letters, " " * 80_000, f"short  {letters[:2500]} words\n", "no long word\n"):
        pieces = tokens._pieces(line)
        parts = [part for piece in pieces for part in re.findall(r"\s+|\S+", piece)]
        assert "".join(pieces) == line and max(map(len, parts)) <= tokens.LONGEST
    assert tokens._pieces("no long word\n") == ["no long word\n"]
    (tmp_path / "train.txt").write_text(letters + "\n" + " " * 80_000)
    begin = time.process_time()
    learn_tokenizer(open_text(tmp_path / "train.txt", "train"), 512)
    assert time.process_time() - begin < 4
