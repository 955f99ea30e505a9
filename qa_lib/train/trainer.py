"""The same training through transformers.Trainer, timed by the same meter (variants A0 and P0).

It is what the loop is measured against: what most people would run, with its own order of the data,
its own optimizer (fused AdamW) and its own schedule. Its variants have the settings that the
Trainer offers and no more; packed sequences or a CUDA graph, which it does not have, are refused
when a run is planned. These runs do not resume.

Under torchrun the Trainer takes DistributedDataParallel by itself (variant P0). Given a DeepSpeed
configuration, it leaves the step to DeepSpeed's engine (variant P0-deepspeed). Slides that this lab
began with took that for a pipeline, but it is ZeRO stage 1 (Rajbhandari et al. 2020): every process
has the whole model and its own micro-batches, and a share of the optimizer. DeepSpeed's mixed
precision is no autocast: weights and gradients are in half precision, and the optimizer has fp32
masters of the weights.
"""

import os
from collections.abc import Callable
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
from qa_lib.train.trained import Trained

# What a search found to pay (peers/search_trainer.py) and no other setting stands for: the filter
# waits for the GPU in each step. Where the search always has four workers, there are no more here
# than the host has cores; all else is equal (tests/test_trainer.py).
TUNED = {
    "dataloader_num_workers": min(4, os.cpu_count()),
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 4,
    "logging_nan_inf_filter": False,
}
SAMPLES = "samples"  # the name of the samples' numbers beside the model's inputs
# Its "auto" is what the TrainingArguments say. The optimizer is the Trainer's own, so that
# DeepSpeed compiles none.
DEEPSPEED = str(Path(__file__).with_name("deepspeed.json"))


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    run_dir: Path,
    say: Callable[[str], None],
    hooks: Hooks,
    ranks: ProcessGroup,
) -> Trained:
    """Train `model` in place by a Trainer; arguments and results are those of loop.train."""
    settings = spec.settings
    until = batches.steps - hooks.untimed_steps
    meter = Meter(ranks.device, spec.preset.measure_from, until=until)
    scaler = torch.amp.GradScaler(enabled=False)
    log = StepLog(run_dir, spec, batches.steps, begin=0, scaler=scaler, ranks=ranks, say=say)
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        max_steps=batches.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=spec.micro_batches // ranks.world,
        learning_rate=peak_rate(spec),
        lr_scheduler_type="linear",
        warmup_steps=int(spec.preset.warmup * batches.steps),
        **(TUNED if settings.engine == "trainer-tuned" else {}),
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
    # With more GPUs in sight the Trainer would take them all, and multiply the batch.
    arguments._n_gpu = 1
    lengths = batches.samples.lengths
    trainer = _MeteredTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"sample": range(len(lengths)), "length": lengths}),
        data_collator=_Collator(batches),
    )
    trainer.add_callback(
        _Steps(trainer, meter, log, hooks, polls=settings.fault == "nvidia-smi-polling")
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    # The wrapper that was called in each step, whichever was asked for, without what torch.compile
    # puts around it.
    wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    ranks.wrapper = None if wrapped is model else type(wrapped).__name__
    return Trained(trainer.optimizer, meter)


class _Collator:
    """Makes model inputs of rows of the dataset, which have the numbers of samples.

    The numbers stand beside the inputs, as an array, since a worker may collate. They are taken out
    before the model is called.
    """

    def __init__(self, batches: Batches):
        self.batches = batches

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor | np.ndarray]:
        samples = np.array([row["sample"] for row in rows])
        inputs = self.batches.collate(samples, torch.device("cpu"))
        return {**inputs, SAMPLES: samples}


class _MeteredTrainer(Trainer):
    """A Trainer that keeps the samples and losses of a step's micro-batches, and its learning rate.

    The losses add up to the step's mean loss; the last step of an epoch may have fewer of them.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.micro_batches = []  # numbers of samples, an array for each micro-batch of the step
        self.losses = []
        self.rate = None

    def training_step(self, model, inputs, *args, **kwargs):
        # When the callback is called, the scheduler has set the next step's rate.
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.micro_batches.append(inputs.pop(SAMPLES))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.append(loss)
        return loss


class _Steps(TrainerCallback):
    """Tells meter, log and hooks of each step.

    With `polls` every process starts nvidia-smi after every step and waits for it, as the slides'
    students watched their GPUs.
    """

    def __init__(
        self, trainer: _MeteredTrainer, meter: Meter, log: StepLog, hooks: Hooks, polls: bool
    ):
        self.trainer = trainer
        self.meter = meter
        self.log = log
        self.hooks = hooks
        self.polls = polls

    def on_train_begin(self, args, state, control, **kwargs):
        self.meter.resume()

    def on_step_end(self, args, state, control, **kwargs):
        if self.polls:
            self.meter.polled_busy_shares.append(polled_utilization())
        trainer = self.trainer
        tokens = trainer.data_collator.batches.tokens(trainer.micro_batches)
        self.log.step(self.meter, tokens, sum(trainer.losses), trainer.rate)
        trainer.micro_batches.clear()
        trainer.losses.clear()
        self.hooks.finished(state.global_step)
