"""AdamW for weights in half precision: masters and moments beside them, updated in one pass.

Variants E-masters and E-dropout-moments have it.

Mixed precision usually keeps the weights in fp32 and casts each of them to half precision in every
forward pass. Here the model itself is in bf16, or in fp16 where a GPU has no other (variants
E-t4-masters, E-t4-norm): no casts, and weights, gradients and activations of half the bytes. The
update would suffer from that. bf16 has 8 bits of mantissa, so a step smaller than 1/256 of a
weight, which most are in fine-tuning, rounds to nothing. There is therefore an fp32 number behind
each weight, its master (Micikevicius et al. 2018): the step is added to the master, and the weight
is the master's rounding.

**Half of the master is in the weight already.** bf16 is the upper half of fp32, so that 16 bits
beside the weight are enough. They are kept as a whole number, the *low bits*: how many of its own
last places the master lies above or below the weight, from -32,768 to 32,767. The bits of the
weight plus the low bits are those of the master, exactly. A master half-way between two weights,
one in 65,536, is rounded away from zero. A cast would take the even one of the two, which would
then stand for 65,537 masters, one more than 16 bits can tell apart.

**fp16 is not the upper half of fp32**: it has 3 more bits of mantissa and 3 fewer of exponent. Its
low bits are what the weight's rounding has left, in fp16 too and times 2^11, by which it is smaller
than the weight. Both together have 22 bits of mantissa, where fp32 has 24. Gradients in fp16 keep
the scale of the loss (train/optim.py), since without it the small ones would be lost; they are
divided by it here. Where it was too large, nothing may change: a CUDA graph cannot leave a kernel
out, but the kernel's programs can end at once.

**Moments in bf16** (variant E-dropout-moments) take stochastic rounding. A step keeps 999 parts in
1,000 of the second moment, and no two numbers of bf16 are that close: rounded to nearest, the
moment would never fall, and only gradients about twice as large as its root would raise it. Rounded
up with the probability with which it lies near the next number (Gupta et al. 2015), it stands still
in most steps, moves far enough in some, and is right on average. The random bits are a hash of step
and of the element's number in the optimizer, like dropout's (kernels/hash_dropout.py): a run
repeats, a CUDA graph rounds anew in each replay, and processes that make the same update agree.
Moments in 8 bits (kernels/eight_bit.py, variant E-recompute-8bit) are rounded by the same random
bits.

**Weights in bf16 can do without masters** if they are rounded in this way too (variants
E-fp8-rounded-bf16 and E-fp8-rounded; torchao's AdamW and the rivals of peers/ do so). A step that
is a hundredth of the distance to the next number then moves the weight there in one of a hundred
cases. The weight is right on average, but no master remembers by how much it was rounded.

An optimizer's step does little arithmetic on much memory. Written plainly it runs some ten kernels,
each of which reads and writes every parameter. On a GPU it is one pass, by a Triton kernel of our
own that takes many tensors in a call, like PyTorch's fused AdamW. It moves 26 bytes a parameter: 2
of gradient, 4 of weight, 4 of low bits and 16 of moments. Moments in bf16 are 8 of them, in 8 bits
4, so that it moves 18 or 14; without masters 14 or 10. The norm of the gradients reads 2 more.
PyTorch's compiler makes the same pass out of the plain one, but of some hundred tensors it has to
look at each: that took more seconds than all of the model. The plain one is what runs on a CPU, and
what the tests hold the kernel to. The kernel is for GPUs of compute capability 7.5 and newer;
weights in bf16 want 8.0, those in fp16 do on a T4's 7.5.
"""

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qa_lib.errors import UserError
from qa_lib.kernels import eight_bit
from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.eight_bit import (
    decode_mean_kernel,
    decode_square_kernel,
    encode_mean_kernel,
    encode_square_kernel,
)
from qa_lib.kernels.hash_dropout import GOLDEN_INT32, hash32, hash32_kernel
from qa_lib.kernels.many_tensors import chosen, in_calls, tensor_of_program, with_sums
from qa_lib.kernels.precompile import launch

