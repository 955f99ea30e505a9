"""The predicted memory against peaks that were measured; the largest micro-batch under a cap."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from transformers import BertConfig

from qa_lib.data.tokenize import build_tokenizer
from qa_lib.lab.search import max_batch, memory_estimate
from qa_lib.lab.search.memory_estimate import (
    estimate,
    gpu_of,
    predicted,
    tokens_of_micro_batch,
)
from qa_lib.lab.search.squad_lengths import SquadLengths
from qa_lib.lab.search.step_memory import StepMemory
from qa_lib.measure.hardware import restrict_sdpa
from qa_lib.model.build import build_model
from qa_lib.records import record
from qa_lib.spec.machine import Machine
from tests.conftest import slow
from tests.material import committed, refused
from tests.tiny import planned

TURING = 75  # compute capability x 10
HOPPER = 90


@pytest.fixture(scope="module")
def bert_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert-base", numbered=False)
    BertConfig().save_pretrained(folder)
    build_tokenizer("tiny").save_pretrained(folder)
    return str(folder)


def spec_of(variant, bert_base, micro_batch, batch=None):
    return planned(
        variant,
        "bench",
        data="synthetic:100",
        model=bert_base,
        micro_batch=micro_batch,
        batch=batch,
        machine=gpu_of(HOPPER),
    )


# The verb `memory`.


@pytest.fixture
def printed(bert_base, typed):
    """What the verb prints for a T4."""
    variants = "A1 E-dropout A1-int8"
    sources = f"--data synthetic:100 --model {bert_base}"
    return typed(f"memory {variants} --preset bench {sources} --compute-capability 7.5")


def test_the_verb_prints_a_row_for_a_variant_and_the_phase_of_its_peak(printed):
    assert "A1 " in printed
    assert "peak in forward and backward: A1" in printed


def test_the_verb_says_what_a_gpu_cannot_run(printed):
    assert "8.0 or newer" in printed


def test_the_verb_says_what_is_not_predicted(printed):
    assert "A1-int8: what training on rounded weights keeps" in printed


def test_a_run_on_a_cpu_is_refused(bert_base):
    spec = planned("A1", "bench", model=bert_base, machine=Machine())
    refused("planned for a CPU", estimate, spec)


def test_the_verb_reads_no_data_that_were_not_asked_for(bert_base, monkeypatch, typed):
    monkeypatch.setattr(memory_estimate, "load_data", None)
    printed = typed("memory E-graph --preset bench --micro-batch 32 --model", bert_base)
    assert printed.splitlines()[1].split()[:3] == ["E-graph", "384", "32"]


def test_the_verb_takes_several_sizes_of_a_language_model(typed):
    sizes = "--micro-batch 1 4 --max-length 1024 16384"
    printed = typed(f"memory L1,L-dropout --preset lm-sizing {sizes}")
    rows = [line.split()[:3] for line in printed.splitlines()[1:-2]]
    assert rows[:2] == [["L1", "1024", "1"], ["L-dropout", "1024", "1"]]
    assert len(rows) == 8


# The lengths of SQuAD v2's samples.


@pytest.mark.parametrize(
    ("micro_batch", "tokens"), [(8, 1472), (32, 5632), (64, 11200), (128, 22400)]
)
def test_without_data_rows_are_packed_by_the_lengths_of_squad(micro_batch, tokens, bert_base):
    """The tokens are those that the data themselves decided."""
    spec = spec_of("E-dropout", bert_base, micro_batch, batch=max(micro_batch, 32))
    without_data = dataclasses.replace(spec, data_source="nowhere")
    assert abs(tokens_of_micro_batch(without_data, SquadLengths(384, 128)) - tokens) <= 64


def test_whole_samples_are_as_many_as_squad_has():
    samples = SquadLengths(384, 128)
    assert len(samples) == 131_754
    assert samples.lengths.max() == 384


def test_longer_windows_change_no_length():
    assert (SquadLengths(512, 128).lengths == SquadLengths(384, 128).lengths).all()


@pytest.mark.parametrize(("max_length", "stride"), [(128, 42), (23, 7)])
def test_lengths_of_shorter_windows_are_cut_from_those_that_are_known(max_length, stride):
    cut = SquadLengths(max_length, stride)
    assert cut.lengths.max() == max_length
    assert cut.lengths.min() > 0
    assert len(cut) > 2 * len(SquadLengths(384, 128))


def test_windows_without_room_for_new_tokens_are_refused():
    message = "22 tokens are too few for a question and the 7"
    refused(message, SquadLengths, max_length=22, stride=7)


# The search for the largest micro-batch.


@pytest.mark.parametrize("limit", [0, 7, 8, 20, 100, 333, 1000, 4096, 9000])
def test_the_search_finds_the_largest_that_fits_in_few_tries(limit):
    fits = Mock(side_effect=lambda size: size <= limit)
    found = max_batch.largest(fits)
    best = min(limit // max_batch.STEP * max_batch.STEP, 4096)
    assert found <= best
    assert best - found <= max(max_batch.STEP, max_batch.CLOSE * found)
    tries = [size for (size,), _ in fits.call_args_list]
    assert len(tries) == len(set(tries))
    assert len(tries) <= 10
    assert found in [0, *tries]


@pytest.fixture
def searched(monkeypatch, tmp_path, typed):
    """What `max-batch` prints on a GPU that holds 200 samples; the specs that it tried."""
    tried = []

    def run_all(self, specs):
        (spec,) = specs
        tried.append(spec)
        entry = record.new_record(spec, {})
        size = spec.settings.micro_batch
        if spec.skip:
            return [entry | {"status": "skipped"}]
        if size > 200:
            return [entry | {"status": "oom"}]
        # Close to the limit the allocator frees and asks again.
        entry["speed"]["samples_per_s"] = 10.0 * size if size < 170 else 900.0
        entry["memory"]["peak_reserved_mib"] = 70.0 * size
        return [entry | {"status": "ok"}]

    machine = Machine(hardware="h200", gpus=1, sm=HOPPER, compiler=True)
    monkeypatch.setattr(max_batch.Launcher, "run_all", run_all)
    monkeypatch.setattr(max_batch, "probe", lambda: (machine, {}))
    limits = "--limit-gib 14.9 --compute-capability 7.5"
    sources = f"--data synthetic:80 --model tiny --runs {tmp_path}"
    return typed(f"max-batch A3,E-bf16 {limits} {sources}"), tried


def test_every_trial_is_printed(searched):
    assert "A3 micro-batch 208: out of memory" in searched[0]


def test_a_variant_that_the_older_gpu_cannot_run_is_skipped(searched):
    assert "E-bf16: skipped, needs a GPU" in searched[0]


def test_close_to_the_limit_a_smaller_batch_is_tried_for_speed(searched):
    assert "A3: largest micro-batch 200, best 1600 " in searched[0]


def test_trials_are_in_a_group_of_their_limits(searched):
    for spec in searched[1]:
        assert spec.search == "max-batch"
        assert spec.sm == TURING
        assert spec.group == "h200-max-batch-14.9gib-sm75"


@pytest.mark.parametrize(
    ("sm", "enabled"), [(80, [True, True, True]), (TURING, [False, False, True])]
)
def test_an_older_gpu_is_left_the_attention_kernels_that_it_has(sm, enabled):
    switches = torch.backends.cuda
    try:
        restrict_sdpa(sm)
        assert [
            switches.flash_sdp_enabled(),
            switches.cudnn_sdp_enabled(),
            switches.mem_efficient_sdp_enabled(),
        ] == enabled
    finally:
        switches.enable_flash_sdp(True)
        switches.enable_cudnn_sdp(True)


# What is derived is held against autograd, and all of it against what a GPU measured.


def lm_spec(variant, length=1024, size=1, model="gpt2:L12H768P16384"):
    return planned(
        variant,
        "lm-sizing",
        data="synthetic:1",
        model=model,
        micro_batch=size,
        max_length=length,
        machine=gpu_of(HOPPER),
    )


def kept_by_autograd(layers, length):
    """Bytes that autograd keeps of a forward pass of two windows in fp32 with eager attention."""
    spec = lm_spec("L1", length, size=2, model=f"gpt2:L{layers}H128V512P128")
    model = build_model(spec).train()
    tokens = torch.zeros((2, length), dtype=torch.long)
    kept = []  # held, so that no other tensor takes the place of one
    with torch.autograd.graph.saved_tensors_hooks(kept.append, id):
        model(input_ids=tokens, labels=tokens)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {}  # address of a storage -> bytes
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("length", [64, 128])
def test_a_layer_keeps_what_autograd_keeps(length):
    """A CPU's dropout masks take 4 bytes an element instead of 1."""
    of_a_layer = kept_by_autograd(2, length) - kept_by_autograd(1, length)
    tokens = 2 * length
    hidden = 128
    heads = 2
    more_of_masks = 2 * 3
    expected = (StepMemory(lm_spec("L1"), 1).layer_bytes() + more_of_masks) * tokens * hidden
    expected += (4 + 4 + 1 + 3) * tokens * heads * length
    assert of_a_layer == pytest.approx(expected, rel=0.01)


