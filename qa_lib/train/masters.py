"""AdamW for weights in half precision: masters and moments beside them, updated in one pass (rows E5 and E-moments).

Mixed precision usually keeps the weights in fp32 and casts each of them to half precision in every forward pass. Here
the model itself is in bf16, or in fp16 where a GPU has no other (row E-t4-best): no casts, and weights, gradients and
activations of half the bytes. What that would lose is in the update. bf16 has 8 bits of mantissa, so a step smaller
than 1/256 of a weight, as most are in fine-tuning, rounds to nothing. There is therefore an fp32 number behind each
weight, its master (Micikevicius et al. 2018): the step is added to the master, and the weight is the master's rounding.

**Half of the master is in the weight already.** bf16 is the upper half of fp32, so that 16 bits beside the weight are
enough. They are kept as a whole number, the `rest`: how many of its own last places the master lies above or below the
weight, from -32,768 to 32,767. The bits of the weight plus the rest are those of the master, exactly. A master half-way
between two weights, one in 65,536, is rounded away from zero. A cast would take the even one of the two, which would
then stand for 65,537 masters, one more than 16 bits can tell apart.

**fp16 is not the upper half of fp32**: it has 3 more bits of mantissa and 3 fewer of exponent. Its rest is what the
weight's rounding has left, in fp16 as well and times 2^11, by which it is smaller than the weight. Both together have
22 bits of mantissa, where fp32 has 24. Gradients in fp16 keep the scale of the loss (train/precision.py), since without
it the small ones would be lost; they are divided by it here. Where it was too large, the update writes back what it has
read, since a captured step cannot leave a kernel out.

**Moments in bf16** (row E-moments) take stochastic rounding. A step keeps 999 parts in 1,000 of the second moment, and
no two numbers of bf16 are that close: rounded to nearest, the moment would never fall, and only gradients about twice
as large as its root would raise it. Rounded up with the probability with which it lies near the next number (Gupta et
al. 2015), it stands still in most steps, moves far enough in some, and is right on average. The random bits are a hash
of step and of the element's number in the optimizer, as dropout's are (model/dropout.py): a run repeats, a captured
step rounds anew in each replay, and processes that make the same update agree.

An optimizer's step does little arithmetic on much memory. Written plainly it runs some ten kernels, each of which reads
and writes every parameter; compiled, it is one pass. It moves 26 bytes a parameter: 2 of gradient, 4 of weight, 4 of
rest and 16 of moments. With moments in bf16, which are 8, it moves 18. The norm of the gradients reads 2 more.
"""

from collections import Counter

import torch

from qa_lib.model.dropout import hashed

FINER = 2.0**11  # times so much an fp16 weight's rest is kept
GOLDEN = 0x9E3779B1 - 2**32  # odd, and far from 0 as int32: seeds of neighbouring steps lie far apart


class MasterAdamW(torch.optim.Optimizer):
    """AdamW without weight decay (Kingma and Ba 2015, Loshchilov and Hutter 2019) over masters of half-precision
    parameters.

    A master begins as the parameter is when the optimizer is made, so with the bits that a cast to half precision has
    left. Nothing waits for the device: rate and step count are tensors on it. Gradients are taken as if clipped to the
    norm `max_norm`, which saves clip_grad_norm_ its pass over them. `moments` is the type of both, fp32 or bf16.
    Raises TypeError for parameters that are in neither bf16 nor fp16.
    """

    # What GradScaler hands to an optimizer that says so (optim.unscale): the scale that is on the gradients, and more
    # than 0 where one of them is not finite.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, parameters, lr: torch.Tensor, max_norm: float, moments=torch.float32):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.max_norm = max_norm
        self.across = lambda norm: norm  # of all gradients, where it has a share of them (train/parallel.py)
        elements = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in RESTS:
                    raise TypeError(
                        f"masters are of parameters in half precision, and there is one of {parameter.dtype}"
                    )
                self.state[parameter] = {
                    "rest": torch.zeros_like(parameter, dtype=RESTS[parameter.dtype]),
                    "exp_avg": torch.zeros_like(parameter, dtype=moments),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=moments),
                    "step": torch.zeros((), device=parameter.device),
                    # The number of its first element in this optimizer, for random bits of its own.
                    "first": torch.tensor(elements, dtype=torch.int32, device=parameter.device),
                }
                elements = (elements + parameter.numel()) % 2**31

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of every parameter that has a gradient."""
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm([p.grad for p in every], 2, dtype=torch.float32)
        norm = self.across(torch.stack(norms).norm())
        steps, skip = [self.state[p]["step"] for p in every], None
        if self.grad_scale is None:
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
            torch._foreach_add_(steps, 1)
        else:
            factor = (self.max_norm / (norm / self.grad_scale + 1e-6)).clamp(max=1.0) / self.grad_scale
            skip = self.found_inf > 0
            # A tensor each: of one for all, PyTorch asks the device for its value, which a capture forbids.
            torch._foreach_add_(steps, [1.0 - skip.float()] * len(steps))
        step = steps[0]  # all parameters are updated in every step
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            # Here, since the compiler would compute these powers for every element.
            size, growth = group["lr"] / (1 - torch.pow(beta1, step)), 1 / (1 - torch.pow(beta2, step))
            for parameters in bundles([p for p in group["params"] if p.grad is not None]):
                columns = [
                    [self.state[p][name] for p in parameters] for name in ("rest", "exp_avg", "exp_avg_sq", "first")
                ]
                gradients = [p.grad for p in parameters]
                _update(parameters, gradients, *columns, step, factor, size, growth, beta1, beta2, group["eps"], skip)


def bundles(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parameters in lists, each updated by one call: as many lists as the model has layers.

    Those of one shape are dealt out evenly, and what is left over goes into the first list. The others are then alike
    in their shapes, and what the compiler makes of one serves them all: it has two layers' parameters to look at.
    """
    alike, elements = {}, Counter()
    for parameter in parameters:
        alike.setdefault(parameter.shape, []).append(parameter)
    for shape, same in alike.items():
        elements[len(same)] += len(same) * shape.numel() * (len(same) > 1)
    # There are as many layers as most elements have tensors of their shape.
    lists = [[] for _ in range(max(elements, key=elements.get))]
    for same in alike.values():
        extra = len(same) % len(lists)
        lists[0] += same[:extra]
        for number, bundle in enumerate(lists):
            bundle += same[extra + number :: len(lists)]
    return lists


