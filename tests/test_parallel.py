"""Several processes make the steps of one: family P over gloo, held against one process.

In fp32 and without dropout nothing differs but the order of sums, so that the losses of a few steps
must agree closely; the tolerances below are relative and many times what was seen.
"""

import contextlib
import dataclasses
import gc
import json
import re
import types
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard

from qa_lib.data.synthetic import TINY_CONFIG
from qa_lib.model.build import build_model
from qa_lib.spec.settings import Settings
from qa_lib.train.parallel import overlap, zero1
from qa_lib.train.parallel.data_parallel import DDP, gather_model
from qa_lib.train.parallel.overlap import GradReadyHooks
from qa_lib.train.parallel.pipeline import bubble, measured_bubble
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.parallel.tensor import Tensor
from qa_lib.train.parallel.zero1 import ALIGN, FlatShard, Zero1
from tests import warm
from tests.conftest import slow
from tests.ranks import DEVICE, Case, trained
from tests.tiny import losses_of, planned, resized

# For variants that cut the model: four layers and heads, and four micro-batches a step.
CUT = {"layers": 4, "heads": 4, "micro_batches": 4}
UNCUT = Case("E-masters-eager", world=1, **CUT)
ACCUMULATED = {"preset": {"effective_batch": 32}}
# Within an epoch, at whose end the Trainer leaves out more samples with more processes.
BRIEF = {"preset": {"steps": 5}}
MASTERS = {"settings": {"precision": "bf16", "optimizer": "adamw-master"}}
BF16_MASTERS = {"settings": {"precision": "bf16", "optimizer": "adamw-master-bf16"}}
ROUNDED = {"settings": {"precision": "bf16", "optimizer": "adamw-rounded-bf16"}}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A case for two processes, and the case that one process trains to compare with it."""

    two: Case
    one: Case
    tolerance: float = 1e-4  # relative, of each step's loss
    quick: bool = False  # whether `make test` has it


def compared(variant: str, one: str, tolerance: float = 1e-4, quick: bool = False, **options):
    """Return the comparison of a variant with another variant, of one process unless it is P-..."""
    world = 2 if one.startswith("P") else 1
    return Comparison(
        two=Case(variant, **options),
        one=Case(one, world=world, **options),
        tolerance=tolerance,
        quick=quick,
    )


def compared_with_itself(variant: str, quick: bool = False, **options):
    """Return the comparison of a variant with itself, by one process that takes all samples."""
    case = Case(variant, **options)
    return Comparison(two=case, one=case, quick=quick)


def compared_with_uncut(variant: str, quick: bool = False, **options):
    """Return the comparison of a variant that cuts the model with a model that is not cut."""
    return Comparison(two=Case(variant, **CUT, **options), one=UNCUT, quick=quick)


COMPARISONS = {
    "ddp": compared("P1", "A1", quick=True),
    "fsdp": compared("P-fsdp", "A1", quick=True),
    "one-bucket": compared("P-one-bucket", "E-dropout", quick=True),
    "overlap": compared("P-overlap", "E-dropout", quick=True),
    "zero1": compared("P-zero1", "E-dropout", quick=True),
    "overlap-zero1": compared("P-overlap-zero1", "E-dropout"),
    "nccl": compared("P-nccl", "E-uncompiled"),
    "peers": compared("P-peers", "E-uncompiled", quick=True),
    "ddp-accumulated": compared_with_itself("P1", **ACCUMULATED),
    "fsdp-accumulated": compared_with_itself("P-fsdp", **ACCUMULATED),
    "one-bucket-accumulated": compared_with_itself("P-one-bucket", **ACCUMULATED),
    "overlap-accumulated": compared_with_itself("P-overlap", **ACCUMULATED),
    "zero1-accumulated": compared_with_itself("P-zero1", **ACCUMULATED),
    "overlap-zero1-accumulated": compared_with_itself("P-overlap-zero1", quick=True, **ACCUMULATED),
    "peers-accumulated": compared_with_itself("P-peers", **ACCUMULATED),
    "one-bucket-unequal": compared_with_itself("P-one-bucket", unequal=True),
    "overlap-unequal": compared_with_itself("P-overlap", unequal=True),
    "zero1-unequal": compared_with_itself("P-zero1", quick=True, unequal=True),
    "overlap-zero1-unequal": compared_with_itself("P-overlap-zero1", unequal=True),
    "peers-unequal": compared_with_itself("P-peers", unequal=True),
    "ddp-unequal": compared_with_itself("P-one-bucket", unequal=True, settings={"parallel": "ddp"}),
    "fsdp-unequal": compared_with_itself(
        "P-one-bucket", unequal=True, settings={"parallel": "fsdp2"}
    ),
    "ddp-bf16": compared("P1-bf16", "A1", tolerance=0.05),
    "overlap-zero1-masters": compared(
        "P-overlap-zero1", "P-one-bucket", tolerance=0.05, quick=True, **MASTERS
    ),
    "zero1-masters": compared("P-zero1", "P-one-bucket", tolerance=0.05, **MASTERS),
    "peers-masters": compared("P-peers", "P-nccl", tolerance=0.05, quick=True, **BF16_MASTERS),
    "zero1-rounded": compared("P-zero1", "P-one-bucket", tolerance=0.05, **ROUNDED),
    "peers-rounded": compared("P-peers", "P-nccl", tolerance=0.05, **ROUNDED),
    "ddp-of-pipelines": compared("P-ddp", "E-masters-eager"),
    "gpipe": compared_with_uncut("P-gpipe"),
    "1f1b": compared_with_uncut("P-1f1b", quick=True),
    "interleaved": compared_with_uncut("P-interleaved"),
    "interleaved-unequal": compared(
        "P-interleaved", "E-masters-eager", quick=True, unequal=True, **CUT
    ),
    "1f1b-masters": compared("P-1f1b", "E-masters-eager", tolerance=0.05, **CUT, **MASTERS),
    "tensor": compared_with_uncut("P-tensor", quick=True),
    "tensor-one-bucket": compared_with_uncut(
        "P-tensor", quick=True, settings={"parallel": "ddp-one-bucket"}
    ),
    "tensor-unequal": compared("P-tensor", "E-masters-eager", unequal=True, **CUT),
    "tensor-rounding": compared_with_uncut("P-tensor", rounding=1e-6),
    "trainer": compared("P0", "A0", quick=True, **BRIEF),
}
if find_spec("deepspeed"):
    COMPARISONS["deepspeed"] = compared("P0-deepspeed", "P0", quick=True, **BRIEF)


def in_tiers(names) -> list:
    """Return names of comparisons as parameters, slow ones marked."""
    return [name if COMPARISONS[name].quick else slow(name) for name in names]


def launch(cases: dict[str, Case], world: int, folder) -> None:
    """Train cases in so many processes, each in the folder of its name."""
    folder.mkdir(exist_ok=True)
    fields = {name: dataclasses.asdict(case) for name, case in cases.items()}
    (folder / "cases.json").write_text(json.dumps(fields))
    warm.together(folder, world, "tests.ranks", str(folder))


class Launched(dict):
    """The folders of trained cases by name.

    When the first case of a tier is asked for, `train(cases, folder)` trains all of that tier.
    """

    def __init__(self, cases: dict[str, Case], quick: set[str], train, folder):
        super().__init__()
        self.cases = cases
        self.quick = quick
        self.train = train
        self.folder = folder

    def __missing__(self, name):
        is_quick = name in self.quick
        tier = {
            other: case for other, case in self.cases.items() if (other in self.quick) == is_quick
        }
        folder = self.folder / ("quick" if is_quick else "slow")
        self.train(tier, folder)
        for other in tier:
            self[other] = folder / other
        return self[name]


@pytest.fixture(scope="module")
def by_one(tmp_path_factory, one_thread):
    """Trains a case in this process, once; returns its folder."""
    folders = {}

    def folder_of(case: Case):
        key = json.dumps(dataclasses.asdict(case), sort_keys=True)
        if key not in folders:
            folder = tmp_path_factory.mktemp("one")
            with ProcessGroup(DEVICE) as ranks:
                measured = trained(case, folder, ranks)
            (folder / "rank-0.json").write_text(json.dumps(measured))
            folders[key] = folder
        return folders[key]

    shape = dict(TINY_CONFIG)
    yield folder_of
    TINY_CONFIG.update(shape)  # which cases of other shapes have changed


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """The folders of the comparisons' cases, trained by two processes."""
    cases = {name: comparison.two for name, comparison in COMPARISONS.items()}
    quick = {name for name, comparison in COMPARISONS.items() if comparison.quick}

    def train(cases, folder):
        launch(cases, 2, folder)

    return Launched(cases, quick, train, tmp_path_factory.mktemp("two"))


