"""The predicted memory against peaks that were measured; the largest micro-batch under a cap."""

import dataclasses
import functools
import math
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from transformers import BertConfig

from qa_lib.data.load import load_data
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.lab.report.evidence import load_runs
from qa_lib.lab.search import max_batch, memory, memory_estimate
from qa_lib.lab.search.memory_estimate import (
    MemoryNeeds,
    estimate,
    predicted_peaks,
    tokens_of_micro_batch,
    why_unpredicted,
)
from qa_lib.lab.search.squad_lengths import SquadLengths
from qa_lib.lab.search.step_memory import LIBRARIES_MIB, StepMemory
from qa_lib.measure.hardware import restrict_sdpa
from qa_lib.measure.meter import MIB
from qa_lib.model.build import build_model
from qa_lib.records import record
from qa_lib.spec.machine import CONTEXT_GIB, Machine, gpu_of
from tests.conftest import slow
from tests.material import committed, leave, refused
from tests.pairs import unchecked
from tests.tiny import planned, resized

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


def test_variants_of_which_none_is_predicted_have_no_table(typed):
    printed = typed("memory A1-int8 --preset smoke")
    assert printed.startswith("A1-int8: what training on rounded weights")
    assert printed.count("\n") == 1


def test_a_phase_names_each_variant_that_has_its_peak_there_once(capsys):
    table = pd.DataFrame({
        "variant": ["A1", "A1", "A3"],
        "optimizer": [1.0, 2.0, 3000.0],
        "phase": ["optimizer", "optimizer", "end of backward"],
    })  # fmt: skip
    memory._print_table(table)
    heading, *rows, first, second, _ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["variant", "optim."]
    assert [row.split() for row in rows] == [["A1", "1"], ["A1", "2"], ["A3", "3,000"]]
    assert (first, second) == ("peak in optimizer: A1", "peak in end of backward: A3")


@pytest.mark.parametrize(
    ("variant", "who"),
    [
        ("E-searched", "the searched rival"),
        ("A1-int8", "training on rounded weights"),
    ],
)
def test_no_memory_is_predicted_of_a_searched_rival_and_of_rounded_weights(variant, who):
    why = f"what {who} keeps for its backward pass is not predicted"
    assert why_unpredicted(planned(variant, model="tiny", machine=gpu_of(HOPPER))) == why


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


def test_ones_own_data_are_packed_by_their_own_lengths(bert_base, typed):
    words = f"memory E-dropout --preset bench --model {bert_base} --micro-batch 8"
    of_squad = typed(words)
    of_own = typed(f"{words} --data synthetic:100")  # shorter samples
    peaks = [
        float(text.splitlines()[1].split()[-1].replace(",", "")) for text in (of_own, of_squad)
    ]
    assert peaks[0] < peaks[1]


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


def test_cut_samples_have_all_tokens_once_and_those_that_windows_share_again():
    whole = SquadLengths(384, 128).lengths
    cut = SquadLengths(100, 30).lengths
    further_windows = len(cut) - len(whole)
    # Each further window has the question's 15 tokens and 30 of the one before it once more.
    assert cut.sum() == whole.sum() + (15 + 30) * further_windows


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


def first_trial(capability, sm):
    """The smallest trial of A3 under a cap of 8 GiB, on a GPU of compute capability `sm` / 10."""
    machine = Machine(hardware="gpu", gpus=1, sm=sm, compiler=True)
    return max_batch.first_trial("A3", "synthetic:80", "tiny", 8.0, capability, machine)


@pytest.mark.parametrize(("capability", "sm", "taken"), [(75, 90, 75), (90, 75, 75), (80, 80, 80)])
def test_a_trial_takes_the_older_kernels_and_says_so_where_attention_has_others(
    capability, sm, taken
):
    trial = first_trial(capability, sm)
    assert (trial.sm, trial.preset.name) == (taken, f"max-batch-8gib-sm{taken}")
    assert trial.preset.limit_gib == 8.0
    assert trial.settings.micro_batch == max_batch.STEP
    said = "attention kernels: those of compute capability 7.5"
    assert (said in trial.adjusted) == (capability == TURING)


