"""AdamW's update for the rivals, clipped, in the forms that a good engineer tries. Nothing of the library is used.

Each form has `step(gradients)`, which takes the gradients of `parameters` and waits for nothing, so that a CUDA graph
can hold it. Weights do not decay.
"""

import torch
from torch import nn

BETAS, EPS, CLIP = (0.9, 0.999), 1e-8, 1.0
SMALL = 100_000  # parameters with fewer elements are updated as one


def _factor(gradients: list[torch.Tensor]) -> torch.Tensor:
    """What brings the gradients down to the norm CLIP: a number on the device, at most 1."""
    norm = torch.nn.utils.get_total_norm(gradients).float()
    return (CLIP / (norm + 1e-6)).clamp(max=1.0)


class PublicAdamW:
    """A public optimizer of PyTorch's interface: PyTorch's fused AdamW, or torchao's with stochastic rounding."""

    def __init__(self, model: nn.Module, rate: float, stochastic: bool = False):
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        rate = torch.tensor(rate, device=device) if device.type == "cuda" else rate
        shape = {"lr": rate, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
        if stochastic:
            from torchao.optim import _AdamW

            self.optimizer = _AdamW(self.parameters, **shape, bf16_stochastic_round=True)
        else:
            self.optimizer = torch.optim.AdamW(
                self.parameters, **shape, fused=True, capturable=device.type == "cuda"
            )

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        clipped = torch._foreach_mul(gradients, _factor(gradients))
        for parameter, gradient in zip(self.parameters, clipped, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        # torchao counts steps on the host, which a CUDA graph would not see.
        for parameter, state in self.optimizer.state.items():
            if state["step"].device != parameter.device:
                state["step"] = state["step"].to(parameter.device)


class CompiledAdamW:
    """An update of one's own, compiled to one kernel for each large parameter and one for all small ones.

    Weights in 16 bits are rounded stochastically, or, with `masters`, are copies of weights in fp32. Clipping is part
    of the update. Moments are of type `moments`. Where `hashed`, rounding takes its random bits from a few integer
    operations in place of PyTorch's random numbers. With `together`, one compiled function updates all parameters, and
    Inductor joins its kernels.
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float,
        masters: bool = False,
        moments: torch.dtype = torch.bfloat16,
        hashed: bool = False,
        together: bool = False,
        compiled: bool = True,
    ):
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        self.large = [i for i, p in enumerate(self.parameters) if p.numel() >= SMALL]
        small = [i for i, p in enumerate(self.parameters) if p.numel() < SMALL]
        # The longest first: all but the last begin where 16 bytes do.
        self.small = sorted(small, key=lambda i: -self.parameters[i].numel())
        self.weights = [self.parameters[i].detach().view(-1) for i in self.large]
        if self.small:
            self.weights.append(self._merged())
        wide = [weight.float() if masters else None for weight in self.weights]
        self.state = [
            (weight, master, torch.zeros_like(weight, dtype=moments), torch.zeros_like(weight, dtype=moments))
            for weight, master in zip(self.weights, wide, strict=True)
        ]  # fmt: skip
        self.rate = torch.tensor(rate, device=device)
        self.count = torch.zeros((), device=device)
        self.seeds = [
            torch.tensor(number, dtype=torch.int32, device=device)
            for number in range(len(self.weights))
        ]
        self.hashed = hashed
        options = {"combo_kernels": True} if together else {}
        update = self._update_all if together else _update
        if compiled:
            update = torch.compile(update, fullgraph=True, dynamic=False, options=options)
        self.update_all = update if together else self._update_all
        self.update = _update if together else update

    def _merged(self) -> torch.Tensor:
        """The small parameters in one piece of memory, of which they are views from now on."""
        pieces = [self.parameters[i].detach() for i in self.small]
        merged = torch.cat([piece.flatten() for piece in pieces])
        parts = merged.split([piece.numel() for piece in pieces])
        for i, piece, part in zip(self.small, pieces, parts, strict=True):
            self.parameters[i].data = part.view_as(piece)
        return merged

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        self.count += 1
        factor = _factor(gradients)
        flat = [gradients[i].reshape(-1) for i in self.large]
        if self.small:
            flat.append(torch.cat([gradients[i].flatten() for i in self.small]))
        first, second = (1 - beta**self.count for beta in BETAS)
        torch._foreach_add_(self.seeds, len(self.seeds))
        self.update_all(flat, factor, self.rate / first, second)

    def _update_all(self, flat, factor, rate, second):
        for state, gradient, seed in zip(self.state, flat, self.seeds, strict=True):
            self.update(*state, gradient, factor, rate, second, seed if self.hashed else None)


def _update(weight, master, mean, square, gradient, factor, rate, second, seed):
    """The update of one parameter in place: the first moment's correction is in `rate`, `second` is the other's."""
    gradient = gradient.float() * factor
    mean_now = mean.float().lerp(gradient, 1 - BETAS[0])
    square_now = square.float().lerp(gradient.square(), 1 - BETAS[1])
    mean.copy_(mean_now)
    square.copy_(square_now)
    wide = weight.float() if master is None else master
    wide = wide - rate * mean_now / ((square_now / second).sqrt() + EPS)
    if master is not None:
        master.copy_(wide)
        weight.copy_(wide)
    elif weight.dtype == torch.bfloat16:
        weight.copy_(_rounded(wide, seed))
    else:
        weight.copy_(wide)


def _rounded(wide: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
    """fp32 to bf16, up or down at random, so that the mean is right: noise below the 16 bits that stay is added."""
    if seed is None:
        noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device)
    else:
        noise = _hash(torch.arange(wide.numel(), dtype=torch.int32, device=wide.device), seed)
    bits = (wide.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).bfloat16()


def _hash(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """16 bits that look random, of each number: the last steps of MurmurHash3 with 32 bits."""
    x = x ^ (seed * -1640531527)
    x = (x ^ (x >> 16 & 0xFFFF)) * -2048144789
    x = (x ^ (x >> 13 & 0x7FFFF)) * -1028477387
    return x >> 16 & 0xFFFF
