"""The A0 and P0 variants: the same training through transformers.Trainer, timed by the same meter.

This is what the loop is measured against: what most people would run, with its own order of the data, its own
optimizer (fused AdamW) and its own schedule. Its variants take what the Trainer offers and no more; what it has not,
packed sequences or a CUDA graph, is refused by qa_lib/spec/rules.py. It does not resume.

Under torchrun it takes DistributedDataParallel by itself (variant P0). Given a DeepSpeed configuration, it leaves the
step to DeepSpeed's engine (variant P0-deepspeed). Slides that this lab began with took that for a pipeline, but it is
ZeRO stage 1 (Rajbhandari et al. 2020): every process has the whole model and its own micro-batches, and a share of the
optimizer. DeepSpeed's mixed precision is no autocast: weights and gradients are in half precision, and the optimizer
has masters."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from qa_lib.data.batches import Batches
from qa_lib.measure.hardware import polled_utilization
from qa_lib.measure.meter import Hooks, Meter
from qa_lib.spec.spec import Spec
from qa_lib.train.optim import CLIP, peak_rate
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.step_log import StepLog

# Its "auto" is what the TrainingArguments say. The optimizer is the Trainer's own, so that DeepSpeed compiles none.
DEEPSPEED = str(Path(__file__).with_name("deepspeed.json"))


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    run_dir: Path,
    say,
    hooks: Hooks,
    ranks: ProcessGroup,
) -> tuple[torch.optim.Optimizer, Meter, int, None]:
    """As loop.train."""
    settings = spec.settings
    meter = Meter(ranks.device, spec.preset.measure_from)
    log = StepLog(run_dir, spec, batches.steps, 0, torch.amp.GradScaler(enabled=False), ranks, say)
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        max_steps=batches.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=spec.micro_batches // ranks.world,
        learning_rate=peak_rate(spec),
        lr_scheduler_type="linear",
        warmup_steps=int(spec.preset.warmup * batches.steps),
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        fp16=settings.precision == "fp16",
        bf16=settings.precision == "bf16",
        seed=spec.seed,
        use_cpu=ranks.device.type == "cpu",
        dataloader_drop_last=True,
        remove_unused_columns=False,
        train_sampling_strategy="group_by_length" if settings.group_by_length else "random",
        torch_compile_backend=settings.compile if settings.compile != "none" else None,
        save_strategy="no",
        logging_strategy="no",
        deepspeed=DEEPSPEED if settings.parallel == "deepspeed" else None,
        disable_tqdm=True,
        report_to="none",
    )
    arguments._n_gpu = (
        1  # with more in sight the Trainer would take them all, and multiply the batch
    )
    lengths = batches.samples.lengths
    numbers = Dataset.from_dict({"sample": range(len(lengths)), "length": lengths})
    trainer = _MeteredTrainer(
        model=model, args=arguments, train_dataset=numbers, data_collator=_Collator(batches)
    )
    trainer.parts = []
    trainer.add_callback(
        _Steps(trainer, meter, log, hooks, polls=settings.fault == "nvidia-smi-polling")
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    # What was called in each step, whatever was asked for; inside what torch.compile puts around it.
    trained = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    ranks.wrapper = None if trained is model else type(trained).__name__
    return trainer.optimizer, meter, 0, None


class _Collator:
    """Sample numbers to model inputs, remembering which they were."""

    def __init__(self, batches: Batches):
        self.batches, self.seen = batches, []

    def __call__(self, numbers: list[dict]) -> dict[str, torch.Tensor]:
        self.seen.append(np.array([number["sample"] for number in numbers]))
        return self.batches.collate(self.seen[-1], torch.device("cpu"))


class _MeteredTrainer(Trainer):
    """Keeps in `parts` the loss of each micro-batch of the step; the last step of an epoch may have fewer of them."""

    def training_step(self, *args, **kwargs):
        self.rate = self.optimizer.param_groups[0][
            "lr"
        ]  # when the callback is called, the scheduler has set the next
        self.parts.append(super().training_step(*args, **kwargs))
        return self.parts[-1]


class _Steps(TrainerCallback):
    """Notes each step; and `polls` as the slides' students watched their GPUs: every process starts nvidia-smi after
    every step, and waits for it."""

    def __init__(
        self, trainer: _MeteredTrainer, meter: Meter, log: StepLog, hooks: Hooks, polls: bool
    ):
        self.trainer, self.meter, self.log, self.hooks, self.polls = (
            trainer,
            meter,
            log,
            hooks,
            polls,
        )

    def on_train_begin(self, args, state, control, **kwargs):
        self.meter.resume()

    def on_step_end(self, args, state, control, **kwargs):
        if self.polls:
            self.meter.polled.append(polled_utilization())
        collator, parts = self.trainer.data_collator, self.trainer.parts
        micro_batches = [collator.seen.pop(0) for _ in parts]
        self.log.step(
            self.meter, collator.batches.tokens(micro_batches), sum(parts), self.trainer.rate
        )
        parts.clear()
        self.hooks.finished(state.global_step)
