"""AdamW over masters of half-precision weights, against PyTorch's; its kernel against plain."""

import copy
from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator

from qa_lib.errors import UserError
from qa_lib.kernels import adamw as module
from qa_lib.kernels import eight_bit
from qa_lib.kernels.adamw import (
    halves,
    master_of,
    random_bits,
    read_moments,
    update,
    upper,
    weight_noise,
)
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.optim import unscale
from tests.kernels import DEVICE
from tests.material import refused

SHAPES = [(33, 17), (128,), (128,), (4, 5, 6)]


def masters_of(optimizer: MasterAdamW) -> list[torch.Tensor]:
    return [master_of(parameter, state["low_bits"]) for parameter, state in optimizer.state.items()]


def optimizer_of(parameters, rate=1e-2, max_norm=3.0, **options) -> MasterAdamW:
    rate = torch.tensor(rate, device=parameters[0].device)
    return MasterAdamW(parameters, lr=rate, weight_decay=0.0, max_norm=max_norm, **options)


# The types of both moments and of the weights, and the error of a master that they allow.
TYPES = [
    (torch.float32, torch.bfloat16, 1e-6),
    (torch.float32, torch.float16, 1e-5),
    (torch.bfloat16, torch.bfloat16, 4e-3),
    (torch.uint8, torch.bfloat16, 0.1),
]


@pytest.mark.parametrize(("moments", "dtype", "tolerance"), TYPES)
def test_it_is_adamw_with_clipping(moments, dtype, tolerance):
    """In each of 20 steps of a hundredth, a moment in bf16 is wrong by 1/256 at most.

    In 8 bits it is by 1/8. The norm of the gradients falls from 28 to 1.4, so that a limit of 3
    clips the first half of the steps.
    """
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in SHAPES]
    copies = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    ours = optimizer_of(parameters, moments=moments)
    theirs = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.0)
    for step in range(20):
        torch.manual_seed(step)
        for parameter, other in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn(parameter.shape).to(DEVICE, dtype) / (step + 1)
            other.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(copies, 3.0)
        ours.step()
        theirs.step()
    masters = masters_of(ours)
    torch.testing.assert_close(
        masters, [other.detach() for other in copies], rtol=1e-5, atol=tolerance
    )
    weights = [master.to(dtype) for master in masters]
    assert all(map(torch.equal, parameters, weights)), "there is no tie among these"


# The types of both moments beside weights without masters.
ROUNDED = [torch.float32, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("moments", ROUNDED)
def test_without_masters_weights_are_right_on_average(moments):
    """No step of these is as large as half of the distance of two weights.

    Gradients are equal, so that each step is the rate, whatever the type of the moments.
    """
    parameter = torch.nn.Parameter(torch.full((10_000,), 1.5, dtype=torch.bfloat16, device=DEVICE))
    optimizer = optimizer_of([parameter], 2**-12, None, moments=moments, masters=False)
    assert "low_bits" not in optimizer.state[parameter]
    for _ in range(64):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert len(parameter.unique()) > 2
    # The variance of each rounding is that of a choice between numbers 1/128 apart.
    deviation = (64 * 2**-12 / 128 / len(parameter)) ** 0.5
    mean = parameter.float().mean().item()
    assert mean == pytest.approx(1.5 - 64 * 2**-12, abs=5 * deviation)


def test_weight_decay_acts_on_weights_without_masters():
    parameter = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16, device=DEVICE))
    optimizer = MasterAdamW([parameter], 1e-2, weight_decay=0.1, masters=False)
    for _ in range(50):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert parameter.float().mean().item() == pytest.approx((1 - 1e-3) ** 50, rel=1e-3)


# What every optimizer of PyTorch does.


def drawn_parameters(dtype=torch.bfloat16) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in SHAPES]