def test_a_trial_at_another_size_is_asked_for_that_size():
    trial = max_batch._at_size(first_trial(75, 75), 24)
    assert (trial.asked.micro_batch, trial.settings.micro_batch) == (24, 24)


def searched_with(status):
    """What a search says of trials that all end so, and the launcher that it had."""
    trial = first_trial(TURING, HOPPER)
    if status == "skipped":
        trial = dataclasses.replace(trial, skip="needs what is not there")
    entry = record.new_record(trial, {}) | {"status": status}
    launcher = Mock()
    launcher.run_all.return_value = [entry]
    return max_batch.search(trial, launcher), launcher.run_all


def test_a_variant_of_which_nothing_fits_is_said_so():
    said, run_all = searched_with("oom")
    assert said == "does not fit into 8 GiB"
    assert run_all.call_count > 1


def test_a_trial_that_fails_ends_the_search():
    refused("A3-.*: error", searched_with, "error")


def test_a_variant_that_is_skipped_leaves_a_record_and_nothing_is_tried():
    said, run_all = searched_with("skipped")
    assert said == "skipped, needs what is not there"
    run_all.assert_called_once()


def test_a_search_needs_a_gpu(monkeypatch, typed, tmp_path):
    monkeypatch.setattr(max_batch, "probe", lambda: (Machine(), {}))
    words = "max-batch A1 --limit-gib 9 --data synthetic:80 --model tiny --runs"
    assert "needs a GPU, and there is none here" in typed(words, tmp_path, code=2)


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


# A GPT-2 of 2 layers, 64 wide, of 512 words and 128 positions, in numbers of elements.
EMBEDDINGS = (512 + 128) * 64
MATRICES = 2 * (3 * 64 + 64 + 2 * 256) * 64
BIASES_AND_NORMS = 2 * (3 * 64 + 64 + 256 + 64 + 4 * 64) + 2 * 64
ALL = EMBEDDINGS + MATRICES + BIASES_AND_NORMS
TOKENS = 256
UNIT = TOKENS * 64


@functools.cache
def small_spec():
    return planned(
        "L1",
        "lm-sizing",
        data="synthetic:1",
        model="gpt2:L2H64V512P128",
        max_length=128,
        machine=gpu_of(HOPPER),
    )


def step_of(**settings):
    """The memory of a step of 256 tokens of that model, whether the settings go together or not."""
    return StepMemory(dataclasses.replace(small_spec(), settings=unchecked(**settings)), TOKENS)


FP32 = {"precision": "fp32"}
AUTOCAST = {"precision": "bf16"}
PURE = {"precision": "pure-bf16"}
COMPILED = {"precision": "bf16", "compile": "inductor"}


@pytest.mark.parametrize(
    ("settings", "weights", "gradients", "casts"),
    [
        (FP32, 4 * ALL, 4 * ALL, 0),
        # A copy of the layers in half precision, and one of the head, which is the words'.
        (AUTOCAST, 4 * ALL, 4 * ALL, 2 * (MATRICES + BIASES_AND_NORMS - 128 + 512 * 64)),
        (PURE, 2 * ALL, 2 * ALL, 0),
    ],
)
def test_weights_gradients_and_copies_have_the_bytes_of_their_precision(
    settings, weights, gradients, casts
):
    step = step_of(**settings)
    assert (step.weights(), step.gradients(), step.casts()) == (weights, gradients, casts)


def test_layers_that_are_recomputed_have_their_copies_one_at_a_time():
    whole = step_of(**AUTOCAST).casts()
    one_at_a_time = step_of(**AUTOCAST, activation_checkpointing=True).casts()
    assert whole - one_at_a_time == 2 * (MATRICES + BIASES_AND_NORMS - 128) // 2


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        (FP32 | {"optimizer": "adamw"}, 8 * ALL),
        (PURE | {"optimizer": "adamw"}, 4 * ALL),
        (PURE | {"optimizer": "adamw-master"}, 10 * ALL),
        (PURE | {"optimizer": "adamw-master-bf16"}, 6 * ALL),
        (PURE | {"optimizer": "adamw-master-8bit"}, 4 * ALL),
        (PURE | {"optimizer": "adamw-rounded-bf16"}, 4 * ALL),
        (PURE | {"optimizer": "adamw-rounded-8bit"}, 2 * ALL),
        (FP32 | {"optimizer": "adamw-8bit"}, 2 * MATRICES + 8 * (EMBEDDINGS + BIASES_AND_NORMS)),
    ],
)
def test_an_optimizers_state_has_the_bytes_of_its_moments_and_masters(settings, state):
    assert step_of(**settings).optimizer() == state


