"""Training as a good engineer writes it in plain PyTorch (variants E-plain, E-searched and so on).

The models are the rivals of qa_lib/peers. They get what the loop's models get, the same batches and
the same schedule of the learning rate, and are timed by the same meter. They are trained by
torch.compile, bf16, fused AdamW and clipping, and by nothing of this library: with `precision` bf16
by autocast, with pure-bf16 in weights and moments, too. With the engine `searched` they have all
that peers/search.py found to pay (`SearchedStep`). These runs do not resume.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import torch

from qa_lib.data.batches import Batches
from qa_lib.measure.meter import PEAK_FROM, Hooks, Meter
from qa_lib.peers.adamw import CompiledAdamW
from qa_lib.peers.bert import Bert
from qa_lib.peers.gpt2 import GPT2
from qa_lib.peers.mpnet import MPNet
from qa_lib.peers.step import Step, compile_parts
from qa_lib.spec.settings import Settings
from qa_lib.spec.spec import Spec
from qa_lib.train.optim import CLIP, learning_rate, peak_rate, set_rate
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.step_log import StepLog
from qa_lib.train.trained import Trained

# Options of the models, of which the search found that they pay.
SEARCHED_BERT = {"blend_types": True, "drawn_at_once": True}
# Those of BERT; what concerns attention is a guess, since no search has been run.
SEARCHED_MPNET = {"calls": 4, "drawn_at_once": True}
SEARCHED_GPT2 = {"align": 64, "loss": "chunked", "drawn_at_once": True}


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    run_dir: Path,
    say: Callable[[str], None],
    hooks: Hooks,
    ranks: ProcessGroup,
) -> Trained:
    """Train a peer from the weights of `model`, which gets the peer's weights at the end.

    Arguments and results are those of loop.train.
    """
    settings = spec.settings
    device = ranks.device
    searched = settings.engine == "searched"
    dropout = 0.0 if settings.dropout == "none" else 0.1
    if spec.preset.task == "lm":
        peer = GPT2(model, dropout, **(SEARCHED_GPT2 if searched else {}))
    elif model.config.model_type == "mpnet":
        options = SEARCHED_MPNET if searched else {}
        peer = MPNet(model, dropout, batches.longest.tolist(), **options)
    else:
        options = SEARCHED_BERT if searched else {}
        peer = Bert(model, dropout, max(batches.limits), **options)
    _copy(peer.pairs(model))
    peer.to(device, torch.bfloat16 if settings.precision == "pure-bf16" else None).train()
    if searched:
        example = [batches.collate(samples, device) for samples in batches.step(0)]
        # The memory's peak is that of the capture: a replay allocates nothing that would be seen.
        peak_from = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        step = SearchedStep(peer, settings, peak_rate(spec), example)
        compiled_s = time.perf_counter() - begun
    else:
        peak_from = PEAK_FROM
        compiled_s = 0.0  # it is compiled in its first steps
        step = PlainStep(peer, settings.precision, settings.compile, peak_rate(spec))
    torch.manual_seed(spec.seed)
    scaler = torch.amp.GradScaler(enabled=False)
    log = StepLog(run_dir, spec, batches.steps, begin=0, scaler=scaler, ranks=ranks, say=say)
    until = batches.steps - hooks.untimed_steps
    meter = Meter(device, spec.preset.measure_from, peak_from, until)
    meter.compiled_before_s = compiled_s
    for number in range(1, batches.steps + 1):
        rate = learning_rate(spec, number - 1, batches.steps)
        micro_batches = batches.step(number - 1)
        step.set_rate(rate)
        loss = step([batches.collate(samples, device) for samples in micro_batches])
        log.step(meter, batches.tokens(micro_batches), loss, rate)
        hooks.finished(number)
    model.to(device, peer.norm.weight.dtype)
    _copy((weight, peer_weight) for peer_weight, weight in peer.pairs(model))
    return Trained(step.optimizer, meter)


class PlainStep:
    """Forward and backward passes of micro-batches of one size, and an update.

    `precision` and `compiler` are those of Settings, `rate` is the first learning rate.
    """

    def __init__(self, model: torch.nn.Module, precision: str, compiler: str, rate: float):
        self.model = model
        self.device = model.norm.weight.device
        self.autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=precision == "bf16"
        )
        if compiler == "none":
            self.forward = model
        elif compiler == "reduce-overhead":
            # This mode replays the passes as CUDA graphs.
            self.forward = torch.compile(model, mode="reduce-overhead")
        else:
            self.forward = torch.compile(model)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            # A tensor on the device takes a new value without being compiled anew.
            rate = torch.tensor(rate, device=self.device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, weight_decay=0.0, fused=True, capturable=on_gpu
        )

    def set_rate(self, rate: float) -> None:
        """Take another learning rate."""
        set_rate(self.optimizer, rate)

    def __call__(self, micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Do one step on model inputs on the device; return the mean loss, which stays there."""
        accumulates = len(micro_batches) > 1
        if accumulates:
            # Otherwise the first one's gradients are in a CUDA graph's memory, which the replay for
            # the next one overwrites.
            for weight in self.model.parameters():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        mean_loss = torch.zeros((), device=self.device)
        for inputs in micro_batches:
            with self.autocast:
                loss = self.forward(**inputs) / len(micro_batches)
            loss.backward()
            mean_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not accumulates)
        return mean_loss


class SearchedStep:
    """The step that peers/search.py found to be the quickest, on a peer in bf16.

    Weights are rounded at random when they are updated, in a few compiled kernels, and with
    `cuda_graph` the whole step is one CUDA graph. `example` are micro-batches of the shapes that
    all steps have. `optimizer` has what is measured of PyTorch's: state and groups of parameters.
    """

    def __init__(self, model: torch.nn.Module, settings: Settings, rate: float, example: list):
        compiled = settings.compile != "none"
        self.update = CompiledAdamW(model, rate, hashed=True, together=True, compiled=compiled)
        if compiled:
            compile_parts(model, "layers" if isinstance(model, GPT2) else "whole", dynamic=False)
        # The steps before a capture train as well: what they change is put back.
        trained = [*model.parameters(), *self.update.tensors()]
        before = [tensor.detach().clone() for tensor in trained]
        self.step = Step(model, self.update, example, autocast=False, graph=settings.cuda_graph)
        _copy(zip(trained, before, strict=True))
        self.optimizer = SimpleNamespace(
            state={
                number: {"moments": moments} for number, moments in enumerate(self.update.moments())
            },
            param_groups=[],
        )

    def set_rate(self, rate: float) -> None:
        """Take another learning rate."""
        self.update.rate.fill_(rate)

    def __call__(self, micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Do one step on model inputs on the device; return the mean loss, which stays there."""
        return self.step(micro_batches)


@torch.no_grad()
def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    for target, source in pairs:
        target.copy_(source)