def measured_in(folder) -> list[dict]:
    """What each process has measured, in order of the ranks."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def gradients_in(folder) -> dict[str, torch.Tensor]:
    """The gradients of a run's first step, before they were clipped."""
    return load_file(folder / "gradients.safetensors")


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    flat = [gradient.double().flatten() for gradient in gradients.values()]
    return torch.cat(flat).norm().item()


def square_norms_in(folder) -> np.ndarray:
    """What processes have noted of their gradients for the noise scale, a mean over them."""
    return np.mean([measured["norms"] for measured in measured_in(folder)], axis=0)


def assert_gradients_close(gradients, expected, tolerance) -> None:
    assert gradients.keys() == expected.keys()
    assert len(gradients) > 60
    # Keys' biases have none but what rounding leaves.
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for number, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[number], rtol=tolerance, atol=tolerance * largest
        )


@pytest.mark.parametrize("name", in_tiers(COMPARISONS))
def test_two_processes_have_the_losses_of_one(name, by_two, by_one):
    comparison = COMPARISONS[name]
    losses = losses_of(by_two[name])
    expected = losses_of(by_one(comparison.one))
    np.testing.assert_allclose(losses, expected, rtol=comparison.tolerance)


@pytest.mark.parametrize("name", in_tiers(COMPARISONS))
def test_both_processes_end_with_the_same_weights(name, by_two):
    first, second = measured_in(by_two[name])
    assert first["weights"] == second["weights"]


