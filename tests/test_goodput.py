"""Noise scale, efficiency, and what a GPU only communicates.

The noise scale is found where it is known: for gradients that are a vector plus normal noise.
"""

import numpy as np
import pytest
import torch

from qa_lib.measure.communication import busy_and_exposed
from qa_lib.records.schema import Noise
from qa_lib.spec.settings import Settings
from qa_lib.train import grad_noise
from qa_lib.train.grad_noise import REFERENCE, SMOOTHING, efficiency, noise_from_norms
from qa_lib.train.parallel import overlap, zero1
from qa_lib.train.parallel.data_parallel import OneBucketDDP, square_norm
from qa_lib.train.parallel.process_group import ProcessGroup

SIZE = 200  # elements of a gradient
LENGTH = 3.0  # norm of the gradient over all data
SPREAD = 0.7  # standard deviation of the noise of an element
NOISE_SCALE = SIZE * SPREAD**2 / LENGTH**2


@pytest.fixture
def alone():
    """A process that takes one micro-batch a step."""
    return ProcessGroup(torch.device("cpu"))


@pytest.fixture
def ranks():
    """A process that takes four micro-batches of two samples a step."""
    ranks = ProcessGroup(torch.device("cpu"))
    ranks.parts = 4
    ranks.batch = 8
    return ranks


# By the norms of gradients.


def mean_square_norms(processes: int, samples: int, steps: int) -> tuple[float, float]:
    """Mean square norms of each process's gradient, and of the mean of all processes' ones."""
    draw = np.random.default_rng(0)
    true_gradient = np.full(SIZE, LENGTH / SIZE**0.5)
    noises = draw.standard_normal((steps, processes, SIZE))
    gradients = true_gradient + SPREAD / samples**0.5 * noises
    of_each = np.square(gradients).sum(-1).mean()
    of_mean = np.square(gradients.mean(1)).sum(-1).mean()
    return of_each, of_mean


@pytest.mark.parametrize(("processes", "samples"), [(2, 16), (4, 8), (8, 1)])
def test_the_noise_scale_is_found_whatever_the_processes(processes, samples):
    of_each, of_mean = mean_square_norms(processes, samples, steps=5000)
    found = noise_from_norms(of_each, of_mean, processes, samples)
    assert found.sqr == pytest.approx(LENGTH**2, rel=0.02)
    assert found.var / found.sqr == pytest.approx(NOISE_SCALE, rel=0.04)


def test_efficiency_is_1_at_the_reference():
    assert efficiency(Noise(sqr=1.0, var=500.0), REFERENCE) == 1


def test_efficiency_is_that_of_pollux():
    assert efficiency(Noise(sqr=1.0, var=500.0), 128) == pytest.approx(532 / 628)


@pytest.mark.parametrize("batch", [64, 512, 10**6])
def test_efficiency_falls_no_lower_than_to_the_share_of_the_reference(batch):
    assert REFERENCE / batch < efficiency(Noise(sqr=1.0, var=500.0), batch) < 1


def test_a_gradient_of_any_length_above_0_has_a_noise_scale():
    assert grad_noise.noise_scale(Noise(sqr=0.5, var=0.25)) == 0.5
    assert grad_noise.noise_scale(Noise(sqr=0.0, var=1.0)) is None


@pytest.mark.parametrize("found", [Noise(sqr=-0.1, var=5.0), Noise(sqr=1.0, var=-0.1), Noise()])
def test_where_noise_has_hidden_the_gradient_there_is_no_efficiency(found):
    assert efficiency(found, 64) is None


# By steps of a strategy.


