from functools import partial

import pytest
import torch

from qa_lib.kernels import eight_bit
from qa_lib.train import master_adamw as module
from qa_lib.train.master_adamw import MasterAdamW, halves, master_of, random_bits, update, upper
from qa_lib.train.optim import unscale
from tests.kernels import DEVICE

SHAPES = [(33, 17), (128,), (128,), (4, 5, 6)]


def masters_of(optimizer: MasterAdamW) -> list[torch.Tensor]:
    return [master_of(parameter, state["low_bits"]) for parameter, state in optimizer.state.items()]


def update_all(*lists_and_values):
    """As `_update_by_kernel`, by the plain update."""
    columns, values = lists_and_values[:7], lists_and_values[7:]
    for tensors in zip(*columns, strict=True):
        update(*tensors, *values)


# The type of both moments and of the weights.
BF16, FP16, FP32, CODES = torch.bfloat16, torch.float16, torch.float32, torch.uint8
TYPES = [(FP32, BF16, 1e-6), (FP32, FP16, 1e-5), (BF16, BF16, 4e-3), (CODES, BF16, 0.1)]


@pytest.mark.parametrize(("moments", "dtype", "tolerance"), TYPES)
def test_it_is_adamw_with_clipping(moments, dtype, tolerance):
    """In each of 20 steps of a hundredth, a moment in bf16 is wrong by 1/256 at most, and in 8 bits by 1/8. The norm of
    the gradients falls from 28 to 1.4, so that a limit of 3 clips the first half of the steps."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in SHAPES]
    copies = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    ours = MasterAdamW(
        parameters, lr=torch.tensor(1e-2, device=DEVICE), max_norm=3.0, moments=moments
    )
    theirs = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.0)
    for step in range(20):
        torch.manual_seed(step)
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn(parameter.shape).to(DEVICE, dtype) / (step + 1)
            copy.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(copies, 3.0)
        ours.step()
        theirs.step()
    masters = masters_of(ours)
    torch.testing.assert_close(
        masters, [copy.detach() for copy in copies], rtol=1e-5, atol=tolerance
    )
    assert all(map(torch.equal, parameters, (one.to(dtype) for one in masters))), (
        "no tie among these"
    )


def drawn_state(moments, dtype, shapes):
    """Tensors as `update` takes them, in the middle of a training."""
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    grads = [torch.randn_like(weight) for weight in weights]
    kind = module.LOW_TYPES[dtype]
    rests = [
        (torch.rand(w.shape, device=DEVICE) * (20_000 if kind == torch.int16 else 0.5)).to(kind)
        for w in weights
    ]
    kinds = (torch.randn, torch.rand) if moments != CODES else (partial(torch.randint, 256),) * 2
    means, squares = ([draw(w.shape, device=DEVICE).to(moments) for w in weights] for draw in kinds)
    blocks = [-(-w.numel() // 1024) if moments == CODES else 0 for w in weights]
    scales = [torch.rand(count, 2, device=DEVICE) for count in blocks]
    firsts = [
        torch.tensor(10**7 * number, dtype=torch.int32, device=DEVICE)
        for number in range(len(shapes))
    ]
    return weights, grads, rests, means, squares, scales, firsts


# More tensors than a call takes; one element, a block, one more, several.
MANY = [*SHAPES, *[(3, 5)] * 15, (1,), (1024,), (1025,), (4097,)]
SCALARS = [torch.tensor(value, device=DEVICE) for value in (3.0, 0.7, 1e-2, 1.5)]  # of a step


@pytest.mark.triton
@pytest.mark.parametrize("skips", [None, False, True])
@pytest.mark.parametrize(("moments", "dtype"), [each[:2] for each in TYPES], ids=str)
def test_the_kernel_is_the_plain_update(moments, dtype, skips):
    """Masters and moments of one step. The bits that are drawn at random are the same, so that a moment in bf16 is at
    most one number away, and in few places."""
    skip = None if skips is None else torch.tensor(float(skips), device=DEVICE)
    before, found, wanted = (drawn_state(moments, dtype, MANY) for _ in range(3))
    for run, columns in ((module._update_by_kernel, found), (update_all, wanted)):
        run(*columns, *SCALARS, 0.9, 0.999, 1e-8, skip)
    one, other = (list(map(master_of, state[0], state[2])) for state in (found, wanted))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    ours, plain = (
        torch.cat([t.flatten() for t in state[3] + state[4]]) for state in (found, wanted)
    )
    if (
        moments == CODES
    ):  # one code away, in few places, and scales that are equal but for their last bit
        assert (ours.int() - plain.int()).abs().max() <= 1
        torch.testing.assert_close(torch.cat(found[5]), torch.cat(wanted[5]), rtol=1e-6, atol=0)
    else:
        torch.testing.assert_close(
            ours, plain, rtol=1e-6 if moments == torch.float32 else 2**-7, atol=1e-7
        )
    assert moments == torch.float32 or (ours != plain).float().mean() < 0.02
    assert all(map(torch.equal, found[0], before[0])) == bool(skips)


@pytest.mark.triton
def test_the_kernel_rounds_as_the_plain_update_does():
    """Ties and carries, for gradients that are 0; and what is not a number stays none."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    upper_half = torch.arange(
        0x0080, 0x7F00
    )  # of bf16 the interpreter casts subnormal numbers wrongly
    master = ((upper_half[:, None] << 16) + lower).to(torch.int32).view(torch.float32).flatten()
    master = torch.cat([master, -master, torch.tensor([torch.inf])])
    nearest = upper(master, 0x8000)
    rest = (master.view(torch.int32) - nearest.view(torch.int32)).to(torch.int16)
    zeros = torch.zeros_like(master)
    found = []
    for run in (module._update_by_kernel, update_all):
        state = [
            t.clone().to(DEVICE) for t in (nearest.bfloat16(), zeros.bfloat16(), rest, zeros, zeros)
        ]
        state[1][0] = torch.nan
        state += [zeros[:0].to(DEVICE), torch.tensor(0, dtype=torch.int32, device=DEVICE)]
        run(*[[t] for t in state], *SCALARS, 0.9, 0.999, 1e-8, None)
        assert state[0][0].isnan() and state[3][0].isnan()
        found.append([state[0][1:], state[2][1:]])
    assert all(map(torch.equal, *found))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_compiled_ahead_is_what_is_started(dtype, monkeypatch):
    started = []

    def note(kernel, grid, **arguments):
        def like(argument):
            return (
                tuple(map(like, argument))
                if isinstance(argument, tuple)
                else getattr(argument, "dtype", argument)
            )

        likes = {name: like(argument) for name, argument in arguments.items()}
        started.append((kernel, grid, likes))

    monkeypatch.setattr(module, "launch", note)
    columns = drawn_state(torch.bfloat16, dtype, MANY)
    parameters = [torch.nn.Parameter(weight) for weight in columns[0]]
    MasterAdamW(
        parameters, torch.tensor(1e-3, device=DEVICE), 1.0, torch.bfloat16
    )._compile_kernels(parameters)
    ahead = started[-4:]
    started.clear()
    module._norm_by_kernel(list(columns[1]))
    module._update_by_kernel(
        *columns, *SCALARS, 0.9, 0.999, 1e-8, SCALARS[0] if dtype == torch.float16 else None
    )
    assert ahead == started and len(started) == 4