def groups_of(parameters) -> list[dict]:
    """Two groups, of which the second has its own rate and decay."""
    return [
        {"params": parameters[:2]},
        {"params": parameters[2:], "lr": 3e-2, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def give_gradients(parameters, step: int) -> None:
    torch.manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(DEVICE, parameter.dtype)


def schedules(optimizer):
    """Rates that warm up by steps of their own in each group."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n), lambda n: 0.9**n])


def test_groups_decay_and_schedules_are_those_of_adamw():
    parameters = drawn_parameters()
    copies = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    ours = MasterAdamW(groups_of(parameters), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(groups_of(copies), lr=1e-2, weight_decay=0.1)
    schedulers = [schedules(optimizer) for optimizer in (ours, theirs)]
    for step in range(20):
        give_gradients(parameters, step)
        for parameter, other in zip(parameters, copies, strict=True):
            other.grad = parameter.grad.float()
        ours.step()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    expected = [parameter.detach() for parameter in copies]
    torch.testing.assert_close(masters_of(ours), expected, rtol=1e-5, atol=1e-6)
    rates = [group["lr"].item() for group in ours.param_groups]
    assert rates == pytest.approx([group["lr"] for group in theirs.param_groups])


def test_gradients_are_not_clipped_unless_asked():
    (parameter,) = parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]
    optimizer = MasterAdamW(parameters)
    parameter.grad = torch.tensor([1000.0]).bfloat16()
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].item() == pytest.approx(100.0, rel=0.01)


def test_a_rate_may_be_set_by_hand():
    parameters = drawn_parameters()
    optimizer = MasterAdamW(parameters, weight_decay=0.0)
    before = [p.detach().clone() for p in parameters]
    optimizer.param_groups[0]["lr"] = 0.0
    give_gradients(parameters, 0)
    optimizer.step()
    assert all(map(torch.equal, parameters, before))


def test_a_closure_is_called_and_its_loss_returned():
    (parameter,) = parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    optimizer = MasterAdamW(parameters, lr=0.1)

    def closure():
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (parameter < 1).all()


def test_a_parameter_whose_gradients_come_late_is_corrected_for_its_own_steps():
    parameters = drawn_parameters()
    copies = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    ours = MasterAdamW(parameters, lr=1e-2)
    theirs = torch.optim.AdamW(copies, lr=1e-2)
    for step in range(6):
        give_gradients(parameters, step)
        if step < 3:
            parameters[1].grad = None
        for parameter, other in zip(parameters, copies, strict=True):
            other.grad = None if parameter.grad is None else parameter.grad.float()
        ours.step()
        theirs.step()
    expected = [parameter.detach() for parameter in copies]
    torch.testing.assert_close(masters_of(ours), expected, rtol=1e-5, atol=1e-6)


def test_without_any_gradient_nothing_changes():
    parameters = drawn_parameters()
    optimizer = MasterAdamW(parameters)
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 0


# The types of both moments and of the weights, and whether these have masters.
FORMS = [(*types[:2], True) for types in TYPES]
FORMS += [(moments, torch.bfloat16, False) for moments in ROUNDED]


@pytest.mark.parametrize(("moments", "dtype", "masters"), FORMS, ids=str)
@pytest.mark.parametrize("through", ["memory", "file", "accelerate"])
def test_a_state_is_loaded_bit_for_bit(moments, dtype, masters, through, tmp_path):
    """The steps after it are those of an optimizer that went on."""
    parameters = drawn_parameters(dtype)
    options = {"moments": moments, "masters": masters}
    optimizer = MasterAdamW(groups_of(parameters), lr=1e-2, **options)
    scheduler = schedules(optimizer)
    for step in range(3):
        give_gradients(parameters, step)
        optimizer.step()
        scheduler.step()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    again = MasterAdamW(groups_of(copies), lr=0.5, **options)
    state = optimizer.state_dict()
    if through == "file":
        torch.save(state, tmp_path / "optimizer.pt")
        state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    rate = again.param_groups[0]["lr"]
    again.load_state_dict(state)
    if through == "accelerate":
        again = Accelerator(cpu=DEVICE.type == "cpu").prepare(again).optimizer
    assert again.param_groups[0]["lr"] is rate
    for parameter, other in zip(parameters, copies, strict=True):
        for name, value in optimizer.state[parameter].items():
            assert again.state[other][name].dtype == value.dtype, name
            assert torch.equal(again.state[other][name], value), name
    give_gradients(parameters, 3)
    give_gradients(copies, 3)
    optimizer.step()
    again.step()
    assert all(map(torch.equal, parameters, copies))


@pytest.mark.parametrize(("moments", "dtype", "masters"), FORMS, ids=str)
def test_a_state_is_loaded_into_the_memory_that_a_graph_was_captured_with(moments, dtype, masters):
    parameters = drawn_parameters(dtype)
    optimizer = MasterAdamW(groups_of(parameters), lr=1e-2, moments=moments, masters=masters)
    first = copy.deepcopy(optimizer.state_dict())
    places = [dict(optimizer.state[p]) for p in parameters]
    give_gradients(parameters, 0)
    optimizer.step()
    optimizer.load_state_dict(first)
    for number, (parameter, place) in enumerate(zip(parameters, places, strict=True)):
        for name, value in optimizer.state[parameter].items():
            assert value is place[name], name
            assert torch.equal(value, first["state"][number][name]), name


@pytest.mark.parametrize("masters", [True, False])
def test_a_copy_of_it_goes_on_by_itself(masters):
    parameters = drawn_parameters()
    optimizer = MasterAdamW(parameters, max_norm=1.0, masters=masters)
    give_gradients(parameters, 0)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    give_gradients(twin.param_groups[0]["params"], 1)
    give_gradients(parameters, 1)
    optimizer.step()
    twin.step()
    assert all(map(torch.equal, parameters, twin.param_groups[0]["params"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradscaler_needs_nothing_but_its_own_calls(dtype):
    """The first step overflows, and is left out."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = MasterAdamW([parameter], lr=1e-2, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (torch.inf, 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = optimizer.state[parameter]
    assert state["step"] == 1
    assert state["exp_avg"].tolist() == pytest.approx([0.1] * 4)
    assert scaler.get_scale() == 512.0


WRONG = [
    ([torch.float32], "keeps fp32 masters of weights in half precision, and these are in float32"),
    ([torch.bfloat16, torch.float16], "got parameters in bfloat16 and in float16: cast them all"),
]


@pytest.mark.parametrize(("types", "said"), WRONG)
def test_weights_of_another_type_are_refused(types, said):
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in types]
    refused(said, MasterAdamW, parameters)


def test_a_state_of_another_type_of_weights_is_refused():
    state = MasterAdamW(drawn_parameters(torch.float16)).state_dict()
    optimizer = MasterAdamW(drawn_parameters())
    refused("is not one of MasterAdamW over weights in bfloat16", optimizer.load_state_dict, state)


@pytest.mark.parametrize("masters", [True, False])
def test_a_state_with_masters_and_one_without_are_not_each_others(masters):
    state = MasterAdamW(drawn_parameters(), masters=masters).state_dict()
    optimizer = MasterAdamW(drawn_parameters(), masters=not masters)
    said = "is not one of MasterAdamW over weights in bfloat16"
    refused(said + (" without masters" if masters else ""), optimizer.load_state_dict, state)


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(masters, steps):
    parameters = drawn_parameters()
    theirs = torch.optim.AdamW(parameters)
    for step in range(steps):
        give_gradients(parameters, step)
        theirs.step()
    optimizer = MasterAdamW(parameters, masters=masters)
    before = copy.deepcopy(optimizer.state_dict())
    said = "is not one of MasterAdamW over weights in bfloat16"
    refused(said, optimizer.load_state_dict, theirs.state_dict())
    optimizer.load_state_dict(before)
    give_gradients(parameters, 1)
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 1


def test_a_state_without_that_of_a_parameter_is_refused():
    optimizer = MasterAdamW(drawn_parameters())
    state = optimizer.state_dict()
    del state["state"][0]
    refused("is not one of MasterAdamW", optimizer.load_state_dict, state)


def test_a_skipped_step_is_not_counted_whatever_number_says_so():
    parameters = drawn_parameters()
    optimizer = MasterAdamW(parameters)
    before = [p.detach().clone() for p in parameters]
    give_gradients(parameters, 0)
    optimizer.found_inf = torch.tensor(-1.0, device=DEVICE)
    optimizer.step()
    assert all(map(torch.equal, parameters, before))
    assert optimizer.state[parameters[0]]["step"] == 0


def test_weights_in_fp16_have_masters():
    said = "in float16 and masters=False: weights in bfloat16 alone are rounded at random"
    with pytest.raises(UserError, match=said):
        MasterAdamW(drawn_parameters(torch.float16), masters=False)


# The kernels.


class Columns(NamedTuple):
    """What an update takes of each of several parameters."""

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    low_bits: list[torch.Tensor] | list[None]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]
    scales: list[torch.Tensor]
    firsts: list[torch.Tensor]

    def masters(self) -> list[torch.Tensor]:
        return list(map(master_of, self.weights, self.low_bits))

    def moments(self) -> torch.Tensor:
        """Both moments of all parameters in a row."""
        return torch.cat([tensor.flatten() for tensor in self.means + self.squares])