HAVE_STEPS_OF_THEIR_OWN = {"trainer", "deepspeed"}


@pytest.mark.parametrize(
    "name", in_tiers([name for name in COMPARISONS if name not in HAVE_STEPS_OF_THEIR_OWN])
)
def test_the_gradients_of_two_processes_are_as_large_as_those_of_one(name, by_two, by_one):
    """Neither AdamW nor clipping lets a loss show a common factor."""
    comparison = COMPARISONS[name]
    norm = norm_of(gradients_in(by_two[name]))
    expected = norm_of(gradients_in(by_one(comparison.one)))
    assert norm == pytest.approx(expected, rel=comparison.tolerance)


@pytest.mark.parametrize(
    "name",
    in_tiers([name for name in COMPARISONS if COMPARISONS[name].two.layers == CUT["layers"]]),
)
def test_the_gradients_of_a_model_in_parts_are_those_of_the_whole(name, by_two, by_one):
    comparison = COMPARISONS[name]
    gradients = gradients_in(by_two[name])
    expected = gradients_in(by_one(comparison.one))
    assert_gradients_close(gradients, expected, comparison.tolerance)


WRAPPERS = [
    ("ddp", "DistributedDataParallel"),
    ("trainer", "DistributedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
    ("one-bucket", None),
    ("fsdp", None),
]


@pytest.mark.parametrize(("name", "wrapper"), [case for case in WRAPPERS if case[0] in COMPARISONS])
def test_the_class_around_the_model_is_named(name, wrapper, by_two):
    assert [measured["wrapper"] for measured in measured_in(by_two[name])] == [wrapper, wrapper]


# Pipelines.


@pytest.mark.parametrize(
    ("name", "formula"), [slow("gpipe", 1 / 5), ("1f1b", 1 / 5), slow("interleaved", 1 / 9)]
)
def test_a_stage_waits_at_least_as_long_as_the_formula_says(name, formula, by_two):
    stages = [measured["pipelined"] for measured in measured_in(by_two[name])]
    # Half of it, since the stages are not equally long.
    assert formula / 2 < measured_bubble(stages) < 1


@pytest.mark.parametrize(("chunks", "expected"), [(1, 1 / 5), (2, 1 / 9)])
def test_the_bubble_is_the_share_of_a_step_that_a_stage_waits(chunks, expected):
    assert bubble(stages=2, micro_batches=4, chunks=chunks) == pytest.approx(expected)


def test_a_measured_bubble_is_a_share_of_the_first_stages_passes():
    """Both compute 12 of 15 units (see pipeline.py); the second ends two before the first."""
    assert measured_bubble([(12, 15), (12, 13)]) == pytest.approx(bubble(2, 4))


def test_a_measured_bubble_is_that_of_the_stage_that_waits_most():
    assert measured_bubble([(12, 15), (11.4, 13)]) == pytest.approx(0.24)


@pytest.mark.parametrize("name", in_tiers(["gpipe", "1f1b", "interleaved", "interleaved-unequal"]))
def test_a_pipeline_compares_its_first_micro_batch_with_all_as_one_process_does(
    name, by_two, by_one
):
    case = dataclasses.replace(COMPARISONS[name].two, variant="P-one-bucket", world=1)
    (alone,) = measured_in(by_one(case))
    assert min(alone["norms"]) > 0
    stages = [measured["norms"] for measured in measured_in(by_two[name])]
    assert np.sum(stages, axis=0) == pytest.approx(alone["norms"], rel=1e-3)


# What the noise scale is made of: square norms of each process's gradient, and of their mean.


@pytest.mark.parametrize("name", ["overlap", "zero1"])
def test_ways_to_reduce_see_one_noise_scale(name, by_two):
    expected = square_norms_in(by_two["one-bucket"])
    assert square_norms_in(by_two[name]) == pytest.approx(expected, rel=1e-3)


def test_the_gradients_of_two_processes_agree_in_part(by_two):
    of_part, of_step = square_norms_in(by_two["one-bucket"])
    assert of_part / 2 < of_step < of_part


def test_ddp_notes_no_norms_since_its_gradients_are_never_in_one_piece(by_two):
    assert not square_norms_in(by_two["ddp"]).any()


# What is shared, and what is not.


def optimizer_elements(folder) -> int:
    """How many elements the first process's optimizer state has."""
    return measured_in(folder)[0]["state"]


def test_a_sharded_optimizer_is_half_of_it(by_two):
    assert optimizer_elements(by_two["zero1"]) < 0.51 * optimizer_elements(by_two["one-bucket"])


def test_the_optimizer_of_dtensors_has_as_many_elements_as_the_whole(by_two):
    whole = optimizer_elements(by_two["ddp"])
    assert optimizer_elements(by_two["fsdp"]) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("rank", range(3))
def test_shares_begin_and_end_where_the_kernels_read_quickly(rank):
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (35, 17)]
    flat_shard = FlatShard(parameters, types.SimpleNamespace(world=3, rank=rank))
    assert len(flat_shard.local_shard) == 2 * ALIGN
    assert flat_shard.local_shard.storage_offset() == rank * 2 * ALIGN