@pytest.mark.triton
def test_the_kernels_norm_is_that_of_all_elements():
    tensors = drawn_state(torch.float32, torch.bfloat16, MANY)[1]
    wanted = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert module._norm_by_kernel(tensors).item() == pytest.approx(wanted.item(), rel=1e-6)


def scaled_step(optimizer, scaler, grads):
    """A step on gradients that were scaled."""
    for parameter, grad in zip(optimizer.state, grads, strict=True):
        parameter.grad = grad
    unscale(optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()


def after_steps(grads, captures):
    """Parameters, masters and step count after a step on each of these gradients, the fifth of which overflows where
    the loss has a scale, as in fp16; captured in the fourth, or never."""
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(grad.shape, device=DEVICE).to(grad.dtype))
        for grad in grads[0]
    ]
    optimizer = MasterAdamW(
        parameters, lr=torch.tensor(1e-2, device=DEVICE), max_norm=3.0, moments=torch.bfloat16
    )
    scaler = torch.amp.GradScaler(
        "cuda", enabled=grads[0][0].dtype == torch.float16, init_scale=64.0
    )
    scaler.scale(torch.ones((), device=DEVICE))  # makes the scale's tensor
    inputs, graph = [torch.empty_like(p) for p in parameters], torch.cuda.CUDAGraph()

    def step():
        scaled_step(optimizer, scaler, [one * 1 for one in inputs])

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
    found = after_steps(grads, captures=True)
    torch.testing.assert_close(found, after_steps(grads, captures=False), rtol=0, atol=0)
    assert found[-1] == steps