def largest_fault(peaks, runs):
    """The largest share by which a predicted peak differs from the measured one."""
    measured = runs["memory.peak_alloc_mib"].astype(float)
    return ((peaks / measured).dropna() - 1).abs().max()


@pytest.fixture(scope="module")
def tries():
    """Every try of a search, at sizes far above those that the terms were measured at."""
    runs = committed()
    of_the_search = runs["group"] == "h200-max-batch-14.9gib-sm75"
    runs = runs[of_the_search & runs["spec.variant"].isin(["A2", "E-graph", "C2"])]
    assert len(runs) > 9
    return runs


def test_runs_are_predicted_from_their_records(tries):
    peaks = predicted(tries)
    assert peaks[tries["status"] != "skipped"].notna().all()
    assert largest_fault(peaks, tries) < 0.1


def test_runs_of_another_model_are_not_predicted(tries):
    done = tries[tries["status"] == "ok"]
    assert predicted(done, model="tiny").isna().all()


# Group -> variants that are not predicted, since their optimizer had another state then.
GROUPS = [
    ("h200-lm-sizing", []),
    ("h200-lm-bench", []),
    ("h100-80gb-hbm3-bench", []),
    slow("h200-bench", ["E-dropout", "E-dropout-freeze", "E-masters-lora-all"]),
    slow("h200-sizing", []),
    slow("h100-80gb-hbm3-lm-bench", []),
]


@pytest.mark.parametrize(("group", "older"), GROUPS)
def test_every_point_of_the_profiles_is_predicted_within_a_tenth(group, older):
    """That is the goal for both tasks.

    One term, the logits of a compiled language model, was set by such points. Rounded weights and
    the plain rivals are not predicted.
    """
    runs = committed()
    runs = runs[(runs["group"] == group) & runs["status"].isin(["ok", "oom"])]
    # Blocks in 8 bits kept more at first.
    is_fp8 = runs["spec.settings.feed_forward"] == "fp8"
    runs = runs[~is_fp8 | (runs["time.started"] > "2026-11-26T02")]
    assert len(runs) > 15
    peaks = predicted(runs)
    is_plain = runs["spec.settings.engine"] == "plain"
    is_rounded = runs["spec.variant"].isin(["A1-int8", "A1-int4"])
    missing = runs["spec.variant"][peaks.isna() & ~is_plain & ~is_rounded]
    assert sorted(missing) == older
    assert largest_fault(peaks, runs) < 0.1
    out_of_memory = runs["status"] == "oom"
    on_the_card = runs["env.gpu_mem_mib"].astype(float)
    assert (peaks[out_of_memory] > on_the_card[out_of_memory]).all()
