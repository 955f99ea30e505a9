"""The rivals of qa_lib/peers: training as a good engineer writes it in plain PyTorch (variants E-plain and L-plain).

They get what the loop gets, the same batches and the same schedule of the learning rate, and are timed by the same
meter. What they do with it is torch.compile, bf16, fused AdamW and clipping, and nothing of this library: with
`precision` bf16 by autocast, with pure-bf16 in weights and moments, too. They do not resume.
"""

from pathlib import Path

import torch

from qa_lib.data.batches import Batches
from qa_lib.measure.meter import Hooks, Meter
from qa_lib.peers.bert import Bert
from qa_lib.peers.gpt2 import GPT2
from qa_lib.spec.spec import Spec
from qa_lib.train.optim import CLIP, learning_rate, peak_rate, set_rate
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.step_log import StepLog


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    run_dir: Path,
    say,
    hooks: Hooks,
    ranks: ProcessGroup,
) -> tuple[torch.optim.Optimizer, Meter, int, None]:
    """As loop.train, for a model that stays as it is until the end."""
    settings, device = spec.settings, ranks.device
    dropout = 0.0 if settings.dropout == "none" else 0.1
    peer = (
        GPT2(model, dropout)
        if spec.preset.task == "lm"
        else Bert(model, dropout, max(batches.limits))
    )
    _copy(peer.pairs(model))
    peer.to(device, torch.bfloat16 if settings.precision == "pure-bf16" else None).train()
    step = PlainStep(peer, settings.precision, settings.compile, peak_rate(spec))
    torch.manual_seed(spec.seed)
    log = StepLog(run_dir, spec, batches.steps, 0, torch.amp.GradScaler(enabled=False), ranks, say)
    meter = Meter(device, spec.preset.measure_from)
    for number in range(1, batches.steps + 1):
        rate, micro_batches = (
            learning_rate(spec, number - 1, batches.steps),
            batches.step(number - 1),
        )
        set_rate(step.optimizer, rate)
        loss = step([batches.collate(samples, device) for samples in micro_batches])
        log.step(meter, batches.tokens(micro_batches), loss, rate)
        hooks.finished(number)
    model.to(device, peer.norm.weight.dtype)
    _copy((other, own) for own, other in peer.pairs(model))
    return step.optimizer, meter, 0, None


class PlainStep:
    """Forward and backward passes of micro-batches of one size, and an update."""

    def __init__(self, model: torch.nn.Module, precision: str, compiler: str, rate: float):
        self.model, self.device = model, model.norm.weight.device
        self.autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=precision == "bf16"
        )
        # The mode "reduce-overhead" replays the passes as CUDA graphs.
        mode = {"mode": "reduce-overhead"} if compiler == "reduce-overhead" else {}
        self.forward = model if compiler == "none" else torch.compile(model, **mode)
        cuda = self.device.type == "cuda"
        rate = (
            torch.tensor(rate, device=self.device) if cuda else rate
        )  # which a new value does not compile anew
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, weight_decay=0.0, fused=True, capturable=cuda
        )

    def __call__(self, micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The mean loss, which stays on the device; model inputs are on it."""
        total = torch.zeros((), device=self.device)
        if (
            len(micro_batches) > 1
        ):  # else the first one's gradients are in a CUDA graph's memory, which the next takes
            for weight in self.model.parameters():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for inputs in micro_batches:
            with self.autocast:
                loss = self.forward(**inputs) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=len(micro_batches) == 1)
        return total


@torch.no_grad()
def _copy(pairs) -> None:
    for to, source in pairs:
        to.copy_(source)