def test_weight_and_rest_are_the_master_for_every_weight():
    """All upper halves of fp32, with lower halves on both sides of every border: of both signs, carries into the
    exponent, subnormal numbers, zeros and infinities."""
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    master = (
        ((torch.arange(-(2**15), 2**15)[:, None] << 16) + lower).to(torch.int32).view(torch.float32)
    )
    master = master[~master.isnan()]
    nearest = upper(master, 0x8000)
    weight, distance = nearest.bfloat16(), master.view(torch.int32) - nearest.view(torch.int32)
    assert torch.equal(weight.float(), nearest) and distance.abs().max() == 2**15
    assert torch.equal(
        master_of(weight, distance.to(torch.int16)).view(torch.int32), master.view(torch.int32)
    )
    # Where two weights are equally near, it is the larger one.
    tie = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~tie], master.bfloat16()[~tie])
    assert (nearest[tie].abs() > master[tie].abs()).all()


def test_fp16_and_its_rest_have_22_bits_of_the_master():
    master = torch.randn(100_000) * 10.0 ** torch.randint(-6, 3, (100_000,))
    again = master_of(*(half.half() for half in halves(master, torch.float16)))
    torch.testing.assert_close(again, master, rtol=2**-22, atol=2**-36)


def test_the_scale_of_the_loss_is_taken_off_and_an_overflow_changes_nothing():
    """As GradScaler does it to fp32 gradients; and its scale falls."""
    torch.manual_seed(0)
    start, grads = torch.randn(50).half(), [torch.randn(50) * 1e-3 for _ in range(3)]
    found = []
    for overflows in (False, True):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = MasterAdamW([parameter], lr=torch.tensor(1e-2), max_norm=0.005)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, grad in enumerate(grads):
            for times in ([torch.inf] if overflows and number == 1 else []) + [1.0]:
                scaled_step(optimizer, scaler, [(grad * scaler.scale(torch.tensor(times))).half()])
                assert optimizer.grad_scale is None
        assert scaler.get_scale() == (512.0 if overflows else 1024.0)
        assert optimizer.state[parameter]["step"] == 3
        found.append(masters_of(optimizer)[0])
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)
    copy = torch.nn.Parameter(start.float())
    theirs = torch.optim.AdamW([copy], lr=1e-2, weight_decay=0.0)
    for grad in grads:
        copy.grad = (grad * 1024).half().float() / 1024
        torch.nn.utils.clip_grad_norm_([copy], 0.005)
        theirs.step()
    torch.testing.assert_close(found[0], copy.detach(), rtol=0, atol=1e-5)


def test_what_is_not_a_number_stays_none():
    """GPUs make the one with all bits set, to which no rounding may be added."""
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(
        torch.float32
    )
    for addend in (0x8000, 0xFFFF):
        assert upper(nans, addend).isnan().all()