def test_weights_in_4_bits_have_a_scale_for_64_of_them_and_one_matrix_is_whole_at_a_time():
    step = step_of(**AUTOCAST)
    plain = (step.weights(), step.temporaries(), step.casts())
    layers = step.model.transformer.h
    step.nf4_parameters = {weight for weight in layers.parameters() if weight.ndim == 2}
    assert plain[0] - step.weights() == (4 - 0.5 - 4 / 64) * MATRICES
    assert step.temporaries() - plain[1] == 2 * 256 * 64
    assert plain[2] - step.casts() == 2 * MATRICES


def test_it_is_the_frozen_matrices_of_the_layers_that_have_4_bits():
    step = step_of(**AUTOCAST, base_quantization="nf4", trainable="freeze-last-4")
    assert sum(weight.numel() for weight in step.nf4_parameters) == MATRICES / 2


@pytest.mark.parametrize(
    ("settings", "scores"),
    [(AUTOCAST, TOKENS * 128), (AUTOCAST | {"attention": "sdpa"}, 0)],
)
def test_scores_are_written_by_eager_attention_alone(settings, scores):
    assert step_of(**settings).score_elements() == scores


@pytest.mark.parametrize(
    ("settings", "logits_and_inputs"),
    [
        (FP32, 12 * TOKENS * 512 + 8 * UNIT),
        (COMPILED, 2 * TOKENS * 512 + 6 * UNIT),
        (COMPILED | {"engine": "trainer"}, 3 * 2 * TOKENS * 512 + 6 * UNIT),
        (COMPILED | {"loss": "chunked"}, 2 * TOKENS * 512 + 8 * 512 * 64 + 8 * UNIT),
        (COMPILED | {"loss": "chunked-fp8"}, 3 * TOKENS * 512 + 8 * 512 * 64 + 8 * UNIT),
    ],
)
def test_the_loss_has_the_bytes_of_its_logits_and_their_gradients(settings, logits_and_inputs):
    assert step_of(**settings).loss() == logits_and_inputs


@pytest.mark.parametrize(
    ("settings", "bytes_per_unit"),
    [
        # Two inputs of norms, two masks, eight outputs of GEMMs, GELU in fp32, six inputs.
        (FP32, 2 * 4 + 2 + 8 * 4 + 48 + 6 * 4),
        (AUTOCAST | {"compile": "cudagraphs"}, 2 * 4 + 2 + 8 * 2 + 48 + 6 * 2),
        (COMPILED, 2 * 4 + 2 + 8 * 2 + 6 * 2),
        (COMPILED | {"activation_checkpointing": "elementwise"}, 2 * 4 + 2 + 8 * 2),
        (COMPILED | {"feed_forward": "fp8"}, 2 * 4 + 2 + 8 * 2 + 2 * 2),
    ],
)
def test_a_layer_keeps_the_bytes_of_what_its_backward_pass_reads(settings, bytes_per_unit):
    assert step_of(**settings).layer_bytes() == bytes_per_unit