def drawn_columns(moments, dtype, shapes, masters=True) -> Columns:
    """Tensors of that type, with moments of another, in the middle of a training."""
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    gradients = [torch.randn_like(weight) for weight in weights]
    low_type = module.LOW_TYPES[dtype]
    largest = 20_000 if low_type == torch.int16 else 0.5
    low_bits = [(torch.rand(w.shape, device=DEVICE) * largest).to(low_type) for w in weights]
    if not masters:
        low_bits = [None for _ in weights]
    if moments == torch.uint8:
        means = [torch.randint(256, w.shape, device=DEVICE).to(moments) for w in weights]
        squares = [torch.randint(256, w.shape, device=DEVICE).to(moments) for w in weights]
        blocks = [-(-w.numel() // eight_bit.BLOCK) for w in weights]
    else:
        means = [torch.randn(w.shape, device=DEVICE).to(moments) for w in weights]
        squares = [torch.rand(w.shape, device=DEVICE).to(moments) for w in weights]
        blocks = [0 for _ in weights]
    scales = [torch.rand(count, 2, device=DEVICE) for count in blocks]
    firsts = [
        torch.tensor(10**7 * number, dtype=torch.int32, device=DEVICE)
        for number in range(len(shapes))
    ]
    return Columns(weights, gradients, low_bits, means, squares, scales, firsts)


# More tensors than a call takes; one element, a block, one more, several.
MANY = [*SHAPES, *[(3, 5)] * 15, (1,), (1024,), (1025,), (4097,)]
SCALARS = {
    "step": torch.tensor(3.0, device=DEVICE),
    "factor": torch.tensor(0.7, device=DEVICE),
    "rate": torch.tensor(1e-2, device=DEVICE),
    "growth": torch.tensor(1.5, device=DEVICE),
    "shrink": None,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
}


def update_by_kernel(columns: Columns, skip=None, **others) -> None:
    module.update_by_kernel(*columns, **SCALARS | others, skip=skip)


def update_by_plain(columns: Columns, skip=None, **others) -> None:
    for tensors in zip(*columns, strict=True):
        update(*tensors, **SCALARS | others, skip=skip)


# None where the loss has no scale.
SKIPS = [None, 0.0, 1.0]


@pytest.mark.triton
@pytest.mark.parametrize(("skip", "shrink"), [(None, None), (0.0, 0.9), (1.0, 0.9)])
@pytest.mark.parametrize(("moments", "dtype", "masters"), FORMS, ids=str)
def test_the_kernel_is_the_plain_update(moments, dtype, masters, skip, shrink):
    """The bits that are drawn at random are the same.

    What is rounded by them is therefore at most one number away, and in few places.
    """
    if skip is not None:
        skip = torch.tensor(skip, device=DEVICE)
    if shrink is not None:
        shrink = torch.tensor(shrink, device=DEVICE)
    columns = drawn_columns(moments, dtype, MANY, masters)
    expected = drawn_columns(moments, dtype, MANY, masters)
    update_by_kernel(columns, skip, shrink=shrink)
    update_by_plain(expected, skip, shrink=shrink)
    if masters:
        torch.testing.assert_close(columns.masters(), expected.masters(), rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(columns.weights, expected.weights, rtol=2**-7, atol=1e-6)
        pairs = zip(columns.weights, expected.weights, strict=True)
        assert sum((ours != plain).sum() for ours, plain in pairs) < 10
    ours = columns.moments()
    plain = expected.moments()
    if moments == torch.float32:
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
        return
    assert (ours != plain).float().mean() < 0.02
    if moments == torch.bfloat16:
        torch.testing.assert_close(ours, plain, rtol=2**-7, atol=1e-7)
    else:
        assert (ours.int() - plain.int()).abs().max() <= 1
        scales = torch.cat(columns.scales)
        torch.testing.assert_close(scales, torch.cat(expected.scales), rtol=1e-6, atol=0)


@pytest.mark.triton
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(("moments", "dtype", "masters"), FORMS, ids=str)
def test_the_kernel_changes_weights_unless_the_step_is_skipped(moments, dtype, masters, skip):
    if skip is not None:
        skip = torch.tensor(skip, device=DEVICE)
    columns = drawn_columns(moments, dtype, MANY, masters)
    before = [weight.clone() for weight in columns.weights]
    update_by_kernel(columns, skip)
    assert all(map(torch.equal, columns.weights, before)) == bool(skip)


def masters_on_borders(upper_half: torch.Tensor, lower_half: list[int]) -> torch.Tensor:
    """All fp32 numbers whose upper and lower 16 bits are among these."""
    bits = (upper_half[:, None] << 16) + torch.tensor(lower_half)
    return bits.to(torch.int32).view(torch.float32).flatten()


@pytest.mark.triton
@pytest.mark.parametrize("run", [update_by_kernel, update_by_plain])
def test_an_update_rounds_ties_and_carries_and_leaves_what_is_not_a_number(run):
    """For gradients that are 0, a master stays as it is. The first element's gradient is NaN."""
    # Triton's interpreter casts bf16's subnormal numbers wrongly.
    masters = masters_on_borders(
        torch.arange(0x0080, 0x7F00), [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    )
    masters = torch.cat([masters, -masters, torch.tensor([torch.inf])]).to(DEVICE)
    weight, low_bits = halves(masters, torch.bfloat16)
    zeros = torch.zeros_like(masters)
    columns = Columns(
        weights=[weight.bfloat16()],
        gradients=[zeros.bfloat16()],
        low_bits=[low_bits.to(torch.int16)],
        means=[zeros.clone()],
        squares=[zeros.clone()],
        scales=[zeros[:0]],
        firsts=[torch.tensor(0, dtype=torch.int32, device=DEVICE)],
    )
    columns.gradients[0][0] = torch.nan
    run(columns)
    assert columns.weights[0][0].isnan()
    assert columns.means[0][0].isnan()
    assert torch.equal(columns.weights[0][1:], weight[1:].bfloat16())
    assert torch.equal(columns.low_bits[0][1:], low_bits[1:].to(torch.int16))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)],
    ids=str,
)
def test_what_is_compiled_ahead_is_what_is_launched(dtype, masters, monkeypatch):
    launched = []

    def like(argument):
        if isinstance(argument, tuple):
            return tuple(map(like, argument))
        return getattr(argument, "dtype", argument)

    def note(kernel, grid, **arguments):
        likes = {name: like(argument) for name, argument in arguments.items()}
        launched.append((kernel, grid, likes))

    monkeypatch.setattr(module, "launch", note)
    columns = drawn_columns(torch.bfloat16, dtype, MANY, masters)
    parameters = [torch.nn.Parameter(weight) for weight in columns.weights]
    options = {"moments": torch.bfloat16, "masters": masters}
    optimizer = MasterAdamW(parameters, 1e-3, max_norm=1.0, **options)
    optimizer._compile_kernels()
    compiled_ahead = launched[-4:]
    launched.clear()
    module.gradient_norm_by_kernel(columns.gradients)
    skip = SCALARS["step"] if dtype == torch.float16 else None
    update_by_kernel(columns, skip, shrink=SCALARS["step"])
    assert len(launched) == 4
    assert launched == compiled_ahead


@pytest.mark.triton
def test_the_kernels_norm_is_that_of_all_elements():
    tensors = drawn_columns(torch.float32, torch.bfloat16, MANY).gradients
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert module.gradient_norm_by_kernel(tensors).item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_a_call_has_at_most_16_tensors_and_those_of_odd_sizes_come_last():
    sizes = [3, 160, 16, 32, 5, *[48] * 14, 1]
    tensors = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    others = [-tensor for tensor in tensors]
    calls = list(module.in_calls(tensors, others))
    assert [len(sizes_of_call) for _, sizes_of_call in calls] == [16, 4]
    in_order = [160, *[48] * 14, 32, 16, 5, 3, 1]
    assert [size for _, sizes_of_call in calls for size in sizes_of_call] == in_order
    taken = [pair for (ours, theirs), _ in calls for pair in zip(ours, theirs, strict=True)]
    assert sorted(int(ours[0]) for ours, _ in taken) == list(range(len(sizes)))
    assert all(torch.equal(ours, -theirs) for ours, theirs in taken)


@pytest.fixture
def launches(monkeypatch):
    """What kernels would be launched with; each puts 2 into its sums."""
    launches = []

    def launch(kernel, grid, **arguments):
        launches.append((grid, arguments))
        if "sums" in arguments:
            arguments["sums"].fill_(2.0)

    monkeypatch.setattr(module, "launch", launch)
    return launches


def test_a_norm_by_kernels_is_of_the_sums_of_all_programs(launches):
    sizes = [8192, 8193, *[1] * 16]
    norm = module.gradient_norm_by_kernel([torch.ones(size) for size in sizes])
    assert [grid for grid, _ in launches] == [(17,), (2,)]
    assert norm.item() == pytest.approx((2.0 * 19) ** 0.5)


@pytest.mark.parametrize("skip", [None, torch.tensor(0.0)])
def test_a_kernel_updates_a_program_for_each_block_and_may_skip_where_the_loss_has_a_scale(
    skip, launches
):
    columns = drawn_columns(torch.float32, torch.bfloat16, [(1024,), (1025,)])
    update_by_kernel(columns, skip)
    ((grid, arguments),) = launches
    assert grid == (3,)
    assert arguments["SKIPS"] is (skip is not None)
    assert arguments["skip"] is (SCALARS["step"] if skip is None else skip)
    assert arguments["sizes"] == (1024, 1025)
    assert torch.equal(arguments["lows"][1], columns.low_bits[1])
    assert (arguments["BETA1"], arguments["BETA2"]) == (0.9, 0.999)


# The scale of the loss, and captured steps.


def scaled_step(optimizer, scaler, grads):
    """Do a step on gradients that were scaled."""
    for parameter, grad in zip(optimizer.state, grads, strict=True):
        parameter.grad = grad
    unscale(optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()


def after_steps(grads, captures):
    """Parameters, masters and step count after a step on each of these gradients.

    The fifth of them overflow where the loss has a scale, as in fp16. The step is captured in the
    fourth, or never.
    """
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(grad.shape, device=DEVICE).to(grad.dtype))
        for grad in grads[0]
    ]
    optimizer = optimizer_of(parameters, moments=torch.bfloat16)
    in_fp16 = parameters[0].dtype == torch.float16
    scaler = torch.amp.GradScaler("cuda", enabled=in_fp16, init_scale=64.0)
    scaler.scale(torch.ones((), device=DEVICE))  # makes the scale's tensor
    inputs = [torch.empty_like(p) for p in parameters]
    graph = torch.cuda.CUDAGraph()

    def step():
        scaled_step(optimizer, scaler, [tensor * 1 for tensor in inputs])

    for number, given in enumerate(grads):
        torch._foreach_copy_(inputs, given)
        if number == 4 and scaler.is_enabled():
            inputs[0].fill_(torch.inf)
        optimizer.param_groups[0]["lr"].fill_(1e-2 / (number + 1))
        if captures and number == 3:
            with torch.cuda.graph(graph):
                step()
        if captures and number >= 3:
            graph.replay()
        else:
            step()
    return [*parameters, *masters_of(optimizer), optimizer.state[parameters[0]]["step"]]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