@pytest.mark.parametrize("rank", range(3))
def test_flattened_parameters_keep_their_values_and_states_are_cut_like_them(rank):
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (35, 17)]
    flat_shard = FlatShard(parameters, types.SimpleNamespace(world=3, rank=rank))
    assert [p.sum().item() for p in parameters] == [35, 17]
    state = flat_shard.flat[: flat_shard.size]
    assert torch.equal(flat_shard.shard(state), flat_shard.local_shard)


def backward_between_hooks() -> tuple[list[int], weakref.ref]:
    """Return what hooks have sent in a backward pass, and a reference to the model, now unused."""
    model = torch.nn.Linear(3, 1)
    sent = []
    hooks = GradReadyHooks([[model.weight], [model.bias]], sent.append)
    with hooks.awaited(last=True):
        model(torch.ones(1, 3)).sum().backward()
    return sent, weakref.ref(model)


def test_hooks_tell_once_of_each_list_that_all_its_gradients_are_there():
    sent, _ = backward_between_hooks()
    assert sorted(sent) == [0, 1]


def test_hooks_do_not_keep_the_model():
    """Otherwise every run of a process would leave its model on the GPU."""
    _, model = backward_between_hooks()
    gc.collect()
    assert model() is None


def test_a_parameter_without_a_gradient_is_an_error_and_no_wait_for_ever():
    model = torch.nn.Linear(3, 1)
    hooks = GradReadyHooks([[model.weight], [model.bias]], lambda number: None)
    with pytest.raises(RuntimeError, match="1 of the model's parameters"), hooks.awaited(last=True):
        (model.weight * 2).sum().backward()


