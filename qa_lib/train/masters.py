"""AdamW for weights in half precision: fp32 masters and moments beside them, updated in one pass (row E5).

Mixed precision usually keeps the weights in fp32 and casts each of them to half precision in every forward pass. Here
the model itself is in bf16: no casts, and weights, gradients and activations of half the bytes. What that would lose
is in the update. bf16 has 8 bits of mantissa, so a step smaller than 1/256 of a weight, as most are in fine-tuning,
rounds to nothing. The optimizer therefore keeps an fp32 copy of each weight, the master (Micikevicius et al. 2018): the
step is added to the master, and the weight is the master's rounding.

An optimizer's step does little arithmetic on much memory. Written plainly it runs some ten kernels, each of which reads
and writes every parameter; compiled, it is one pass that reads gradient, master and moments once.
"""

import torch


class MasterAdamW(torch.optim.Optimizer):
    """AdamW without weight decay (Kingma and Ba 2015, Loshchilov and Hutter 2019) over fp32 copies of the parameters.

    A master begins as the parameter is when the optimizer is made, so with the bits that a cast to half precision has
    left. Nothing waits for the device: rate and step count are tensors on it. Gradients are taken as if clipped to the
    norm `max_norm`, which saves clip_grad_norm_ its pass over them.
    """

    def __init__(self, parameters, lr: torch.Tensor, max_norm: float, betas=(0.9, 0.999), eps: float = 1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})
        self.max_norm = max_norm
        self.across = lambda norm: norm  # of all gradients, where it has a share of them (train/parallel.py)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "master": parameter.detach().float().clone(),
                    "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
                    "step": torch.zeros((), device=parameter.device),
                }

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of every parameter that has a gradient."""
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = torch._foreach_norm([p.grad for p in every], 2, dtype=torch.float32)
        norm = self.across(torch.stack(norms).norm())
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            columns = [[state[name] for state in states] for name in ("master", "exp_avg", "exp_avg_sq", "step")]
            gradients = [p.grad for p in parameters]
            _update(parameters, gradients, *columns, factor, group["lr"], *group["betas"], group["eps"])


@torch.compile(dynamic=False)
def _update(parameters, gradients, masters, means, squares, steps, factor, lr, beta1, beta2, eps) -> None:
    torch._foreach_add_(steps, 1)
    gradients = [g.float() * factor for g in gradients]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    step = steps[0]  # all parameters are updated in every step
    size = lr / (1 - beta1**step)
    roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**step))
    torch._foreach_add_(roots, eps)
    moves = torch._foreach_mul(torch._foreach_div(means, roots), size)
    torch._foreach_sub_(masters, moves)
    torch._foreach_copy_(parameters, masters)