def drawn(value, step=1, first=0):
    """Both halves of the random bits for a tensor."""
    found = random_bits(value, torch.tensor(first, dtype=torch.int32), torch.tensor(float(step)))
    return found & 0xFFFF, found >> 16 & 0xFFFF


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_rounding_at_random_is_right_on_average(sign, share):
    """bf16's numbers from 1 on are 1/128 apart; a carry into the exponent just below 2."""
    for below in (1.0, 2 - 2**-7):
        value = torch.full((10_000,), sign * (below + share / 128))
        for addend in drawn(value):
            found = (upper(value, addend).abs() - below) * 128
            assert set(found.tolist()) <= {0.0, 1.0}
            assert found.mean().item() == pytest.approx(
                share, abs=5 * (share * (1 - share) / len(value)) ** 0.5 + 1e-3
            )


def test_steps_moments_and_parameters_have_random_bits_of_their_own():
    value = torch.empty(10_000)
    found = torch.stack(
        [half for own in ((1, 0), (2, 0), (3, 0), (1, 10_000)) for half in drawn(value, *own)]
    ).float()
    related = torch.corrcoef(found) - torch.eye(len(found))
    assert related.abs().max() < 5 / len(value) ** 0.5
    assert torch.equal(drawn(value)[0], found[0].int()), "a function of step and element"


def test_a_second_moment_in_bf16_falls_when_gradients_vanish():
    """As in fp32, on average; rounded to nearest it would keep the value that it had."""
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = MasterAdamW(
        [parameter], lr=torch.tensor(1e-5), max_norm=torch.inf, moments=torch.bfloat16
    )
    square = optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    assert (square.float() * 0.999).bfloat16().eq(square).all()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(300):
        optimizer.step()
    assert square.float().mean().item() == pytest.approx(0.999**300, rel=0.01)


@pytest.mark.parametrize("cut", [eight_bit.MEAN_CUT, eight_bit.ROOT_CUT])
def test_codes_of_8_bits_are_right_on_average_over_sixteen_octaves(cut):
    """And a code's value has that code again, whatever the bits are."""
    x = 3.7 * 2.0 ** -torch.linspace(0, 22, eight_bit.BLOCK).expand(4000, -1)
    bits = torch.randint(2**16, x.shape, dtype=torch.int32)
    codes, scale = eight_bit.encode(x, bits, cut)
    value = eight_bit.decode(codes, scale, cut)
    assert (
        codes.min() == 0
        and codes.max() == 2 ** (27 - cut) - 1
        and (value.max() / 3.7 - 1).abs() < 1e-6
    )
    wanted = x[0] > 3.7 * 2.0**-15
    apart = 2.0 ** (cut - 23)  # of neighbours, as a share of them
    assert ((value - x).abs() < 1.01 * apart * x)[:, wanted].all()
    error = 5 * apart / len(x) ** 0.5
    torch.testing.assert_close(value.mean(0)[wanted], x[0, wanted], rtol=error, atol=0)
    assert (value.mean(0)[~wanted] - x[0, ~wanted]).abs().max() < 3.7 * 2.0**-15 * 5 / len(x) ** 0.5
    again, _ = eight_bit.encode(value, bits, cut)
    assert torch.equal(again, codes)


def test_a_root_of_8_bits_is_never_rounded_to_zero():
    parameter = torch.nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))
    optimizer = MasterAdamW(
        [parameter], lr=torch.tensor(1e-3), max_norm=torch.inf, moments=torch.uint8
    )
    parameter.grad = torch.tensor([1.0, 0.0] + [1e-7] * 1998).bfloat16()
    for _ in range(20):
        optimizer.step()
    roots = optimizer.state[parameter]["exp_avg_sq"]
    assert roots[0] == 255 and roots[1] == 0 and (roots[2:] > 0).all()
    assert parameter.abs().max() <= 0.021, "no element moves by more than the rate in a step"
