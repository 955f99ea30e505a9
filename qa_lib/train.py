"""The training loop: every row but A0 runs through `train`."""

import json
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open

from qa_lib.batches import Batches
from qa_lib.measure import Meter
from qa_lib.record import RecordError
from qa_lib.variants import RECIPES, Spec

CLIP = 1.0  # gradient norm
LOG_EVERY = 10  # steps between two looks at the loss; each look waits for the device
INITIAL_SCALE = 2.0**16  # GradScaler's own default


class NonFiniteLoss(RuntimeError):
    """The loss is NaN or infinite and no smaller GradScaler scale can help. `step` counts from 1."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"loss is {loss} at step {step}")
        self.step = step


def learning_rate(spec: Spec, step: int, steps: int) -> float:
    """Linear warm-up from 0, then linear decay to 0, for a step counted from 0; the recipe's factor included."""
    peak = spec.scale.learning_rate * RECIPES[spec.settings.trainable].lr_factor
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
    if spec.settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    import bitsandbytes  # only these rows need it, and its import is slow

    optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=lr, weight_decay=0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(
                module, "weight", {"optim_bits": 32}
            )
    return optimizer


def train(
    model: torch.nn.Module, batches: Batches, spec: Spec, device: torch.device, run_dir: Path, say=print
) -> tuple[torch.optim.Optimizer, Meter, int]:
    """Train `model` in place for all of the batches' steps; resumes from the run's checkpoint if there is one.

    Writes steps.jsonl (a line a step: step, loss, lr, ms) and, as often as the scale says, a checkpoint into
    `run_dir`. Returns the optimizer, the meter, and the step it began at. Raises NonFiniteLoss.
    """
    settings, steps = spec.settings, batches.steps
    torch.manual_seed(spec.seed)
    model.to(device).train()
    optimizer = build_optimizer(model, spec)
    trained = [p for p in model.parameters() if p.requires_grad]
    mixed = settings.precision == "fp16"
    scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE, enabled=mixed)
    # The compiled callable shares the model's weights; evaluation goes on with the plain one. Where padding varies,
    # shapes are symbolic from the start, so that a new length does not compile again.
    forward = model
    if settings.compile != "none":
        forward = torch.compile(model, backend=settings.compile, dynamic=settings.padding != "max")

    checkpoint = Checkpoint(run_dir, spec, model, optimizer, scaler, device)
    begin = checkpoint.load()
    log = StepLog(run_dir, spec, steps, begin, device, scaler, say)
    meter = Meter(device, begin, spec.scale.measure_from)

    for step in range(begin, steps):
        rate = learning_rate(spec, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        micro_batches = batches.step(step)
        loss = torch.zeros((), device=device)
        for indices in micro_batches:
            inputs = batches.collate(indices, device)
            with torch.autocast(device.type, torch.float16, enabled=mixed):
                part = forward(**inputs).loss / len(micro_batches)
            scaler.scale(part).backward()
            loss += part.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        meter.step(*batches.counts(micro_batches))
        log.add(loss, rate)
        done = step + 1
        saves = spec.scale.checkpoint_every and done % spec.scale.checkpoint_every == 0 and done < steps
        if done % LOG_EVERY == 0 or done == steps or saves:
            log.write(meter.flush())
            if saves:
                checkpoint.save(done)
            meter.resume()
    return optimizer, meter, begin


class StepLog:
    """steps.jsonl of a run. Losses stay on the device until `write`, so that logging does not stall a step."""

    def __init__(self, run_dir: Path, spec: Spec, steps: int, begin: int, device: torch.device, scaler, say):
        self.path, self.steps, self.written, self.scaler, self.say = run_dir / "steps.jsonl", steps, begin, scaler, say
        self.pending = []
        self.label = f"{spec.variant} seed {spec.seed}"
        earlier = self.path.read_text().splitlines(keepends=True)[:begin] if begin and self.path.exists() else []
        self._append("".join(earlier), mode="w")

    def add(self, loss: torch.Tensor, rate: float) -> None:
        """Note a step's mean loss (a scalar on the device, not read yet) and its learning rate."""
        self.pending.append((loss, rate))

    def write(self, seconds: list[float]) -> None:
        """Write the noted steps with their durations; raise NonFiniteLoss if one cannot be excused.

        GradScaler is meant to skip steps that overflow in fp16, and halves its scale each time; only when it has
        come down to 1 and the loss still is not finite, the run is lost. In fp32 there is nothing to skip.
        """
        lines, broken = [], None
        excused = self.scaler.is_enabled() and self.scaler.get_scale() > 1.0
        for (loss, rate), duration in zip(self.pending, seconds, strict=True):
            self.written += 1
            value = float(loss)
            finite = value - value == 0.0
            lines.append(
                {"step": self.written, "loss": value if finite else None, "lr": rate, "ms": round(1e3 * duration, 4)}
            )
            if not finite and not excused and broken is None:
                broken = NonFiniteLoss(self.written, value)
        self._append("".join(json.dumps(line) + "\n" for line in lines))
        self.pending.clear()
        if broken:
            raise broken
        tenth = max(LOG_EVERY, self.steps // 10 // LOG_EVERY * LOG_EVERY)
        if self.written % tenth == 0 or self.written == self.steps:
            self.say(f"{self.label}: step {self.written}/{self.steps}, loss {value:.3f}")

    def _append(self, text: str, mode: str = "a") -> None:
        try:
            with self.path.open(mode) as stream:
                stream.write(text)
        except OSError as problem:
            raise RecordError(f"cannot write {self.path}: {problem.strerror}") from problem


class Checkpoint:
    """All that the rest of a run depends on, in one safetensors file that is replaced atomically.

    Trained parameters, optimizer state, GradScaler, random-number states and the step. Frozen parameters are not in
    it: the seed or the pretrained checkpoint gives them again.
    """

    def __init__(self, run_dir: Path, spec: Spec, model, optimizer, scaler, device: torch.device):
        self.path, self.hash = self.path_of(run_dir), spec.hash
        self.model, self.optimizer, self.scaler, self.device = model, optimizer, scaler, device

    def save(self, step: int) -> None:
        """Write the state after `step` optimizer steps. Raises RecordError when the disk is full."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        plain = {}
        for index, values in enumerate(self._states()):
            for key, value in values.items():
                if torch.is_tensor(value):
                    tensors[f"optimizer.{index}.{key}"] = value
                else:
                    plain[f"{index}.{key}"] = value
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        metadata = {
            "hash": self.hash,
            "step": step,
            "optimizer": plain,
            "scaler": self.scaler.state_dict(),
            # AdamW keeps its step counts on the CPU, where they must come back.
            "on_cpu": [name for name, tensor in tensors.items() if tensor.device.type == "cpu"],
        }
        temporary = self.path.with_suffix(".partial")
        try:
            # A copy each, since optimizers may let several states share storage, which safetensors refuses.
            tensors = {name: t.clone().contiguous() for name, t in tensors.items()}
            safetensors.torch.save_file(tensors, temporary, {"state": json.dumps(metadata)})
            temporary.replace(self.path)
        except (OSError, safetensors.SafetensorError) as problem:
            temporary.unlink(missing_ok=True)
            raise RecordError(f"cannot write {self.path}: {problem}; the checkpoint before it is intact") from problem

    def load(self) -> int:
        """Restore the state if this run left one; the number of steps already done, 0 without a checkpoint."""
        if not self.path.exists():
            return 0
        with safe_open(self.path, "pt") as stored:
            state = json.loads(stored.metadata()["state"])
            if state["hash"] != self.hash:
                return 0
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(tensors[f"model.{name}"])
        states = self._states()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                states[int(index)][key] = tensor if name in state["on_cpu"] else tensor.to(self.device)
        for name, value in state["optimizer"].items():
            index, key = name.split(".", 1)
            states[int(index)][key] = value
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
        return state["step"]

    def _states(self) -> list[dict]:
        """The optimizer's state of each trained parameter, in order; not through state_dict, whose form bitsandbytes
        changes."""
        return [self.optimizer.state[p] for group in self.optimizer.param_groups for p in group["params"]]

    @staticmethod
    def path_of(run_dir: Path) -> Path:
        """Where a run's checkpoint lies while it is unfinished."""
        return run_dir / "checkpoint.safetensors"