def step_once(strategy_class, ranks: ProcessGroup, micro_batches: torch.Tensor) -> torch.Tensor:
    """Take a step's gradients with a strategy; the square norm of the gradient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    strategy = strategy_class(model, ranks, Settings(precision="fp32"))
    count = len(micro_batches)
    for number, inputs in enumerate(micro_batches, 1):
        with strategy.micro_batch(last=number == count):
            (model(inputs).square().mean() / count).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    square = square_norm(gradient)
    strategy.reduce_grads()
    strategy.global_norm(square.sqrt())
    return square


def test_a_process_alone_compares_its_first_micro_batch_with_all(alone, ranks):
    micro_batches = torch.randn(4, 2, 3)
    of_all = step_once(OneBucketDDP, ranks, micro_batches)
    of_first = step_once(OneBucketDDP, alone, micro_batches[:1])
    weight = 1 - SMOOTHING ** (8 / REFERENCE)
    torch.testing.assert_close(ranks.stats.norms, weight * torch.stack([of_first, of_all]))
    found = ranks.stats.noise(steps=1)
    expected = noise_from_norms(float(of_first), float(of_all), parts=4, samples=2)
    assert found.sqr == pytest.approx(expected.sqr)
    assert found.var == pytest.approx(expected.var)
    assert found.steps == 1


def test_a_process_with_one_micro_batch_is_a_part_by_that(alone):
    model = torch.nn.Linear(3, 1)
    strategy = OneBucketDDP(model, alone, Settings(precision="fp32"))
    model(torch.ones(2, 3)).sum().backward()
    strategy.reduce_grads()
    square = sum(parameter.grad.square().sum() for parameter in model.parameters())
    torch.testing.assert_close(strategy.local_square_norm, square)


def test_a_process_alone_that_would_send_meanwhile_notes_the_same(ranks, monkeypatch):
    monkeypatch.setattr(overlap, "regions_of", lambda model: [[model]])
    micro_batches = torch.randn(4, 2, 3)
    step_once(OneBucketDDP, ranks, micro_batches)
    expected = ranks.stats.norms.clone()
    ranks.stats.norms.zero_()
    step_once(overlap.OverlapDDP, ranks, micro_batches)
    torch.testing.assert_close(ranks.stats.norms, expected)


def test_a_process_alone_with_one_micro_batch_says_nothing_of_noise(alone):
    step_once(OneBucketDDP, alone, torch.randn(1, 2, 3))
    assert alone.stats.noise(steps=1) == Noise()


def test_a_sharded_variant_alone_says_nothing_of_noise(ranks, monkeypatch):
    monkeypatch.setattr(zero1, "reduce_scatter", lambda out, given, op: out.copy_(given))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: None)
    step_once(zero1.Zero1, ranks, torch.randn(1, 2, 3))
    assert ranks.stats.noise(steps=1) == Noise()


@pytest.mark.parametrize("batch", [8, 32, 512])
def test_the_means_reach_back_over_as_many_samples_whatever_the_batch(batch, ranks):
    """Norms change halfway through 64,000 samples: the old ones weigh 1/e of the new ones."""
    ranks.batch = batch
    steps = 32_000 // batch
    old = torch.tensor([9.0, 3.0])
    new = torch.tensor([5.0, 4.0])
    for norms in [old] * steps + [new] * steps:
        ranks.stats.note_norms(*norms)
    share = 1 / (1 + np.exp(-1))
    own, mean = (share * new + (1 - share) * old).tolist()
    expected = noise_from_norms(own, mean, parts=4, samples=batch // 4)
    found = ranks.stats.noise(2 * steps)
    assert found.sqr == pytest.approx(expected.sqr, rel=0.01)
    assert found.var == pytest.approx(expected.var, rel=0.01)


def test_square_norms_of_a_pipelines_stages_add_up(ranks):
    """A mean over all processes is that over the stages of each replica's mean."""
    stats = grad_noise.StepStats(ranks)
    stats.note_norms(torch.tensor(2.0), torch.tensor(1.0))
    alone = stats.noise(1)
    ranks.stages = 2
    assert stats.noise(1).sqr == pytest.approx(2 * alone.sqr)
    assert stats.noise(1).var == pytest.approx(2 * alone.var)


def test_gradients_that_are_not_finite_leave_no_noise_scale(ranks):
    ranks.stats.note_norms(*torch.tensor([torch.nan, 1.0]))
    assert ranks.stats.noise(steps=1) == Noise()


@pytest.mark.parametrize(("precision", "is_known"), [("fp32", True), ("fp16", False)])
def test_gradients_with_the_scale_of_the_loss_say_nothing_of_noise(precision, is_known, ranks):
    strategy = OneBucketDDP(torch.nn.Linear(3, 1), ranks, Settings(precision=precision))
    strategy.local_square_norm = torch.tensor(9.0)
    strategy.global_norm(torch.tensor(2.0))
    assert ranks.stats.norms.any() == is_known