def test_gradients_are_sent_in_the_last_micro_batch_alone():
    model = torch.nn.Linear(3, 1)
    sent = []
    hooks = GradReadyHooks([[model.weight, model.bias]], sent.append)
    for last, expected in ((False, []), (True, [0]), (False, [0]), (True, [0, 0])):
        with hooks.awaited(last):
            model(torch.ones(1, 3)).sum().backward()
        assert sent == expected


def test_a_parameter_goes_with_the_lowest_of_its_regions_and_one_of_none_with_the_embeddings(
    monkeypatch,
):
    bottom, middle, top = (torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    top.shared = bottom.weight
    loose, frozen = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    middle.frozen = frozen
    monkeypatch.setattr(overlap, "regions_of", lambda model: [[bottom], [middle], [top]])
    split = overlap.split_by_region([bottom.weight, middle.weight, top.weight, loose], None)
    expected = [[bottom.weight, loose], [middle.weight], [top.weight]]
    assert [list(map(id, region)) for region in split] == [
        list(map(id, region)) for region in expected
    ]


def test_an_overflow_of_one_process_is_one_of_all(monkeypatch):
    """The other process has found one."""
    reduced = []

    def all_reduce(tensor, operation):
        reduced.append(operation)
        tensor.fill_(1.0)

    monkeypatch.setattr(zero1.dist, "all_reduce", all_reduce)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for is_enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=is_enabled)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        Zero1.sync_found_inf(None, scaler, optimizer)
        if is_enabled:
            scaler.step(optimizer)
            scaler.update()
    assert reduced == [torch.distributed.ReduceOp.MAX]
    assert parameter.tolist() == [1.0, 1.0], "the step is skipped"
    assert scaler.get_scale() == 2.0


