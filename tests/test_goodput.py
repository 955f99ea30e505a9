"""Noise scale and efficiency on a problem whose noise scale is known: gradients that are a vector plus normal noise."""

import numpy as np
import pytest
import torch

from qa_lib.measure.trace import busy_and_exposed
from qa_lib.records.record import Noise
from qa_lib.spec.settings import Settings
from qa_lib.train.grad_noise import REFERENCE, SMOOTHING, efficiency, noise
from qa_lib.train.parallel import zero1
from qa_lib.train.parallel.data_parallel import OneBucketDDP, square_norm
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.material import cases

SIZE, LENGTH, SPREAD = (
    200,
    3.0,
    0.7,
)  # elements of a gradient, norm of the true one, noise of an element
PHI = SIZE * SPREAD**2 / LENGTH**2


@pytest.fixture
def ranks():
    """A process that takes four micro-batches of two samples a step."""
    ranks = ProcessGroup(torch.device("cpu"))
    ranks.parts, ranks.batch = 4, 8
    return ranks


def squares(processes: int, samples: int, steps: int) -> tuple[float, float]:
    """Mean square norms, over so many steps, of each process's gradient and of the mean of all."""
    draw = np.random.default_rng(0)
    true = np.full(SIZE, LENGTH / SIZE**0.5)
    own = true + SPREAD / samples**0.5 * draw.standard_normal((steps, processes, SIZE))
    return np.square(own).sum(-1).mean(), np.square(own.mean(1)).sum(-1).mean()


@pytest.mark.parametrize(("processes", "samples"), [(2, 16), (4, 8), (8, 1)])
def test_the_noise_scale_is_found_whatever_the_processes(processes, samples):
    found = noise(*squares(processes, samples, 5000), processes, samples)
    assert found.sqr == pytest.approx(LENGTH**2, rel=0.02)
    assert found.var / found.sqr == pytest.approx(PHI, rel=0.04)


def test_efficiency_is_1_at_the_reference_and_falls_to_the_share_of_it():
    found = Noise(sqr=1.0, var=500.0)
    assert efficiency(found, REFERENCE) == 1
    assert efficiency(found, 128) == pytest.approx(532 / 628)
    for batch in (64, 512, 10**6):
        assert REFERENCE / batch < efficiency(found, batch) < 1
    assert efficiency(Noise(sqr=-0.1, var=5.0), 64) is None, "noise has hidden the gradient"
    assert efficiency(Noise(), 64) is None


def one_step(kind, ranks, micro_batches):
    """The square norm of the gradient after a step of a strategy, and what it says of noise."""
    torch.manual_seed(0)
    model, last = torch.nn.Linear(3, 1), len(micro_batches)
    strategy = kind(model, ranks, Settings(precision="fp32"))
    for number, inputs in enumerate(micro_batches, 1):
        with strategy.micro_batch(last=number == last):
            (model(inputs).square().mean() / last).backward()
    whole = square_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    strategy.reduce_grads()
    strategy.global_norm(whole.sqrt())
    return whole, ranks.stats.noise(steps=1)


def test_a_process_alone_compares_its_first_micro_batch_with_all(ranks):
    micro_batches = torch.randn(4, 2, 3)
    whole, found = one_step(OneBucketDDP, ranks, micro_batches)
    first, _ = one_step(OneBucketDDP, ProcessGroup(torch.device("cpu")), micro_batches[:1])
    weight = 1 - SMOOTHING ** (8 / REFERENCE)
    torch.testing.assert_close(ranks.stats.norms, weight * torch.stack([first, whole]))
    expected = noise(float(first), float(whole), 4, 2)
    assert (found.sqr, found.var, found.steps) == (
        pytest.approx(expected.sqr),
        pytest.approx(expected.var),
        1,
    )


@pytest.mark.parametrize("batch", [8, 32, 512])
def test_the_means_reach_back_over_as_many_features_whatever_the_batch(batch, ranks):
    """Of norms that change halfway through 64,000 samples, the old ones weigh 1/e times as much as the new ones."""
    ranks.batch, steps = batch, 32_000 // batch
    old, new = torch.tensor([[9.0, 3.0], [5.0, 4.0]])
    for norms in [old] * steps + [new] * steps:
        ranks.stats.note_norms(*norms)
    share = 1 / (1 + np.exp(-1))
    expected = noise(*(share * new + (1 - share) * old).tolist(), 4, batch // 4)
    found = ranks.stats.noise(2 * steps)
    assert (found.sqr, found.var) == pytest.approx((expected.sqr, expected.var), rel=0.01)


def test_a_process_alone_with_one_micro_batch_says_nothing():
    assert (
        one_step(OneBucketDDP, ProcessGroup(torch.device("cpu")), torch.randn(1, 2, 3))[1]
        == Noise()
    )


def test_what_a_gpu_only_communicates_is_exposed():
    """The first call is alone for half of its time; a kernel runs beside another one on a second stream; the calls at
    the end come after a while in which nothing runs."""
    events = cases("a trace of a GPU that communicates")
    assert busy_and_exposed(events) == (pytest.approx(0.75), pytest.approx(0.95))
    assert busy_and_exposed([]) == (0, 0)


def test_a_sharded_variant_alone_says_nothing_of_noise(ranks, monkeypatch):
    monkeypatch.setattr(zero1, "reduce_scatter", lambda out, given, op: out.copy_(given))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: None)
    assert one_step(zero1.Zero1, ranks, torch.randn(1, 2, 3))[1] == Noise()


def test_gradients_that_are_not_finite_leave_no_noise_scale(ranks):
    ranks.stats.note_norms(*torch.tensor([torch.nan, 1.0]))
    assert ranks.stats.noise(steps=1) == Noise()


def test_more_steps_for_the_overlap_change_nothing_that_is_recorded(ranks, monkeypatch):
    ranks.stats.note_norms(*torch.tensor([2.0, 1.0]))
    before = ranks.stats.noise(steps=1)

    def step():
        ranks.stats.note_norms(*torch.tensor([9.0, 3.0]))
        ranks.stats.waits.append(([], (0.0, 1.0)))

    found = {"busy_ms": 1.0, "exposed_ms": 0.5}
    monkeypatch.setattr("qa_lib.measure.trace.overlap", lambda step, device: step() or found)
    ranks.stats.note_overlap(step)
    assert (ranks.stats.noise(steps=1), len(ranks.stats.waits), ranks.stats.overlap["busy_ms"]) == (
        before,
        0,
        1.0,
    )
