"""AdamW's update with clipping, for trainers in plain PyTorch that this library is compared with.

Each form has `step(gradients)`, which takes a gradient for each of `parameters`, in their order. It
never waits for the device, so that a CUDA graph can hold it. There is no weight decay. This file
imports nothing of the library.
"""

import torch
from torch import nn

BETAS = (0.9, 0.999)  # decay of the first and of the second moment
EPS = 1e-8
CLIP = 1.0  # the largest norm of all gradients together
SMALL = 100_000  # parameters with fewer elements are updated as one


def _clip_factor(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the factor, at most 1, that scales the gradients to a norm of at most CLIP.

    It is a scalar tensor on the device.
    """
    norm = torch.nn.utils.get_total_norm(gradients).float()
    return (CLIP / (norm + 1e-6)).clamp(max=1.0)


class PublicAdamW:
    """PyTorch's fused AdamW, or, if `stochastic`, torchao's AdamW with stochastic rounding."""

    def __init__(self, model: nn.Module, rate: float, stochastic: bool = False):
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        on_gpu = device.type == "cuda"
        if on_gpu:
            rate = torch.tensor(rate, device=device)  # a float would be a constant of the graph
        options = {"lr": rate, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
        if stochastic:
            from torchao.optim import _AdamW

            self.optimizer = _AdamW(self.parameters, **options, bf16_stochastic_round=True)
        else:
            self.optimizer = torch.optim.AdamW(
                self.parameters, **options, fused=True, capturable=on_gpu
            )

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """Update the weights in place."""
        clipped = torch._foreach_mul(gradients, _clip_factor(gradients))
        for parameter, gradient in zip(self.parameters, clipped, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        # torchao begins its counts of steps on the host, where no CUDA graph would raise them.
        for parameter, state in self.optimizer.state.items():
            if state["step"].device != parameter.device:
                state["step"] = state["step"].to(parameter.device)


class CompiledAdamW:
    """A hand-written AdamW that torch.compile turns into few kernels.

    Each large parameter is updated by itself, and all small ones as one flat tensor. Clipping is
    part of the update. Weights in bf16 are rounded stochastically; with fp32 masters they are
    copies of those instead.

    - `masters`: keep the weights in fp32 as well; those in 16 bits are copies of them.
    - `moments`: the type of both moments.
    - `hashed`: draw the random bits of the rounding by a few integer operations, not by PyTorch's
      random numbers.
    - `together`: compile one function that updates all parameters, whose kernels Inductor joins.
    - `compiled`: False runs the same update eagerly, for tests.
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
        # With the longest first, all but the last begin at a multiple of 16 bytes.
        self.small = sorted(small, key=lambda i: -self.parameters[i].numel())
        # A flat tensor for each large parameter, then one for all small ones.
        self.weights = [self.parameters[i].detach().view(-1) for i in self.large]
        if self.small:
            self.weights.append(self._merge_small())
        self.state = []  # weight, fp32 master or None, first moment, second moment
        for weight in self.weights:
            master = weight.float() if masters else None
            mean = torch.zeros_like(weight, dtype=moments)
            square = torch.zeros_like(weight, dtype=moments)
            self.state.append((weight, master, mean, square))
        self.rate = torch.tensor(rate, device=device)
        self.count = torch.zeros((), device=device)
        self.seeds = [
            torch.tensor(number, dtype=torch.int32, device=device)
            for number in range(len(self.weights))
        ]
        self.hashed = hashed
        self.update = _update
        self.update_all = self._update_all
        if compiled and together:
            self.update_all = torch.compile(
                self._update_all, fullgraph=True, dynamic=False, options={"combo_kernels": True}
            )
        elif compiled:
            self.update = torch.compile(_update, fullgraph=True, dynamic=False)

    def moments(self) -> list[torch.Tensor]:
        """Return both moments of all parameters, as flat tensors."""
        return [moment for _, _, mean, square in self.state for moment in (mean, square)]

    def tensors(self) -> list[torch.Tensor]:
        """Return what a step changes beside the parameters: masters, moments, counts and seeds."""
        masters = [master for _, master, _, _ in self.state if master is not None]
        return [*masters, *self.moments(), self.count, *self.seeds]

    def _merge_small(self) -> torch.Tensor:
        """Move the small parameters into one tensor, which is returned; they become views of it."""
        pieces = [self.parameters[i].detach() for i in self.small]
        merged = torch.cat([piece.flatten() for piece in pieces])
        parts = merged.split([piece.numel() for piece in pieces])
        for i, piece, part in zip(self.small, pieces, parts, strict=True):
            self.parameters[i].data = part.view_as(piece)
        return merged

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """Update the weights in place."""
        self.count += 1
        factor = _clip_factor(gradients)
        flat = [gradients[i].reshape(-1) for i in self.large]
        if self.small:
            flat.append(torch.cat([gradients[i].flatten() for i in self.small]))
        mean_correction = 1 - BETAS[0] ** self.count
        square_correction = 1 - BETAS[1] ** self.count
        torch._foreach_add_(
            self.seeds, len(self.seeds)
        )  # seed i of n goes i, i + n, i + 2 n: none twice
        self.update_all(flat, factor, self.rate / mean_correction, square_correction)

    def _update_all(self, flat, factor, rate, square_correction):
        """Update each tensor of `weights` by its gradient, the one at its place in `flat`."""
        for state, gradient, seed in zip(self.state, flat, self.seeds, strict=True):
            if not self.hashed:
                seed = None
            self.update(*state, gradient, factor, rate, square_correction, seed)


def _update(weight, master, mean, square, gradient, factor, rate, square_correction, seed):
    """Update one flat tensor of weights and its moments in place.

    `rate` has the bias correction of the first moment in it; that of the second one is
    `square_correction`. `factor` clips the gradient. `seed` is None or that of the rounding.
    """
    gradient = gradient.float() * factor
    mean_now = mean.float().lerp(gradient, 1 - BETAS[0])
    square_now = square.float().lerp(gradient.square(), 1 - BETAS[1])
    mean.copy_(mean_now)
    square.copy_(square_now)
    wide = weight.float() if master is None else master
    wide = wide - rate * mean_now / ((square_now / square_correction).sqrt() + EPS)
    if master is not None:
        master.copy_(wide)
        weight.copy_(wide)
    elif weight.dtype == torch.bfloat16:
        weight.copy_(_round_stochastically(wide, seed))
    else:
        weight.copy_(wide)


def _round_stochastically(wide: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
    """Round fp32 to bf16, up or down at random, so that the mean of many roundings is right.

    Random bits are added to the 16 bits that bf16 does not keep, which are then cut off. They come
    from `_hash` with `seed`, or from PyTorch's generator where `seed` is None.
    """
    if seed is None:
        noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device)
    else:
        noise = _hash(torch.arange(wide.numel(), dtype=torch.int32, device=wide.device), seed)
    bits = (wide.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).bfloat16()


def _hash(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return 16 bits that look random for each int32 of x.

    The steps are the finalizer of MurmurHash3 for 32 bits, with its multipliers as signed numbers;
    the masks make arithmetic shifts logical ones.
    """
    x = x ^ (seed * -1640531527)
    x = (x ^ (x >> 16 & 0xFFFF)) * -2048144789
    x = (x ^ (x >> 13 & 0x7FFFF)) * -1028477387
    return x >> 16 & 0xFFFF