@pytest.mark.parametrize(("dtype", "steps"), [(torch.bfloat16, 6), (torch.float16, 5)], ids=str)
def test_a_captured_step_is_a_step(dtype, steps):
    """With gradients, rate, scale and overflow of the time of each replay."""
    grads = [[torch.randn(shape, device=DEVICE).to(dtype) for shape in SHAPES] for _ in range(6)]
    captured = after_steps(grads, captures=True)
    torch.testing.assert_close(captured, after_steps(grads, captures=False), rtol=0, atol=0)
    assert captured[-1] == steps


MAX_NORM = 0.005


class ScaledTraining:
    """Three steps of an optimizer on fp16 gradients whose loss has a scale of 1,024."""

    def __init__(self, overflows: bool):
        torch.manual_seed(0)
        self.start = torch.randn(50).half()
        self.grads = [torch.randn(50) * 1e-3 for _ in range(3)]
        self.parameter = torch.nn.Parameter(self.start.clone())
        self.optimizer = optimizer_of([self.parameter], max_norm=MAX_NORM)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, grad in enumerate(self.grads):
            if overflows and number == 1:
                self.step(grad, loss=torch.inf)
            self.step(grad, loss=1.0)

    def step(self, grad, loss) -> None:
        scaled = (grad * self.scaler.scale(torch.tensor(loss))).half()
        scaled_step(self.optimizer, self.scaler, [scaled])

    @property
    def master(self) -> torch.Tensor:
        (master,) = masters_of(self.optimizer)
        return master