def test_norms_are_noted_once(ranks):
    strategy = OneBucketDDP(torch.nn.Linear(3, 1), ranks, Settings(precision="fp32"))
    strategy.local_square_norm = torch.tensor(9.0)
    strategy.global_norm(torch.tensor(2.0))
    noted = ranks.stats.norms.clone()
    strategy.global_norm(torch.tensor(2.0))
    assert torch.equal(ranks.stats.norms, noted)


# How long a stage of a pipeline computes.


def test_a_stages_times_are_means_over_its_steps(ranks):
    """It computes in laps: for 3 s of 5 in one step, and for 1 s of 2 in another."""
    ranks.stats.waits.append(([(0.0, 1.0), (2.0, 4.0)], (0.0, 5.0)))
    ranks.stats.waits.append(([(6.0, 7.0)], (6.0, 8.0)))
    assert ranks.stats.pipelined() == (2.0, 3.5)


def test_without_a_pipeline_there_are_no_times_of_stages(ranks):
    assert ranks.stats.pipelined() is None


# What communication costs a step.


@pytest.fixture
def note_overlap(ranks, monkeypatch):
    """Note the overlap of a process, by a step that is made more and notes norms and waits."""

    def step():
        ranks.stats.note_norms(*torch.tensor([9.0, 3.0]))
        ranks.stats.waits.append(([], (0.0, 1.0)))

    def overlap(step, device):
        step()
        return {"busy_ms": 1.0, "exposed_ms": 0.5}

    monkeypatch.setattr("qa_lib.measure.communication.overlap", overlap)
    return lambda: ranks.stats.note_overlap(step)


def test_the_overlap_is_noted(ranks, note_overlap):
    note_overlap()
    assert ranks.stats.overlap == {"busy_ms": 1.0, "exposed_ms": 0.5}


def test_more_steps_for_the_overlap_change_no_noise(ranks, note_overlap):
    ranks.stats.note_norms(*torch.tensor([2.0, 1.0]))
    before = ranks.stats.noise(steps=1)
    note_overlap()
    assert ranks.stats.noise(steps=1) == before


def test_more_steps_for_the_overlap_note_no_waits(ranks, note_overlap):
    note_overlap()
    assert len(ranks.stats.waits) == 0


def test_a_pipelines_waits_are_means_over_its_last_steps_alone(ranks):
    for seconds in [9.0, *[1.0] * grad_noise.KEPT]:
        ranks.stats.waits.append(([(0.0, seconds)], (0.0, seconds)))
    assert ranks.stats.pipelined() == (1.0, 1.0)


def event(category: str, name: str, begin_us: int, us: int) -> dict:
    """An event of a trace."""
    return {"cat": category, "name": name, "ts": begin_us, "dur": us}


NCCL = "ncclDevKernel_AllReduce"


def test_a_gpu_is_busy_while_anything_computes_or_copies():
    events = [
        event("kernel", "gemm", 500, 700),
        event("kernel", "gelu", 600, 100),  # beside the first, on a second stream
        event("gpu_memcpy", "Memcpy DtoD", 2400, 50),
    ]
    assert busy_and_exposed(events) == (pytest.approx(0.75), 0)


def test_what_a_gpu_only_communicates_is_exposed():
    events = [
        event("kernel", NCCL, 0, 1000),  # alone for half of its time
        event("kernel", "gemm", 500, 700),
        event("kernel", NCCL, 2000, 300),  # after a while in which nothing runs
        event("kernel", NCCL, 2100, 400),  # beside the one before
        event("gpu_memcpy", "Memcpy DtoD", 2400, 50),
    ]
    busy_ms, exposed_ms = busy_and_exposed(events)
    assert busy_ms == pytest.approx(0.75)
    assert exposed_ms == pytest.approx(0.5 + 0.45)


@pytest.mark.parametrize("name", ["send_kernel", "spread_kernel", "void c10d::barrier_kernel(int)"])
def test_writing_to_other_gpus_and_waiting_for_them_is_communication(name):
    assert busy_and_exposed([event("kernel", name, 0, 1000)]) == (0, pytest.approx(1.0))


@pytest.mark.parametrize(
    "events",
    [[], [event("gpu_user_annotation", "forward", 0, 9000), event("cpu_op", "aten::mm", 0, 9000)]],
)
def test_ranges_and_operators_are_no_work_of_a_gpu(events):
    assert busy_and_exposed(events) == (0, 0)