FINER = 2.0**11  # by which an fp16 weight's low bits are multiplied
# The type of a weight's low bits, by the weight's.
LOW_TYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float16}
# The parts of a parameter's state that the update takes, in its order.
COLUMNS = ("low_bits", "exp_avg", "exp_avg_sq", "scales", "first")
NORM = {"BLOCK": 8192, "num_warps": 4}
UPDATE = {"BLOCK": eight_bit.BLOCK, "num_warps": 4}
# Moments in 8 bits take as long to compute as to move. Every warp finds out which tensor is its
# own: with 2 of them an element takes 84 instructions of sm_90, with 4 it takes 107.
UPDATE_OF_CODES = {"BLOCK": eight_bit.BLOCK, "num_warps": 2}


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over fp32 masters of half-precision parameters (Loshchilov and Hutter 2019).

    It takes the place of PyTorch's AdamW: parameter groups, weight decay that is decoupled,
    schedulers, `state_dict` and `load_state_dict`, which restores every bit, GradScaler, and
    whatever wraps an optimizer. `parameters` are contiguous, on one device, and all in bf16 or all
    in fp16: cast the model first. A master begins as its parameter is when the optimizer is made,
    so with the bits that a cast to half precision has left.

    With `max_norm`, gradients are taken as if all of them were clipped to that norm, which saves
    clip_grad_norm_ its pass over them. `moments` is the type of both, fp32, bf16, or uint8 for
    codes. Without `masters` new weights in bf16 are rounded at random, and nothing else is kept of
    them. Nothing waits for the device: rate and step count are tensors on it.

    Raises UserError for parameters of another type. Loading raises it for a state of weights of
    another type, for one with masters into an optimizer without them, the other way round, and for
    a state of another optimizer; nothing has changed then.

        import torch
        from qa_lib import MasterAdamW

        model = torch.nn.Linear(8, 2).bfloat16()
        optimizer = MasterAdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """

    # GradScaler hands `grad_scale` and `found_inf` to an optimizer that says so (optim.unscale):
    # the scale that is on the gradients, and a number other than 0 where one of them is not finite.
    _step_supports_amp_scaling = True
    # Where else the kernel writes the new weights of the only parameter: tensors like it, in the
    # memory of other GPUs (train/parallel/peers.py).
    copies: tuple[torch.Tensor, ...] = ()

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] | Iterable[dict],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_norm: float | None = None,
        moments: torch.dtype = torch.float32,
        masters: bool = True,
    ):
        self.max_norm = max_norm
        self.moments = moments
        self.masters = masters
        # How many updates each parameter has had, by the host's count: those that have had equally
        # many are updated together. Only differences matter.
        self.updates: dict[torch.Tensor, int] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        if any(p.is_cuda for p in self.updates):
            self._compile_kernels()

    def __getstate__(self) -> dict:
        names = ("max_norm", "moments", "masters", "updates")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters, with masters and moments, as torch.optim.Optimizer does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        parameters = group["params"]
        known_types = {p.dtype for p in self.updates} or set(LOW_TYPES)
        for parameter in parameters:
            if parameter.dtype not in known_types:
                raise UserError(_wrong_type(parameter.dtype, known_types))
            known_types = {parameter.dtype}
        if not self.masters and torch.bfloat16 not in known_types:
            raise UserError(
                f"MasterAdamW got parameters in {_named(parameters[0].dtype)} and masters=False: "
                "weights in bfloat16 alone are rounded at random"
            )
        if not parameters:
            return
        # A rate of its own for each group, since schedulers write into it.
        rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=parameters[0].device)
        if any(rate is other["lr"] for other in self.param_groups[:-1]):
            rate = rate.clone()
        group["lr"] = rate
        elements = sum(p.numel() for p in self.updates) % 2**31
        for parameter in parameters:
            blocks = -(-parameter.numel() // eight_bit.BLOCK) if self.moments == torch.uint8 else 0
            self.updates[parameter] = 0
            low_bits = torch.zeros_like(parameter, dtype=LOW_TYPES[parameter.dtype])
            self.state[parameter] = {
                **({"low_bits": low_bits} if self.masters else {}),
                "exp_avg": torch.zeros_like(parameter, dtype=self.moments),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=self.moments),
                # Moments in 8 bits have two scales a block, one for each.
                "scales": parameter.new_zeros(blocks, 2, dtype=torch.float32),
                "step": torch.zeros((), device=parameter.device),
                # The number of its first element in this optimizer, for random bits of its own.
                "first": torch.tensor(elements, dtype=torch.int32, device=parameter.device),
            }
            elements = (elements + parameter.numel()) % 2**31

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state that `state_dict` returned, every bit of it.

        PyTorch would cast low bits, moments and counts to the type of the parameter. They and the
        rates stay in the memory that they are in, which a captured graph reads and writes.

        Raises UserError for a state that this optimizer cannot have had.
        """
        self._check_state(state_dict)
        rates = [group["lr"] for group in self.param_groups]
        before = {parameter: self.state.get(parameter, {}) for parameter in self.updates}
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            state = state_dict["state"][number]
            self.state[parameter] = {
                name: _in_place(before[parameter].get(name), value, parameter.device)
                for name, value in state.items()
            }
        for group, rate in zip(self.param_groups, rates, strict=True):
            if torch.is_tensor(rate):
                rate.copy_(torch.as_tensor(group["lr"]))
                group["lr"] = rate
        counts = torch.stack([self.state[p]["step"] for p in self.updates]).tolist()
        self.updates = dict(zip(self.updates, map(int, counts), strict=True))

    def _check_state(self, state_dict: dict) -> None:
        """Raise UserError where a parameter's state is missing or is of another kind.

        PyTorch refuses a state of another number of parameters itself.
        """
        names = {*COLUMNS, "step"}
        if not self.masters:
            names.remove("low_bits")
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=False):
            state = state_dict["state"].get(number, {})
            is_alike = state.keys() == names
            if is_alike and self.masters:
                is_alike = state["low_bits"].dtype == LOW_TYPES[parameter.dtype]
            if not is_alike:
                without = "" if self.masters else " without masters"
                raise UserError(
                    "this state is not one of MasterAdamW over weights in "
                    f"{_named(parameter.dtype)}{without}"
                )

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of these gradients, in fp32.

        Something that has them in registers replaces it (train/parallel/peers.py).
        """
        return _norm_by_kernel(gradients) if gradients[0].is_cuda else _norm(gradients)

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all gradients from that of these.

        A process with a share of them replaces it (train/parallel/data_parallel.py).
        """
        return norm

    def _compile_kernels(self) -> None:
        """Have the kernels compiled for what they will work on (kernels/precompile.py)."""
        with FakeTensorMode() as mode:
            groups = [
                (group, [mode.from_tensor(p) for p in group["params"]])
                for group in self.param_groups
            ]
            # A gradient is like its parameter.
            gradients = [weight for _, weights in groups for weight in weights]
            number = torch.empty((), device=gradients[0].device)
            # A loss has a scale where weights are in fp16, and then a step may be skipped.
            skip = number if gradients[0].dtype == torch.float16 else None
            if self.max_norm is not None:
                _norm_by_kernel(gradients)
            for group, weights in groups:
                columns = [
                    [None if tensor is None else mode.from_tensor(tensor) for tensor in column]
                    for column in self._columns(group["params"])
                ]
                beta1, beta2 = group["betas"]
                _update_by_kernel(
                    weights,
                    weights,
                    *columns,
                    step=number,
                    factor=number,
                    rate=number,
                    growth=number,
                    shrink=number if group["weight_decay"] else None,
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    skip=skip,
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update every parameter that has a gradient; return the loss of a `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradients = [p for p in self.updates if p.grad is not None]
        if not with_gradients:
            return loss
        factor = self._factor([p.grad.contiguous() for p in with_gradients])
        skip = getattr(self, "found_inf", None)
        steps = [self.state[p]["step"] for p in with_gradients]
        if skip is None:
            torch._foreach_add_(steps, 1)
        else:
            # A tensor each: of one for all, PyTorch asks the device for its value, which a capture
            # forbids.
            torch._foreach_add_(steps, [1.0 - (skip != 0).float()] * len(steps))
        for group in self.param_groups:
            by_count: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_count.setdefault(self.updates[parameter], []).append(parameter)
            for parameters in by_count.values():
                self._update(group, parameters, factor, skip)
        for parameter in with_gradients:
            self.updates[parameter] += 1
        return loss

    def _factor(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return what takes the loss's scale off the gradients and clips them."""
        scale = getattr(self, "grad_scale", None)
        device = gradients[0].device
        if self.max_norm is None:
            return torch.ones((), device=device) if scale is None else 1.0 / scale
        norm = self.global_norm(self.norm(gradients))
        if scale is None:
            return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
        return (self.max_norm / (norm / scale + 1e-6)).clamp(max=1.0) / scale

    def _update(self, group: dict, parameters: list[torch.Tensor], factor, skip) -> None:
        """Update parameters of a group that have had equally many updates."""
        gradients = [p.grad.contiguous() for p in parameters]
        step = self.state[parameters[0]]["step"]
        rate = torch.as_tensor(group["lr"], device=step.device)
        beta1, beta2 = group["betas"]
        scalars = {
            "step": step,
            "factor": factor,
            "rate": rate / (1 - torch.pow(beta1, step)),
            "growth": 1 / (1 - torch.pow(beta2, step)),
            "shrink": 1 - rate * group["weight_decay"] if group["weight_decay"] else None,
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "skip": skip,
        }
        columns = self._columns(parameters)
        if parameters[0].is_cuda:
            _update_by_kernel(parameters, gradients, *columns, **scalars, copies=self.copies)
            return
        for tensors in zip(parameters, gradients, *columns, strict=True):
            update(*tensors, **scalars)

    def _columns(self, parameters: list[torch.Tensor]) -> list[list[torch.Tensor | None]]:
        """Return a list of each part of their state; low bits are None without masters."""
        return [[self.state[p].get(name) for p in parameters] for name in COLUMNS]


def _in_place(
    place: torch.Tensor | None, value: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return a copy of `value` on a device: in `place` where one like it is there."""
    if place is None or (place.shape, place.dtype) != (value.shape, value.dtype):
        return value.detach().to(device, copy=True)
    return place.copy_(value)


def _named(dtype: torch.dtype) -> str:
    """Return the name of a type without its module."""
    return str(dtype).removeprefix("torch.")


def _wrong_type(dtype: torch.dtype, known: set[torch.dtype]) -> str:
    """Return the message for a parameter of another type than those that are known."""
    if len(known) == 1:
        (other,) = known
        return (
            f"MasterAdamW got parameters in {_named(other)} and in {_named(dtype)}: cast them all"
        )
    return (
        "MasterAdamW keeps fp32 masters of weights in half precision, and these are in "
        f"{_named(dtype)}: cast the model before, model.to(torch.bfloat16), "
        "or take torch.optim.AdamW"
    )


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all elements of some tensors, in fp32."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()


def _norm_by_kernel(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return what `_norm` returns, for tensors of one type on a GPU."""
    sums, calls_with_sums = with_sums(list(in_calls(tensors)), NORM["BLOCK"], tensors[0].device)
    for (call_tensors,), sizes, call_sums in calls_with_sums:
        launch(
            square_sums,
            (len(call_sums),),
            tensors=call_tensors,
            sizes=sizes,
            sums=call_sums,
            COUNT=len(sizes),
            **NORM,
        )
    return sums.sum().sqrt()


def master_of(weight: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 master of a weight in half precision, or without low bits the weight."""
    if low is None:
        return weight.float()
    if weight.dtype == torch.float16:
        return weight.float() + low.float() / FINER
    return (weight.float().view(torch.int32) + low.int()).view(torch.float32)


def halves(master: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounding of an fp32 master to half precision, in fp32 still, and the low bits."""
    if dtype == torch.float16:
        weight = master.half().float()
        return weight, (master - weight) * FINER
    weight = upper(master, 0x8000)
    return weight, master.view(torch.int32) - weight.view(torch.int32)


def upper(value: torch.Tensor, addend: int | torch.Tensor) -> torch.Tensor:
    """Return an fp32 tensor with `addend` added to its bits and the lower 16 of these cut off.

    The result fits bf16. Half of what 16 bits can count rounds to nearest, a random addend
    stochastically.
    """
    cut = ((value.view(torch.int32) + addend) & -(1 << 16)).view(torch.float32)
    return torch.where(value.isnan(), value, cut)  # the sum turns the NaN that GPUs make into zero


def random_bits(value: torch.Tensor, first: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element of `value`, int32 in its shape.

    The step and the element's number in the optimizer decide them. `first` is the number of the
    first element.
    """
    span = torch.arange(value.numel(), device=value.device, dtype=torch.int32).view(value.shape)
    return hash32(first + span, step.int() * GOLDEN_INT32)


def weight_noise(bits: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits that round a weight, from 32 that round its moments.

    They are the upper half of the product with an odd number, which for any lower half of `bits`
    takes every value equally often.
    """
    return (bits * GOLDEN_INT32 >> 16) & 0xFFFF


def read_moments(mean, square, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments in fp32, from what the optimizer keeps."""
    if mean.dtype != torch.uint8:
        return mean.float(), square.float()
    means = eight_bit.decode_mean(blocks_of(mean).int(), scale[:, :1])
    squares = eight_bit.decode_square(blocks_of(square).int(), scale[:, 1:])
    return elements_of(means, mean), elements_of(squares, mean)


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as [blocks, BLOCK], filled up with zeros."""
    padding = -tensor.numel() % eight_bit.BLOCK
    return F.pad(tensor.flatten(), (0, padding)).view(-1, eight_bit.BLOCK)


def elements_of(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `blocks_of`, for a result in the shape of another tensor."""
    return blocks.flatten()[: like.numel()].view(like.shape)


def coded_moments(mean, square, bits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes of both fp32 moments, int32, and their scales, fp32 [blocks, 2].

    `bits` are 32 random ones for each element.
    """
    random = blocks_of(bits)
    codes, mean_scale = eight_bit.encode_mean(blocks_of(mean), random)
    square_codes, square_scale = eight_bit.encode_square(blocks_of(square), random)
    scales = torch.cat([mean_scale, square_scale], 1)
    return elements_of(codes, mean), elements_of(square_codes, mean), scales


def update(
    weight,
    gradient,
    low,
    mean,
    square,
    scale,
    first,
    step,
    factor,
    rate,
    growth,
    shrink,
    beta1,
    beta2,
    eps,
    skip,
):
    """Do AdamW on the tensors of one parameter, in place, for its gradient times `factor`.

    `rate` is the learning rate over the mean's correction, `growth` one over that of the square.
    Weight decay leaves the part `shrink` of the master, or all where that is None. Where `low` is
    None, there is no master, and the weight is rounded at random. Where `skip` is a number other
    than 0, nothing changes.
    """
    gradient = gradient.float() * factor
    old_mean, old_square = read_moments(mean, square, scale)
    new_mean = old_mean.lerp(gradient, 1 - beta1)
    new_square = (old_square * beta2).addcmul(gradient, gradient, value=1 - beta2)
    new_scale = scale
    move = new_mean / ((new_square * growth).sqrt() + eps) * rate
    master = master_of(weight, low)
    if shrink is not None:
        master = master * shrink
    bits = random_bits(mean, first, step)
    if low is None:
        new_weight, new_low = upper(master - move, weight_noise(bits)), None
    else:
        new_weight, new_low = halves(master - move, weight.dtype)
    if mean.dtype == torch.bfloat16:
        new_mean = upper(new_mean, bits & 0xFFFF)
        new_square = upper(new_square, (bits >> 16) & 0xFFFF)
    elif mean.dtype == torch.uint8:
        new_mean, new_square, new_scale = coded_moments(new_mean, new_square, bits)
    changes = (
        (mean, new_mean),
        (square, new_square),
        (scale, new_scale),
        (low, new_low),
        (weight, new_weight),
    )
    for old, new in changes:
        if old is None:
            continue
        old.copy_(new if skip is None else torch.where(skip != 0, old, new))


def _update_by_kernel(
    weights,
    gradients,
    lows,
    means,
    squares,
    scales,
    firsts,
    step,
    factor,
    rate,
    growth,
    shrink,
    beta1,
    beta2,
    eps,
    skip,
    copies=(),
) -> None:
    """Do what `update` does to each parameter of lists of tensors on a GPU.

    `lows` are None where there are no masters. The new weights of an only parameter go to `copies`
    as well, tensors like it.
    """
    has_masters = lows[0] is not None
    options = UPDATE_OF_CODES if means[0].dtype == torch.uint8 else UPDATE
    for columns, sizes in in_calls(
        weights, gradients, lows if has_masters else weights, means, squares, scales, firsts
    ):
        names = ("weights", "grads", "lows", "means", "squares", "scales", "firsts")
        programs = sum(-(-size // eight_bit.BLOCK) for size in sizes)
        launch(
            adamw,
            (programs,),
            **dict(zip(names, columns, strict=True)),
            sizes=sizes,
            step=step,
            factor=factor,
            rate=rate,
            growth=growth,
            shrink=step if shrink is None else shrink,
            skip=step if skip is None else skip,
            copies=tuple(copies) or (step,),
            BETA1=beta1,
            BETA2=beta2,
            EPS=eps,
            FINER=FINER,
            GOLDEN=GOLDEN_INT32,
            DECAYS=shrink is not None,
            SKIPS=skip is not None,
            MASTERS=has_masters,
            COPIES=len(copies),
            COUNT=len(sizes),
            **options,
        )


# The kernels. One call does many tensors. They come as tuples of COUNT pointers, of one kind each,
# and a program takes BLOCK elements of one of the tensors. All are contiguous. A name that ends in
# _at is a pointer to the elements of a program.


@jit(do_not_specialize_on_alignment=["sums"])
def square_sums(tensors, sizes, sums, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Put the sum of the squares of each program's elements into `sums` [programs]."""
    number, _, element, inside = tensor_of_program(sizes, COUNT, BLOCK)
    value = tl.load(chosen(tensors, number, COUNT) + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(value * value, 0))


@jit
def upper_kernel(value, addend):
    """Return what `upper` returns, for an addend of 16 bits, in bf16."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits + addend, bits)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@jit
def adamw(
    weights,
    grads,
    lows,
    means,
    squares,
    scales,
    firsts,
    sizes,
    step,
    factor,
    rate,
    growth,
    shrink,
    skip,
    copies,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    FINER: tl.constexpr,
    GOLDEN: tl.constexpr,
    DECAYS: tl.constexpr,
    SKIPS: tl.constexpr,
    MASTERS: tl.constexpr,
    COPIES: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `update` does to BLOCK elements of a parameter.

    Without DECAYS `shrink` is not read, without SKIPS `skip`, and without MASTERS `lows`. The new
    weights of one parameter alone go to COPIES `copies` as well.
    """
    if SKIPS:  # noqa: SIM102  known when it is compiled
        if tl.load(skip) != 0.0:
            return
    number, block, element, inside = tensor_of_program(sizes, COUNT, BLOCK)
    weight_at = chosen(weights, number, COUNT) + element
    low_at = chosen(lows, number, COUNT) + element
    mean_at = chosen(means, number, COUNT) + element
    square_at = chosen(squares, number, COUNT) + element
    scale_at = chosen(scales, number, COUNT) + 2 * block
    CODED: tl.constexpr = means[0].dtype.element_ty == tl.uint8
    grad = tl.load(chosen(grads, number, COUNT) + element, mask=inside, other=0.0).to(tl.float32)
    grad = grad * tl.load(factor)
    weight = tl.load(weight_at, mask=inside).to(tl.float32)
    if MASTERS:
        low = tl.load(low_at, mask=inside)
    if CODED:
        code = tl.load(mean_at, mask=inside, other=0).to(tl.int32)
        mean = decode_mean_kernel(code, tl.load(scale_at))
        code = tl.load(square_at, mask=inside, other=0).to(tl.int32)
        square = decode_square_kernel(code, tl.load(scale_at + 1))
    else:
        mean = tl.load(mean_at, mask=inside).to(tl.float32)
        square = tl.load(square_at, mask=inside).to(tl.float32)

    mean += (grad - mean) * (1 - BETA1)
    square = square * BETA2 + grad * grad * (1 - BETA2)
    if CODED:
        # The GPU's own approximations, to a few parts in 10^7: a code is wrong by one in ten.
        inverse_root = tl.rsqrt(tl.sqrt(square * tl.load(growth)) + EPS)
        move = mean * tl.load(rate) * inverse_root * inverse_root
    else:
        move = mean / (tl.sqrt_rn(square * tl.load(growth)) + EPS) * tl.load(rate)
    if not MASTERS or CODED or means[0].dtype.element_ty == tl.bfloat16:
        seed = (tl.load(step).to(tl.int32) * GOLDEN).to(tl.uint32, bitcast=True)
        element_number = tl.load(chosen(firsts, number, COUNT)) + element
        bits = hash32_kernel(element_number.to(tl.uint32), seed)
    if MASTERS and lows[0].dtype.element_ty == tl.float16:
        master = weight + low.to(tl.float32) / FINER
        if DECAYS:
            master = master * tl.load(shrink)
        master = master - move
        weight = master.to(tl.float16)
        low = ((master - weight.to(tl.float32)) * FINER).to(tl.float16)
    else:
        if MASTERS:
            master_bits = weight.to(tl.int32, bitcast=True) + low.to(tl.int32)
            master = master_bits.to(tl.float32, bitcast=True)
        else:
            master = weight
        if DECAYS:
            master = master * tl.load(shrink)
        master = master - move
        if MASTERS:
            weight = upper_kernel(master, 0x8000)
            low = master.to(tl.int32, bitcast=True).to(tl.int16)  # the rest, by two's complement
        else:
            noise = (bits.to(tl.int32, bitcast=True) * GOLDEN).to(tl.uint32, bitcast=True) >> 16
            weight = upper_kernel(master, noise.to(tl.int32))
    if CODED:
        mean, mean_scale = encode_mean_kernel(mean, bits)
        square, square_scale = encode_square_kernel(square, bits)
        tl.store(scale_at, mean_scale)
        tl.store(scale_at + 1, square_scale)
    elif means[0].dtype.element_ty == tl.bfloat16:
        mean = upper_kernel(mean, (bits & 0xFFFF).to(tl.int32))
        square = upper_kernel(square, (bits >> 16).to(tl.int32))

    tl.store(weight_at, weight, mask=inside)
    for copy in tl.static_range(COPIES):
        tl.store(copies[copy] + element, weight, mask=inside)
    if MASTERS:
        tl.store(low_at, low, mask=inside)
    tl.store(mean_at, mean.to(means[0].dtype.element_ty), mask=inside)
    tl.store(square_at, square.to(squares[0].dtype.element_ty), mask=inside)