RESTS = {torch.bfloat16: torch.int16, torch.float16: torch.float16}  # the type of a weight's rest


def masters(parameters: list[torch.Tensor], rests: list[torch.Tensor]) -> list[torch.Tensor]:
    """The fp32 masters of parameters in half precision."""
    pairs = zip(parameters, rests, strict=True)
    if parameters[0].dtype == torch.float16:
        return [p.float() + rest.float() / FINER for p, rest in pairs]
    return [(p.float().view(torch.int32) + rest.int()).view(torch.float32) for p, rest in pairs]


def halves(masters: list[torch.Tensor], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """fp32 masters as their roundings to half precision, in fp32 still, and the rests."""
    if dtype == torch.float16:
        weights = [nearest_fp16(master) for master in masters]
        return weights, [(m - weight) * FINER for m, weight in zip(masters, weights, strict=True)]
    weights = [upper(master, 0x8000) for master in masters]
    return weights, [m.view(torch.int32) - weight.view(torch.int32) for m, weight in zip(masters, weights, strict=True)]


def upper(value: torch.Tensor, addend: int | torch.Tensor, lower: int = 16) -> torch.Tensor:
    """An fp32 tensor with `addend` added to its bits and the `lower` ones of these then cut off, by default so that it
    fits bf16. Half of what these bits can count rounds to nearest, a random addend stochastically."""
    cut = ((value.view(torch.int32) + addend) & -(1 << lower)).view(torch.float32)
    return torch.where(value.isnan(), value, cut)  # the sum turns the NaN that GPUs make into zero


def nearest_fp16(value: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor rounded to numbers of fp16, below 65,520. Not by a cast, which Inductor leaves out between two
    operations of one kernel."""
    # fp16's numbers below 2^-14 are 2^-24 apart, as fp32's are around 3/4.
    return torch.where(value.abs() < 2**-14, (value + 0.75) - 0.75, upper(value, 0x1000, 13))


def random_bits(values: list[torch.Tensor], firsts: list[torch.Tensor], step: torch.Tensor) -> list[torch.Tensor]:
    """int32 tensors in the shapes of `values`: 32 random bits for each element, of which the step and the element's
    number in the model decide. `firsts` are the numbers of the first elements."""
    seed = step.int() * GOLDEN
    spans = [torch.arange(v.numel(), device=v.device, dtype=torch.int32).view(v.shape) for v in values]
    return [hashed(first + span, seed) for first, span in zip(firsts, spans, strict=True)]


@torch.compile(dynamic=False, fullgraph=True)
def _update(
    parameters, gradients, rests, means, squares, firsts, step, factor, size, growth, beta1, beta2, eps, skip
) -> None:
    gradients = [g.float() * factor for g in gradients]
    new_means = torch._foreach_lerp([m.float() for m in means], gradients, 1 - beta1)
    new_squares = torch._foreach_mul([s.float() for s in squares], beta2)
    new_squares = torch._foreach_addcmul(new_squares, gradients, gradients, 1 - beta2)
    roots = torch._foreach_add(torch._foreach_sqrt(torch._foreach_mul(new_squares, growth)), eps)
    moves = torch._foreach_mul(torch._foreach_div(new_means, roots), size)
    new_masters = torch._foreach_sub(masters(parameters, rests), moves)
    if means[0].dtype == torch.bfloat16:
        bits = random_bits(means, firsts, step)
        new_means = [upper(mean, low & 0xFFFF) for mean, low in zip(new_means, bits, strict=True)]
        new_squares = [upper(square, (high >> 16) & 0xFFFF) for square, high in zip(new_squares, bits, strict=True)]
    weights, new_rests = halves(new_masters, parameters[0].dtype)
    for old, new in ((means, new_means), (squares, new_squares), (rests, new_rests), (parameters, weights)):
        if skip is not None:
            new = [torch.where(skip, a, b) for a, b in zip(old, new, strict=True)]
        torch._foreach_copy_(old, new)
