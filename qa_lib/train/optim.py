"""AdamW for weights in half precision: fp32 masters and moments beside them, updated in one pass."""

import logging

import torch

from qa_lib.spec import Spec


class MasterAdamW(torch.optim.Optimizer):
    """AdamW without weight decay (Kingma and Ba 2015, Loshchilov and Hutter 2019) over fp32 copies of the parameters.

    Small steps would be lost in bf16's 8 bits of mantissa; the master keeps them, and the parameter is its rounding.
    It begins as the parameter is when the optimizer is made, so with the bits that a cast to half precision has left.
    All arithmetic is compiled into few kernels that read gradient, master and moments once. Nothing waits for the
    device: rate and step count are tensors on it. Gradients are taken as if clipped to the norm `max_norm`, which
    saves clip_grad_norm_ its pass over them.
    """

    def __init__(self, parameters, lr: torch.Tensor, max_norm: float, betas=(0.9, 0.999), eps: float = 1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})
        self.max_norm = max_norm
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
        share = (self.max_norm / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            columns = [[state[name] for state in states] for name in ("master", "exp_avg", "exp_avg_sq", "step")]
            gradients = [p.grad for p in parameters]
            _update(parameters, gradients, *columns, share, group["lr"], *group["betas"], group["eps"])


@torch.compile(dynamic=False)
def _update(parameters, gradients, masters, means, squares, steps, share, lr, beta1, beta2, eps) -> None:
    torch._foreach_add_(steps, 1)
    gradients = [g.float() * share for g in gradients]
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


CLIP = 1.0  # gradient norm


def learning_rate(spec: Spec, step: int, steps: int) -> float:
    """Linear warm-up from 0, then linear decay to 0, for a step counted from 0; the recipe's factor included."""
    factor = spec.recipe.lr_factor if spec.scale.recipe_rates else 1.0
    peak = spec.scale.learning_rate * factor
    warmup = int(spec.scale.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)


def build_optimizer(model: torch.nn.Module, spec: Spec) -> torch.optim.Optimizer:
    """AdamW without weight decay, as in the seeds, over what trains; in 8 bits for row C1.

    The 8-bit rule: both moments of tensors with at least 4,096 elements are 8-bit in blocks; smaller tensors and
    every embedding keep 32-bit moments, as bitsandbytes advises (embedding gradients are sparse and uneven).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = learning_rate(spec, 0, 1)
    if spec.settings.half_weights:
        return MasterAdamW(trained, lr=torch.tensor(lr, device=trained[0].device), max_norm=CLIP)
    if spec.settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    if spec.settings.optimizer == "fused":
        # Capturable: step count and rate stay on the device, and no step waits for it.
        cuda = trained[0].device.type == "cuda"
        rate = torch.tensor(lr, device=trained[0].device) if cuda else lr
        return torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True, capturable=cuda)
    # On import it warns of a 4-bit CPU kernel that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes  # only these rows need it, and its import is slow

    # One for the whole process, by the place of a parameter in its optimizer: it must forget an earlier model's, and
    # keep no module alive.
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=lr, weight_decay=0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.check_overrides()
    manager.module_weight_config_triple.clear()
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate, in place where a graph reads it from the device."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