def test_a_frozen_layer_that_gradients_pass_keeps_no_inputs_of_its_linear_layers():
    assert step_of(**FP32).layer_bytes(trained=False) == 2 * 4 + 2 + 8 * 4 + 48
    step = step_of(**FP32, trainable="freeze-last-4")
    by_layer = [step.layer_bytes(trained) * step.unit for trained in (True, False)]
    scores = (4 + 4 + 1) * TOKENS * 128
    kept, largest = step.activations()
    assert largest == by_layer[0] + scores
    assert kept == sum(by_layer) + 2 * scores + step.unit


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        # Query, key and value each have a copy in half precision, unless a compiler makes it.
        (AUTOCAST, (3 + 1 + 4) * 2),
        (COMPILED, (1 + 1 + 4) * 2),
        (FP32, (1 + 1 + 4) * 4),
    ],
)
def test_the_linear_layers_of_a_bert_keep_their_inputs(settings, inputs):
    spec = dataclasses.replace(planned(), settings=unchecked(**settings))
    assert StepMemory(spec, TOKENS)._linear_inputs() == inputs


def test_activations_are_those_of_all_layers_or_of_one_that_is_recomputed():
    kept, of_a_layer = step_of(**AUTOCAST).activations()
    scores = (4 + 2 + 1) * TOKENS * 128
    assert of_a_layer == (2 * 4 + 2 + 8 * 2 + 48 + 6 * 2) * UNIT + scores
    assert kept == 2 * of_a_layer + UNIT
    recomputed = step_of(**AUTOCAST, activation_checkpointing=True).activations()
    assert recomputed == (2 * 4 * UNIT + of_a_layer + UNIT, of_a_layer)


def test_a_recomputed_layer_keeps_something_of_its_adapters_all_the_same():
    step = step_of(**AUTOCAST, activation_checkpointing=True)
    settings = unchecked(**AUTOCAST, activation_checkpointing=True, trainable="lora-all")
    step.spec = dataclasses.replace(step.spec, settings=settings)
    kept, of_a_layer = step.activations()
    assert kept == 2 * (4 + 5.5) * UNIT + of_a_layer + UNIT


@pytest.mark.parametrize(("trainable", "more"), [("all", 4 * 512 * 64), ("freeze-bottom-10", 0)])
def test_a_head_that_trains_gets_a_gradient_from_both_ends(trainable, more):
    step = step_of(**AUTOCAST, trainable=trainable)
    lasting = step.weights() + step.optimizer() + LIBRARIES_MIB * MIB
    assert step.phases()["end of backward"] == lasting + step.gradients() + more


@pytest.mark.parametrize(
    ("settings", "denominators"),
    [({}, 4 * ALL), ({"engine": "plain"}, 0), ({"optimizer": "adamw-fused"}, 0)],
)
def test_pytorchs_default_adamw_has_all_of_its_denominators_at_once(settings, denominators):
    step = step_of(**AUTOCAST | settings)
    lasting = step.weights() + step.optimizer() + LIBRARIES_MIB * MIB
    assert step.phases()["optimizer"] == lasting + step.gradients() + denominators


def test_gradients_of_earlier_micro_batches_are_there_in_the_next_ones_passes():
    step = step_of(**COMPILED)
    alone = step.phases()
    assert step.spec.accumulation == 1
    twice = 2 * step.spec.settings.micro_batch
    preset = dataclasses.replace(step.spec.preset, effective_batch=twice, batch_tokens=None)
    step.spec = dataclasses.replace(step.spec, preset=preset)
    assert step.spec.accumulation == 2
    more = {phase: bytes_ - alone[phase] for phase, bytes_ in step.phases().items()}
    gradients = step.gradients()
    assert more == {
        "forward and backward": gradients,
        "end of backward": gradients,
        "optimizer": 0,
    }


def test_the_parts_of_an_estimate_add_up_to_its_peak():
    found = estimate(planned("A1", "bench", model="tiny", machine=gpu_of(HOPPER)))
    assert found["phase"] == "forward and backward"
    names = ("params", "grads", "optimizer", "activations", "workspace")
    assert sum(found[f"{name}_mib"] for name in names) == pytest.approx(found["peak_mib"])
    assert found["grads_mib"] == found["params_mib"]
    assert found["reserved_mib"] == pytest.approx(1.05 * found["peak_mib"])


def test_needs_of_a_card_are_in_gib_with_the_context_of_a_process():
    spec = planned("A1", "bench", model="tiny", machine=gpu_of(HOPPER))
    reserved = estimate(spec)["reserved_mib"] / 1024
    assert MemoryNeeds().gib(spec) == pytest.approx(reserved + CONTEXT_GIB)
    unknown = planned("A1-int8", "bench", model="tiny", machine=gpu_of(HOPPER))
    assert MemoryNeeds().gib(unknown) == 0.0