def test_the_scale_of_the_loss_is_taken_off_as_gradscaler_does_it_to_fp32_gradients():
    training = ScaledTraining(overflows=False)
    other = torch.nn.Parameter(training.start.float())
    theirs = torch.optim.AdamW([other], lr=1e-2, weight_decay=0.0)
    for grad in training.grads:
        other.grad = (grad * 1024).half().float() / 1024
        torch.nn.utils.clip_grad_norm_([other], MAX_NORM)
        theirs.step()
    torch.testing.assert_close(training.master, other.detach(), rtol=0, atol=1e-5)
    assert training.scaler.get_scale() == 1024.0


def test_an_overflow_changes_nothing_but_the_scale():
    undisturbed = ScaledTraining(overflows=False)
    training = ScaledTraining(overflows=True)
    torch.testing.assert_close(training.master, undisturbed.master, rtol=0, atol=2e-5)
    assert training.optimizer.state[training.parameter]["step"] == 3
    assert training.scaler.get_scale() == 512.0


@pytest.mark.parametrize("overflows", [False, True])
def test_the_scale_is_forgotten_after_each_step(overflows):
    assert not hasattr(ScaledTraining(overflows).optimizer, "grad_scale")


# Masters and their halves.

ON_BORDERS = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]


@pytest.fixture
def all_masters():
    """All upper halves of fp32, with lower halves on both sides of every border.

    They have both signs, carries into the exponent, subnormal numbers, zeros and infinities.
    """
    masters = masters_on_borders(torch.arange(-(2**15), 2**15), ON_BORDERS)
    return masters[~masters.isnan()]


