"""transformers.Trainer with the techniques: in a script, FastTrainer instead of Trainer.

The script stays as it is, and so do its steps: as many samples in each, the same schedule,
evaluation, checkpoints, resuming, gradient accumulation, `push_to_hub`. Evaluation has the padded
batches that the script's own collator makes.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments

from qa_lib.errors import UserError
from qa_lib.own.graphed_step import check_capture, shapes_of
from qa_lib.own.packing import PackedCollator, PackedDataset, pack
from qa_lib.own.speed_up import speed_up
from qa_lib.train.cuda_graph import CapturedStep
from qa_lib.train.master_adamw import LOW_TYPES, MasterAdamW

# The optimizers of TrainingArguments whose place MasterAdamW takes.
ADAMW = ("adamw_torch", "adamw_torch_fused")


class FastTrainer(Trainer):
    """A Trainer that speeds up its model, packs its training data and keeps masters of weights.

    Its arguments are those of Trainer, and four of its own: `packed` packs the training samples,
    `per_device_train_batch_size` in a sequence; give them untruncated or truncated, not padded.
    `half_weights` has the weights themselves in bf16 where the arguments say `bf16=True`, with
    MasterAdamW in place of AdamW, and no autocast. `cuda_graph` captures forward and backward pass
    of a micro-batch, for one GPU; a micro-batch of another shape, as the last may be, runs as it
    is. `say` takes a line on each thing that was done.

    Raises UserError where `speed_up` or `pack` does, where one process has several GPUs, and for
    `cuda_graph` without one.

        import torch
        from transformers import TrainingArguments
        from qa_lib import FastTrainer

        no_gpu = not torch.cuda.is_available()
        arguments = TrainingArguments("out", bf16=True, use_cpu=no_gpu, report_to="none")
        trainer = FastTrainer(model, arguments, train_dataset=tokenized)
        trainer.train()
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        *more,
        packed: bool = True,
        half_weights: bool = True,
        cuda_graph: bool = False,
        say: Callable[[str], None] = print,
        **options,
    ):
        args = TrainingArguments("tmp_trainer") if args is None else args
        if args.n_gpu > 1:
            raise UserError(
                f"one process sees {args.n_gpu} GPUs: torchrun --nproc-per-node {args.n_gpu} "
                "SCRIPT, or CUDA_VISIBLE_DEVICES=0"
            )
        self.packed = packed
        self.say = say
        self.casts = half_weights and args.bf16
        if self.casts:
            # Weights in bf16 need no autocast, which would cast norms and losses to fp32 and back.
            args = copy.copy(args)
            args.bf16 = False
            args.mixed_precision = "no"
        if model is not None:
            model = self._prepared(model)
        with _no_autocast() if self.casts else contextlib.nullcontext():
            super().__init__(model, args, *more, **options)
        self.captured = None
        if cuda_graph:
            check_capture(self.args.device)
            if self.args.world_size > 1:
                raise UserError("cuda_graph is for one process: its graph has no reduction")
            self.captured = CapturedBackward(self)

    def call_model_init(self, trial=None) -> PreTrainedModel:
        """Return the model that `model_init` makes, sped up."""
        return self._prepared(super().call_model_init(trial))

    def _prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a model sped up, with weights in bf16 where they shall be."""
        if not getattr(getattr(model, "base_model", None), "is_sped_up", False):
            speed_up(model, say=self.say)
        if self.casts:
            model.to(torch.bfloat16)
            self.say("weights in bf16, with fp32 masters in the optimizer")
        return model

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        """Make the optimizer: MasterAdamW where AdamW was asked for and weights are in half."""
        is_ours = self.optimizer is None and self.optimizer_cls_and_kwargs is None
        weights = {p.dtype for p in self.model.parameters() if p.requires_grad}
        in_half = len(weights) == 1 and weights <= set(LOW_TYPES)
        if is_ours and in_half and self.args.optim in ADAMW:
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            options = {"lr": self.args.learning_rate, "betas": betas, "eps": self.args.adam_epsilon}
            self.optimizer_cls_and_kwargs = (MasterAdamW, options)
        return super().create_optimizer(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """Return the training data, packed."""
        if self.captured is not None:
            self.captured.begin()  # a training asks for its data once
        if not self.packed or self.train_dataset is None:
            return super().get_train_dataloader()
        dataset = self.train_dataset
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        args = self.args
        rows = pack(
            dataset,
            samples=self._train_batch_size or args.train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            say=self.say,
        )
        # In order: the packed sequences are in random order themselves, another in each epoch.
        loader = DataLoader(
            rows,
            batch_size=1,
            collate_fn=PackedCollator(),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        return self.accelerator.prepare(loader)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Return how many samples an epoch has."""
        dataset = dataloader.dataset
        if isinstance(dataset, PackedDataset):
            return sum(map(len, dataset.rows))
        return super().num_examples(dataloader)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Do forward and backward pass of a micro-batch; return its loss."""
        if self.captured is None:
            return super().training_step(model, inputs, num_items_in_batch)
        return self.captured(model, inputs, num_items_in_batch)

    def plain_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Do what `training_step` does, uncaptured."""
        return super().training_step(model, inputs, num_items_in_batch)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Hide the variable by which some versions of transformers tell accelerate of bf16."""
    name = "ACCELERATE_MIXED_PRECISION"
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


class CapturedBackward:
    """Forward and backward pass of a Trainer's micro-batch as a CUDA graph.

    The graph leaves a micro-batch's gradients in memory of its own, where its next replay writes
    others. They become the parameters' gradients, or are added to those of earlier micro-batches.
    """

    def __init__(self, trainer: FastTrainer, capture: Callable = CapturedStep):
        self.trainer = trainer
        self.capture = capture
        self.begin()

    def begin(self) -> None:
        """Capture anew: another training may have another model, and batches of another shape."""
        self.captured = self.capture(self._forward_backward)
        self.recorded: tuple | None = None
        self.gradients: list[torch.Tensor | None] = []

    def __call__(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """Return the loss, and leave the gradients with the parameters."""
        trainer = self.trainer
        inputs = trainer._prepare_inputs(inputs)
        if torch.is_tensor(num_items_in_batch):
            inputs = inputs | {"num_items_in_batch": num_items_in_batch.to(trainer.args.device)}
        # A loss is divided by the number of micro-batches, which the last step may have fewer of.
        kind = (shapes_of(inputs), trainer.current_gradient_accumulation_steps)
        self.recorded = self.recorded or kind
        if kind != self.recorded:
            inputs.pop("num_items_in_batch", None)
            return trainer.plain_step(model, inputs, num_items_in_batch)
        parameters = [p for p in model.parameters() if p.requires_grad]
        earlier = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss = self.captured([inputs], model)
        if any(p.grad is not None for p in parameters):
            # Before the capture, and in it, the backward pass gives them; a replay does not.
            self.gradients = [p.grad for p in parameters]
        accumulates = trainer.args.gradient_accumulation_steps > 1
        for parameter, before, gradient in zip(parameters, earlier, self.gradients, strict=True):
            if before is not None and gradient is not None:
                parameter.grad = before.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient.clone() if accumulates else gradient
            else:
                parameter.grad = before
        return loss

    def _forward_backward(self, micro_batches: list[dict], model) -> torch.Tensor:
        """Do both passes of the only micro-batch of a list; return its loss."""
        inputs = dict(micro_batches[0])
        return self.trainer.plain_step(model, inputs, inputs.pop("num_items_in_batch", None))
