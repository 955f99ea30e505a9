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

The update itself, in plain PyTorch and as a kernel, is in kernels/adamw.py.
"""

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qa_lib.errors import UserError
from qa_lib.kernels import eight_bit
from qa_lib.kernels.adamw import (
    LOW_TYPES,
    gradient_norm,
    gradient_norm_by_kernel,
    update,
    update_by_kernel,
)

# The parts of a parameter's state that the update takes, in its order.
COLUMNS = ("low_bits", "exp_avg", "exp_avg_sq", "scales", "first")


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
        if gradients[0].is_cuda:
            return gradient_norm_by_kernel(gradients)
        return gradient_norm(gradients)

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
                gradient_norm_by_kernel(gradients)
            for group, weights in groups:
                columns = [
                    [None if tensor is None else mode.from_tensor(tensor) for tensor in column]
                    for column in self._columns(group["params"])
                ]
                beta1, beta2 = group["betas"]
                update_by_kernel(
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
            update_by_kernel(parameters, gradients, *columns, **scalars, copies=self.copies)
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