def test_weight_and_low_bits_are_the_master_for_every_weight(all_masters):
    weight, low_bits = halves(all_masters, torch.bfloat16)
    assert torch.equal(weight.bfloat16().float(), weight)
    assert low_bits.abs().max() == 2**15
    again = master_of(weight.bfloat16(), low_bits.to(torch.int16))
    assert torch.equal(again.view(torch.int32), all_masters.view(torch.int32))


def test_a_weight_is_the_nearest_to_its_master_and_of_two_the_larger(all_masters):
    nearest = upper(all_masters, 0x8000)
    is_tie = all_masters.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(nearest[~is_tie], all_masters[~is_tie].bfloat16().float())
    assert (nearest[is_tie].abs() > all_masters[is_tie].abs()).all()


def test_fp16_and_its_low_bits_have_22_bits_of_the_master():
    masters = torch.randn(100_000) * 10.0 ** torch.randint(-6, 3, (100_000,))
    weight, low_bits = halves(masters, torch.float16)
    again = master_of(weight.half(), low_bits.half())
    torch.testing.assert_close(again, masters, rtol=2**-22, atol=2**-36)


@pytest.mark.parametrize("addend", [0x8000, 0xFFFF])
def test_what_is_not_a_number_stays_none(addend):
    """GPUs make the one with all bits set, to which no rounding may be added."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    assert upper(bits.view(torch.float32), addend).isnan().all()


# Stochastic rounding.


def drawn(value, step=1, first=0):
    """16 random bits for either moment of a tensor, and for the weights."""
    bits = random_bits(value, torch.tensor(first, dtype=torch.int32), torch.tensor(float(step)))
    return bits & 0xFFFF, bits >> 16 & 0xFFFF, weight_noise(bits)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("below", [1.0, 2 - 2**-7])
def test_rounding_at_random_is_right_on_average(below, share, sign):
    """bf16's numbers from 1 on are 1/128 apart; a carry into the exponent just below 2."""
    value = torch.full((10_000,), sign * (below + share / 128))
    deviation = (share * (1 - share) / len(value)) ** 0.5
    for addend in drawn(value):
        is_up = (upper(value, addend).abs() - below) * 128
        assert set(is_up.tolist()) <= {0.0, 1.0}
        assert is_up.mean().item() == pytest.approx(share, abs=5 * deviation + 1e-3)