@pytest.fixture
def alone():
    """A process group of this process alone."""
    with ProcessGroup(DEVICE) as ranks:
        ranks.join(planned("P1"))
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_the_state_of_a_cut_parameter_keeps_its_values_and_its_type(dtype, alone):
    """Weights in bf16 have moments in fp32, and masters whose other bits are in int16."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    local = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    cut = DTensor.from_local(local.detach(), mesh, [Shard(0)])
    strategy = types.SimpleNamespace(trained_of={local: cut})
    state = torch.tensor([[1, -2, 3], [257, 1000, -32767]], dtype=dtype)
    gathered = Tensor.gather(strategy, state, local)
    torch.testing.assert_close(gathered, state, rtol=0, atol=0)
    share = Tensor.shard(strategy, gathered, local)
    torch.testing.assert_close(share, state, rtol=0, atol=0)


@pytest.fixture
def cut_by_heads(alone):
    """A tiny model cut for tensor parallelism, for this process alone."""
    spec = planned("P-tensor")
    return Tensor(build_model(spec), ProcessGroup(DEVICE), spec.settings)


def test_every_process_has_the_biases_of_narrowing_layers_whole_and_of_widening_ones_a_share(
    cut_by_heads,
):
    whole = {id(parameter) for parameter in cut_by_heads.whole}
    names = {id(trained): name for name, trained in cut_by_heads.model.named_parameters()}
    have_a_share = {
        re.sub(r".*\.layer\.\d\.", "", names[id(in_model)])
        for parameter, in_model in cut_by_heads.trained_of.items()
        if id(parameter) not in whole
    }
    assert have_a_share == {
        "attention.self.query.weight",
        "attention.self.query.bias",
        "attention.self.key.weight",
        "attention.self.key.bias",
        "attention.self.value.weight",
        "attention.self.value.bias",
        "attention.output.dense.weight",
        "intermediate.dense.weight",
        "intermediate.dense.bias",
        "output.dense.weight",
    }


def test_the_norm_has_what_every_process_has_whole_once_and_the_shares_of_all(
    cut_by_heads, monkeypatch
):
    """Two processes have shares of equal norms."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
    for parameter in cut_by_heads.parameters:
        parameter.grad = torch.ones_like(parameter)
    whole = sum(parameter.numel() for parameter in cut_by_heads.whole)
    every = sum(parameter.numel() for parameter in cut_by_heads.parameters)
    expected = (whole + 2 * (every - whole)) ** 0.5
    assert cut_by_heads.global_norm(None).item() == pytest.approx(expected)


def test_only_gradients_of_what_every_process_has_whole_are_averaged(cut_by_heads, monkeypatch):
    monkeypatch.setattr(cut_by_heads.ranks, "mean", lambda gradients: gradients.mul_(3))
    for in_model in cut_by_heads.trained:
        in_model.grad = torch.ones_like(in_model)
    cut_by_heads.reduce_grads()
    whole = set(map(id, cut_by_heads.whole))
    for parameter in cut_by_heads.parameters:
        assert (parameter.grad == (3 if id(parameter) in whole else 1)).all()


@pytest.mark.parametrize(("parallel", "rounded"), [("ddp", False), ("ddp-bf16", True)])
def test_ddp_sends_gradients_as_they_are_unless_bf16_is_asked_for(parallel, rounded, alone):
    model = torch.nn.Linear(3, 1, bias=False)
    strategy = DDP(model, ProcessGroup(DEVICE), Settings(parallel=parallel, compile="none"))
    third = torch.full((1, 3), 1 / 3)
    strategy.wrapped(model)(third).sum().backward()
    assert torch.equal(model.weight.grad, third.bfloat16().float() if rounded else third)


def test_ddp_averages_in_the_last_micro_batch_alone(alone):
    model = torch.nn.Linear(3, 1)
    strategy = DDP(model, ProcessGroup(DEVICE), Settings(parallel="ddp", compile="none"))
    wrapper = strategy.wrapped(model)
    averages = []
    for last in (False, True):
        with strategy.micro_batch(last):
            averages.append(wrapper.require_backward_grad_sync)
    assert averages == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_the_state_of_flattened_weights_keeps_its_values_and_its_type(dtype, alone):
    weights = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (35, 17)]
    flat_shard = FlatShard(weights, ProcessGroup(DEVICE))
    state = torch.arange(-20, len(flat_shard.local_shard) - 20).to(dtype)
    gathered = flat_shard.gather(state)
    torch.testing.assert_close(gathered, state[:52], rtol=0, atol=0)
    share = flat_shard.shard(gathered)
    torch.testing.assert_close(share[:52], state[:52], rtol=0, atol=0)
    assert share.shape == state.shape