def test_needs_are_read_once_for_each_data_set(monkeypatch):
    read = []

    def load(spec):
        read.append(spec.data_source)
        return load_data(spec)

    monkeypatch.setattr(memory_estimate, "load_data", load)
    needs = MemoryNeeds()
    for data in ("synthetic:40", "synthetic:60", "synthetic:40"):
        needs.gib(planned("E-packed", "bench", data=data, model="tiny", machine=gpu_of(HOPPER)))
    assert read == ["synthetic:40", "synthetic:60"]


@pytest.mark.parametrize(("factor", "is_same"), [(1.0, True), (1.015, True), (1.03, False)])
def test_a_record_is_of_the_same_state_within_two_hundredths(factor, is_same):
    estimated = {"params_mib": 100.0, "optimizer_mib": 200.0}
    measured = {"memory": {"params_mib": 100 * factor, "optimizer_mib": 200 * factor}}
    assert memory_estimate._has_same_state(estimated, measured) == is_same
    measured["memory"]["optimizer_mib"] = None
    assert memory_estimate._has_same_state(estimated, measured)


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
    peaks = predicted_peaks(tries)
    assert peaks[tries["status"] != "skipped"].notna().all()
    assert largest_fault(peaks, tries) < 0.1


def test_runs_of_another_model_are_not_predicted(tries):
    done = tries[tries["status"] == "ok"]
    assert predicted_peaks(done, model="tiny").isna().all()


def runs_of(folder, *specs):
    """Runs of these specs on a GPU, as the report reads them; their sizes are not recorded."""
    for spec in specs:
        leave(folder, spec, env={"gpu": "NVIDIA H100", "sm": HOPPER})
    return load_runs(folder)


def test_packed_rows_of_generated_data_are_predicted_by_their_own_lengths(tmp_path):
    spec = planned("A4-nb", "bench", {"padding": "packed"}, model="tiny", machine=gpu_of(HOPPER))
    spec = dataclasses.replace(spec, asked=spec.settings)
    assert tokens_of_micro_batch(spec) != tokens_of_micro_batch(spec, SquadLengths(384, 128))
    (peak,) = predicted_peaks(runs_of(tmp_path, spec))
    assert peak == estimate(spec)["peak_mib"]


def test_a_run_whose_model_is_not_known_is_not_predicted(tmp_path):
    spec = planned("A1", "bench", model="tiny", machine=gpu_of(HOPPER))
    unnamed = dataclasses.replace(resized(spec, model=""), model=spec.model | {"name": "mine"})
    (peak,) = predicted_peaks(runs_of(tmp_path, unnamed))
    assert math.isnan(peak)


@pytest.mark.parametrize(("variant", "world", "stages"), [("P1", 2, 1), ("P-gpipe", 2, 2)])
def test_a_run_of_several_processes_is_predicted_as_one_of_them(variant, world, stages, tmp_path):
    machine = dataclasses.replace(gpu_of(HOPPER), gpus=world)
    spec = planned(variant, "parallel", model="tiny", machine=machine, world=world)
    entry = record.new_record(spec, {"gpu": "NVIDIA H100", "sm": HOPPER})
    of_record = memory_estimate._spec_of_record(entry, "")
    assert (of_record.world, of_record.stages) == (world, stages)


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
    peaks = predicted_peaks(runs)
    is_plain = runs["spec.settings.engine"].isin(["plain", "searched"])
    is_rounded = runs["spec.variant"].isin(["A1-int8", "A1-int4"])
    missing = runs["spec.variant"][peaks.isna() & ~is_plain & ~is_rounded]
    assert sorted(missing) == older
    assert largest_fault(peaks, runs) < 0.1
    out_of_memory = runs["status"] == "oom"
    on_the_card = runs["env.gpu_mem_mib"].astype(float)
    assert (peaks[out_of_memory] > on_the_card[out_of_memory]).all()