def test_steps_moments_and_parameters_have_random_bits_of_their_own():
    value = torch.empty(10_000)
    bits = []
    for step, first in ((1, 0), (2, 0), (3, 0), (1, 10_000)):
        bits += drawn(value, step, first)
    correlations = torch.corrcoef(torch.stack(bits).float())
    assert (correlations - torch.eye(len(bits))).abs().max() < 5 / len(value) ** 0.5


def test_random_bits_are_a_function_of_step_and_element():
    value = torch.empty(10_000)
    assert all(map(torch.equal, drawn(value), drawn(value)))


def test_no_two_elements_of_an_optimizer_have_the_same_number():
    parameters = [torch.nn.Parameter(torch.ones(size).bfloat16()) for size in (10, 5, 3)]
    states = optimizer_of(parameters).state.values()
    assert [state["first"].item() for state in states] == [0, 10, 15]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    states = MasterAdamW(groups).state.values()
    assert [state["first"].item() for state in states] == [0, 10, 15]


def test_a_second_moment_in_bf16_falls_when_gradients_vanish():
    """It does so on average; rounded to nearest it would keep the value that it had."""
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = optimizer_of([parameter], 1e-5, max_norm=torch.inf, moments=torch.bfloat16)
    square = optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    assert (square.float() * 0.999).bfloat16().eq(square).all()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(300):
        optimizer.step()
    assert square.float().mean().item() == pytest.approx(0.999**300, rel=0.01)


# Moments in 8 bits.

LARGEST = 3.7  # of the values that are coded
TIMES = 4000  # that each value is coded
# The first and the second moment: how they are coded, and in how many octaves.
CODES = pytest.mark.parametrize(
    ("encode", "decode", "octaves"),
    [
        (eight_bit.encode_mean, eight_bit.decode_mean, 16),
        (eight_bit.encode_square, eight_bit.decode_square, 32),
    ],
    ids=["mean", "square"],
)


@pytest.fixture
def values(octaves):
    """Numbers from LARGEST on, over more octaves than codes have [TIMES, BLOCK]."""
    exponents = torch.linspace(0, octaves + 6, eight_bit.BLOCK)
    return LARGEST * 2.0 ** -exponents.expand(TIMES, -1)


@pytest.fixture
def bits():
    torch.manual_seed(0)
    return torch.randint(-(2**31), 2**31, (TIMES, eight_bit.BLOCK), dtype=torch.int32)


@CODES
def test_codes_of_8_bits_reach_to_the_largest_value(encode, decode, octaves, values, bits):
    codes, scale = encode(values, bits)
    assert codes.min() == (0 if octaves == 16 else 1), "no second moment becomes zero"
    assert codes.max() == 8 * octaves - 1
    assert (decode(codes, scale).max() / LARGEST - 1).abs() < 2e-6


@CODES
def test_codes_of_8_bits_are_right_on_average(encode, decode, octaves, values, bits):
    """They are where neither is the least one; from there on their steps are equal."""
    decoded = decode(*encode(values, bits))
    least = LARGEST * 2.0**-octaves * 17 / 16
    step = (values[0] + least) / 8
    error = (decoded - values).abs()
    of_mean = (decoded.mean(0) - values[0]).abs()
    is_coded = values[0] > (0 if octaves == 16 else 2 * least / 8)
    assert (error <= 1.01 * step)[:, is_coded].all()
    assert (of_mean < 5 * step / 2 / TIMES**0.5)[is_coded].all()