def test_a_trained_models_parameters_have_memory_of_their_own():
    """After ZeRO-1 they are views of one tensor, which no file of weights may have."""
    model = torch.nn.Linear(3, 2)
    weights = [p.detach().clone() for p in model.parameters()]
    FlatShard([*model.parameters()], types.SimpleNamespace(world=1, rank=0))
    gathered = gather_model(model, None, ProcessGroup(DEVICE))
    assert gathered is model
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()


# How processes divide the micro-batches of a step.


@pytest.mark.parametrize(
    ("world", "replicas", "shares"),
    [
        (1, 1, [[0, 1, 2, 3]]),
        (2, 2, [[0, 2], [1, 3]]),
        (4, 2, [[0, 2], [0, 2], [1, 3], [1, 3]]),
        (2, 1, [[0, 1, 2, 3]] * 2),
    ],
)
def test_replicas_take_micro_batches_in_turn_and_the_stages_of_one_the_same(
    world, replicas, shares
):
    ranks = ProcessGroup(DEVICE)
    ranks.world = world
    ranks.replicas = replicas
    for ranks.rank, share in enumerate(shares):
        assert ranks.local_micro_batches([0, 1, 2, 3]) == share


@pytest.mark.parametrize(("world", "parts"), [(1, 4), (2, 2), (4, 4)], ids=["alone", "two", "four"])
def test_the_noise_scale_compares_replicas_or_the_micro_batches_of_one(world, parts):
    ranks = ProcessGroup(DEVICE)
    ranks.world = world
    spec = planned("P-one-bucket", world=4, micro_batch=4)
    ranks.join(resized(spec, {"parallel": "none"}))
    assert (ranks.replicas, ranks.parts, ranks.batch) == (world, parts, 16)


@pytest.mark.parametrize(
    ("variant", "stages", "replicas", "parts"),
    [
        ("P-gpipe", 2, 2, 2),
        ("P-1f1b", 4, 1, 8),
        ("P-interleaved", 2, 2, 2),
        ("P-tensor", None, 1, 8),
        ("P-zero1", None, 4, 4),
    ],
)
def test_processes_that_share_a_model_are_one_part_of_a_step(
    variant, stages, replicas, parts, monkeypatch
):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    ranks = ProcessGroup(DEVICE)
    ranks.world = 4
    ranks.join(planned(variant, world=4, stages=stages, micro_batch=2))
    assert (ranks.replicas, ranks.parts, ranks.batch) == (replicas, parts, 16)


@pytest.mark.parametrize(
    ("average", "mean"),
    [(torch.distributed.ReduceOp.SUM, 2.0), (torch.distributed.ReduceOp.AVG, 6)],
)
def test_a_mean_is_divided_by_the_processes_of_its_group_unless_the_reduction_does_it(
    average, mean, monkeypatch
):
    """What the reduction gives is 6."""
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", {group: 3, None: 4}.get)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, *_: t.fill_(6.0))
    ranks = ProcessGroup(DEVICE)
    ranks.average = average
    assert ranks.mean(torch.ones(()), group) == 1.0, "of one process"
    ranks.world = 4
    assert ranks.mean(torch.ones(()), group) == mean


@pytest.mark.parametrize(("rank", "stages_of"), [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")])
def test_the_stages_of_a_process_are_those_of_its_pipeline(rank, stages_of, monkeypatch):
    ranks = ProcessGroup(DEVICE)
    ranks.rank = rank
    ranks.stages = 2
    monkeypatch.setattr(ranks, "gather", lambda own: [{letter: 1} for letter in "abcd"])
    assert "".join(ranks.gather_stages({})) == stages_of


@pytest.mark.parametrize(("fails", "ended"), [(False, 1), (True, 0)])
def test_the_processes_end_their_group_together_unless_one_has_failed(fails, ended, monkeypatch):
    """After an error the others may never come to the end."""
    destroyed = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: destroyed.append(1))
    with contextlib.suppress(ZeroDivisionError), ProcessGroup(DEVICE):
        if fails:
            raise ZeroDivisionError
    assert len(destroyed) == ended


# Runs that four processes begin and break off after so many steps, and that two end.
BREAK = 4
BEGUN = {"world": 4, "preset": {"checkpoint_every": 2}}
BEGUN_BY_FOUR = {
    "P1": Case("P1", **BEGUN),
    "P-zero1": Case("P-zero1", **BEGUN),
    "P-overlap-zero1": Case("P-overlap-zero1", **BEGUN),
    "P-peers": Case("P-peers", **BEGUN),
    "P-peers-masters": Case("P-peers", **BEGUN, **BF16_MASTERS),
    "P-peers-rounded": Case("P-peers", **BEGUN, **ROUNDED),
    "P-fsdp": Case("P-fsdp", **BEGUN),
    "P-1f1b": Case("P-1f1b", stages=2, **BEGUN, **CUT),
    "P-tensor": Case("P-tensor", **BEGUN, **CUT),
    "P-zero1-masters": Case("P-zero1", **BEGUN, **BF16_MASTERS),
    "P-tensor-masters": Case("P-tensor", **BEGUN, **CUT, **MASTERS),
}
# Two pipelines of two stages, which four processes begin and end.
GRID = Case("P-1f1b", world=4, stages=2, **CUT)
QUICK_BY_FOUR = {"grid", "P-1f1b", "P-fsdp", "P-zero1-masters", "P-peers-masters"}
BEGUN_IN_TIERS = [name if name in QUICK_BY_FOUR else slow(name) for name in BEGUN_BY_FOUR]


@pytest.fixture(scope="module")
def by_four(tmp_path_factory):
    """The folders of GRID and of the runs that four processes began and two ended."""

    def train(cases, folder):
        begun = {name: case for name, case in cases.items() if name in BEGUN_BY_FOUR}
        stopped = {name: dataclasses.replace(case, stop=BREAK) for name, case in begun.items()}
        launch(cases | stopped, 4, folder)
        assert len(list(folder.glob("*/checkpoint.safetensors"))) == len(begun)
        launch(begun, 2, folder)

    cases = BEGUN_BY_FOUR | {"grid": GRID}
    return Launched(cases, QUICK_BY_FOUR, train, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", BEGUN_IN_TIERS)
def test_a_run_that_four_began_goes_on_with_two(name, by_four):
    first, second, *_ = measured_in(by_four[name])
    assert first["begin"] == BREAK
    assert first["refused"] is None
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("name", BEGUN_IN_TIERS)
def test_a_resumed_run_has_the_losses_of_one_process_throughout(name, by_four, by_one):
    """It takes the same micro-batches, and its optimizer's state in other shares."""
    case = BEGUN_BY_FOUR[name]
    is_cut = case.layers == CUT["layers"]
    alone = dataclasses.replace(UNCUT, settings=case.settings) if is_cut else case
    tolerance = 0.05 if case.settings else 1e-4
    np.testing.assert_allclose(losses_of(by_four[name]), losses_of(by_one(alone)), rtol=tolerance)


def test_two_pipelines_of_two_have_the_losses_of_one_process(by_four, by_one):
    np.testing.assert_allclose(losses_of(by_four["grid"]), losses_of(by_one(UNCUT)), rtol=1e-4)


def test_two_pipelines_of_two_have_the_gradients_of_one_process(by_four, by_one):
    assert_gradients_close(gradients_in(by_four["grid"]), gradients_in(by_one(UNCUT)), 1e-4)


def test_two_pipelines_of_two_end_with_the_same_weights(by_four):
    assert len({measured["weights"] for measured in measured_in(by_four["grid"])}) == 1
    assert len(measured_in(by_four["grid"])) == 4


def test_two_pipelines_of_two_see_the_noise_scale_of_two_whole_models(by_four, by_two):
    """Each of the two stages has a part of both square norms."""
    expected = square_norms_in(by_two["tensor-one-bucket"])
    assert 2 * square_norms_in(by_four["grid"]) == pytest.approx(expected, rel=1e-3)