def test_a_code_of_a_first_moment_has_its_sign(bits):
    values = torch.randn(TIMES, eight_bit.BLOCK).abs()
    codes, scale = eight_bit.encode_mean(values, bits)
    negative, _ = eight_bit.encode_mean(-values, bits)
    assert torch.equal(negative, codes + 128)
    decoded = eight_bit.decode_mean(codes, scale)
    assert torch.equal(eight_bit.decode_mean(negative, scale), -decoded)


@CODES
def test_a_codes_value_has_that_code_again(encode, decode, octaves, values, bits):
    """The scale is rounded, so that one in some ten thousand becomes its neighbour."""
    codes, scale = encode(values, bits)
    again, _ = encode(decode(codes, scale), bits)
    assert (again - codes).abs().max() <= 1
    assert (again != codes).float().mean() < 1e-4


@CODES
def test_rounding_up_carries_out_of_no_code(encode, decode, octaves):
    largest = torch.rand(TIMES, 1) * 10.0 ** torch.randint(-20, 5, (TIMES, 1))
    ones = torch.tensor(-1, dtype=torch.int32)
    codes, _ = encode(largest.expand(-1, eight_bit.BLOCK), ones)
    assert (codes == 8 * octaves - 1).all()


@CODES
def test_a_block_of_zeros_is_zero(encode, decode, octaves, bits):
    codes, scale = encode(torch.zeros(TIMES, eight_bit.BLOCK), bits)
    assert (decode(codes, scale) == 0).all()


def test_both_moments_of_an_element_are_rounded_independently(bits):
    values = LARGEST * 2.0 ** -torch.linspace(0, 12, eight_bit.BLOCK).expand(TIMES, -1)
    means, _ = eight_bit.encode_mean(values, bits)
    squares, _ = eight_bit.encode_square(values, bits)
    ups = [codes - codes.float().mean(0) for codes in (means, squares)]
    correlation = torch.corrcoef(torch.stack([up.flatten() for up in ups]))[0, 1]
    assert correlation.abs() < 5 / values.numel() ** 0.5


def test_a_second_moment_of_8_bits_falls_when_gradients_vanish():
    """It does so on average, as in bf16, beside an element that keeps the block's scale."""
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = optimizer_of([parameter], 1e-5, max_norm=torch.inf, moments=torch.uint8)
    parameter.grad = torch.tensor([2.0] + [1.0] * 999).bfloat16()
    optimizer.step()
    state = optimizer.state[parameter]
    first = read_moments(state["exp_avg"], state["exp_avg_sq"], state["scales"])[1][1:].mean()
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[0] = 2.0
    for _ in range(300):
        optimizer.step()
    last = read_moments(state["exp_avg"], state["exp_avg_sq"], state["scales"])[1][1:].mean()
    assert (last / first).item() == pytest.approx(0.999**300, rel=0.01)


def test_a_second_moment_of_8_bits_is_never_rounded_to_zero():
    parameter = torch.nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))
    optimizer = optimizer_of([parameter], 1e-3, max_norm=torch.inf, moments=torch.uint8)
    parameter.grad = torch.tensor([1.0, 0.0] + [1e-7] * 1998).bfloat16()
    for _ in range(20):
        optimizer.step()
    squares = optimizer.state[parameter]["exp_avg_sq"]
    assert squares[0] == 255
    assert (squares[1:] > 0).all()
    assert parameter[1] == 0
    assert parameter.abs().max() <= 0.021, "no element moves by more than the rate in a step"


@pytest.mark.triton
@pytest.mark.parametrize("masters", [True, False])
def test_the_kernel_writes_the_new_weights_to_every_copy(masters):
    columns = drawn_columns(torch.bfloat16, torch.bfloat16, [5000], masters)
    (weight,) = columns.weights
    copies = [torch.zeros_like(weight) for _ in range(3)]
    before = weight.clone()
    module.update_by_kernel(*columns, **SCALARS, skip=None, copies=copies)
    assert not torch.equal(weight, before)
    assert all(torch.equal(copy, weight) for copy in copies)


@pytest.mark.parametrize("weight", [0.0, -0.0, 1.0])
def test_weights_that_were_loaded_over_older_ones_stay_numbers(weight):
    """Low bits are then of other weights: next to zero they would be the bits of NaN."""
    parameter = torch.nn.Parameter(torch.randn(64, device=DEVICE).bfloat16())
    optimizer = MasterAdamW([parameter], lr=1e-3)
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        with torch.no_grad():
            parameter.fill_(weight)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(parameter.float(), torch.tensor(weight, device=DEVICE), atol=0.02)


@pytest.mark.triton
def test_the_kernel_makes_no_nan_of_low_bits_next_to_zero():
    columns = drawn_columns(torch.float32, torch.bfloat16, [(64,)])
    columns.weights[0].zero_()
    columns[2][0].fill_(-5)
    module.update_by_kernel(*columns, **SCALARS, skip=None)
    assert columns.weights[0].isfinite().all()
