"""transformers.Trainer with the techniques: in a script, FastTrainer instead of Trainer.

The script stays as it is, and so do its steps: as many samples in each, the same schedule,
evaluation, checkpoints, resuming, gradient accumulation, `push_to_hub`. Evaluation has the padded
batches that the script's own collator makes, or transformers' own. What a script has that this
cannot take over, trainer_checks.py refuses.
"""

import contextlib
import copy
import inspect
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
from qa_lib.own.trainer_checks import (
    SuitedPadding,
    check_checkpoint,
    check_collator,
    check_columns,
    check_noise,
    check_padding,
    check_sampler,
    check_unpacked,
    name_of,
    short_name,
)
from qa_lib.train.cuda_graph import CapturedStep
from qa_lib.train.master_adamw import LOW_TYPES, MasterAdamW

# The optimizers of TrainingArguments whose place MasterAdamW takes.
ADAMW = ("adamw_torch", "adamw_torch_fused")
# Methods of a Trainer that decide on the optimizer.
OPTIMIZER_HOOKS = (
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs",
)
# What a DataLoader takes of TrainingArguments, where they begin with `dataloader_`. Some versions
# of transformers lack the last ones.
LOADER_OPTIONS = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "in_order",
)


class FastTrainer(Trainer):
    """A Trainer that speeds up its model, packs its training data and keeps masters of weights.

    Its arguments are those of Trainer, and four of its own: `packed` packs the training samples,
    `per_device_train_batch_size` in a sequence; give them untruncated or truncated, not padded.
    `half_weights` has the weights themselves in bf16 where the arguments say `bf16=True`, with
    MasterAdamW in place of AdamW, and no autocast; with any other optimizer they stay in fp32,
    under the Trainer's autocast. `cuda_graph` captures forward and backward pass of a micro-batch
    and clipping, for one GPU; a micro-batch of another shape, as the last may be, runs as it is.
    `say` takes a line on each thing that was done. Without a `data_collator` evaluation and
    prediction pad by that of transformers which suits the labels.

    Raises UserError where `speed_up` or `pack` does, where one process has several GPUs, for
    `cuda_graph` without one, and for what trainer_checks.py has: a collator that packing would
    leave out, padded samples, another training's checkpoint. Give an optimizer of your own as
    `optimizer_cls_and_kwargs`, or make it after `speed_up(model)`.

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
        data_collator: Callable | None = None,
        *more,
        packed: bool = True,
        half_weights: bool = True,
        cuda_graph: bool = False,
        say: Callable[[str], None] = print,
        **options,
    ):
        args = TrainingArguments("tmp_trainer") if args is None else args
        signature = inspect.signature(Trainer.__init__)
        given = signature.bind(self, model, args, data_collator, *more, **options).arguments
        optimizer, _ = given.get("optimizers") or (None, None)
        optimizer_class, _ = given.get("optimizer_cls_and_kwargs") or (type(optimizer), None)
        # All that can be refused is refused here, while the model is as it was.
        _check_devices(args, cuda_graph)
        if packed:
            check_collator(data_collator)
            check_noise(args)
            check_unpacked(given.get("train_dataset"))
            check_sampler(type(self))
        self.packed = packed
        self.say = say
        wants_half = half_weights and args.bf16
        self.why_not_half = self._why_no_masters(args, optimizer_class) if wants_half else None
        self.casts = wants_half and self.why_not_half is None
        if self.casts:
            # Weights in bf16 need no autocast, which would cast norms and losses to fp32 and back.
            args = copy.copy(args)
            args.bf16 = False
            args.mixed_precision = "no"
        if model is not None:
            model = self._prepared(model)
        with _no_autocast() if self.casts else contextlib.nullcontext():
            super().__init__(model, args, data_collator, *more, **options)
        if data_collator is None:
            self.data_collator = SuitedPadding(self.data_collator)
        self.captured = CapturedBackward(self) if cuda_graph else None
        self.flops_of_a_token: int | None = None

    def _why_no_masters(self, args: TrainingArguments, optimizer_class: Callable) -> str | None:
        """Return why the optimizer will keep no masters of weights; None if it is MasterAdamW.

        `optimizer_class` is that of the optimizer that was given, or a function that makes it;
        NoneType for none.
        """
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, MasterAdamW):
            return None
        if optimizer_class is not type(None):
            return f"the {name_of(optimizer_class)} that was given keeps no fp32 masters"
        own_class = type(self)
        for name in OPTIMIZER_HOOKS:
            if getattr(own_class, name) is not getattr(FastTrainer, name):
                return f"{own_class.__name__} has {name} of its own, which may keep no masters"
        if args.optim not in ADAMW:
            return f"optim is {args.optim.value}, which keeps no fp32 masters"
        return None

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
        elif self.why_not_half:
            kind = short_name(model.dtype)
            self.say(f"weights stay in {kind}, under the Trainer's autocast: {self.why_not_half}")
        return model

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple:
        """Return MasterAdamW where AdamW was asked for and weights are in half; else as Trainer."""
        if args.optim in ADAMW and model is not None and _is_in_half(model):
            betas = (args.adam_beta1, args.adam_beta2)
            return MasterAdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        return Trainer.get_optimizer_cls_and_kwargs(args, model)

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        """Make the optimizer, as Trainer does.

        Raises UserError where weights were cast to bf16 and it turns out to keep no masters, since
        it was set later.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        unwrapped = _unwrapped(optimizer)
        if self.casts and not isinstance(unwrapped, MasterAdamW):
            raise UserError(
                f"weights are in bf16, of which {type(unwrapped).__name__} keeps no masters: give "
                "it when FastTrainer is made, or FastTrainer(..., half_weights=False)"
            )
        return optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the state of a checkpoint; raise UserError for that of another training."""
        if checkpoint is not None:
            check_checkpoint(checkpoint, self.model, _unwrapped(self.optimizer))
        super()._load_optimizer_and_scheduler(checkpoint)

    def get_train_dataloader(self) -> DataLoader:
        """Return the training data, packed."""
        # A training asks for its data once, and may have another model than the last one.
        self.flops_of_a_token = None
        if self.captured is not None:
            self.captured.begin()
        if not self.packed or self.train_dataset is None:
            return super().get_train_dataloader()
        # Both may have been set since the trainer was made.
        check_unpacked(self.train_dataset)
        check_collator(self.data_collator)
        collator = self.data_collator
        if not isinstance(collator, PackedCollator):
            collator = PackedCollator()
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
        check_padding(dataset, self.model.config)
        if not args.remove_unused_columns:
            check_columns(dataset, collator.keep)
        strategy = getattr(args, "train_sampling_strategy", "random")
        if strategy != "random":
            self.say(f"train_sampling_strategy={strategy!r} is left out: packing deals at random")
        options = {
            name: getattr(args, f"dataloader_{name}")
            for name in LOADER_OPTIONS
            if hasattr(args, f"dataloader_{name}")
        }
        # In order: the packed sequences are in random order themselves, another in each epoch.
        loader = DataLoader(rows, batch_size=1, collate_fn=collator, **options)
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

    def floating_point_ops(self, inputs: dict) -> int:
        """Return what Trainer does, which counts all parameters anew in each step."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs:
            return super().floating_point_ops(inputs)
        if self.flops_of_a_token is None:
            self.flops_of_a_token = super().floating_point_ops({name: torch.empty(1)})
        return self.flops_of_a_token * inputs[name].numel()

    def _clip_grad_norm(self, model) -> torch.Tensor:
        """Clip gradients as Trainer does, and return their norm of before.

        The graph has done it where it can. Should Trainer call this method by another name one day,
        gradients are clipped twice by the same norm, which changes nothing but the time.
        """
        if self.captured is None or self.captured.norm is None:
            return super()._clip_grad_norm(model)
        return self.captured.norm

    def plain_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Do what `training_step` does, uncaptured."""
        return super().training_step(model, inputs, num_items_in_batch)


def _check_devices(args: TrainingArguments, cuda_graph: bool) -> None:
    """Raise UserError for GPUs that cannot be trained on as asked."""
    if args.n_gpu > 1:
        raise UserError(
            f"one process sees {args.n_gpu} GPUs: torchrun --nproc-per-node {args.n_gpu} "
            "SCRIPT, or CUDA_VISIBLE_DEVICES=0"
        )
    if cuda_graph:
        check_capture(args.device, uncaptured="cuda_graph=False")
        if args.world_size > 1:
            raise UserError("cuda_graph is for one process: its graph has no reduction")


def _is_in_half(model: PreTrainedModel) -> bool:
    """Return whether all weights that are trained are of one type, in half precision."""
    types = {p.dtype for p in model.parameters() if p.requires_grad}
    return len(types) == 1 and types <= set(LOW_TYPES)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer without what accelerate puts around it."""
    return getattr(optimizer, "optimizer", optimizer)


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
    Where a step has one micro-batch and no scaler of its loss, the graph clips them as well.
    """

    def __init__(self, trainer: FastTrainer, capture: Callable = CapturedStep):
        self.trainer = trainer
        self.capture = capture
        self.begin()

    def begin(self) -> None:
        """Capture anew: another training may have another model, and batches of another shape."""
        self.captured = self.capture(self._forward_backward)
        self.recorded: tuple | None = None
        self.parameters: list[torch.nn.Parameter] = []  # those that are trained
        self.gradients: list[torch.Tensor | None] = []
        # The norm of gradients before the graph clipped them, where it does; and that of the last
        # micro-batch, which may have run without the graph.
        self.norm_in_graph: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None

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
            self.norm = None
            return trainer.plain_step(model, inputs, num_items_in_batch)
        if not self.parameters:
            self.parameters = [p for p in model.parameters() if p.requires_grad]
        earlier = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.captured([inputs], model)
        self.norm = self.norm_in_graph
        if any(p.grad is not None for p in self.parameters):
            # Before the capture, and in it, the backward pass gives them; a replay does not.
            self.gradients = [p.grad for p in self.parameters]
        self._keep_gradients(earlier)
        return loss

    def _keep_gradients(self, earlier: list[torch.Tensor | None]) -> None:
        """Make the graph's gradients those of the parameters, or add them to `earlier` ones."""
        accumulates = self.trainer.args.gradient_accumulation_steps > 1
        of_each = zip(self.parameters, earlier, self.gradients, strict=True)
        for parameter, before, gradient in of_each:
            if before is not None and gradient is not None:
                parameter.grad = before.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient.clone() if accumulates else gradient
            else:
                parameter.grad = before

    def _forward_backward(self, micro_batches: list[dict], model) -> torch.Tensor:
        """Do both passes of the only micro-batch of a list, and clip; return its loss."""
        inputs = dict(micro_batches[0])
        loss = self.trainer.plain_step(model, inputs, inputs.pop("num_items_in_batch", None))
        if self._clips():
            most = self.trainer.args.max_grad_norm
            self.norm_in_graph = torch.nn.utils.clip_grad_norm_(self.parameters, most)
        return loss

    def _clips(self) -> bool:
        """Return whether the graph clips: the gradients are whole, and not scaled."""
        args = self.trainer.args
        return (
            bool(args.max_grad_norm)
            and args.gradient_accumulation_steps == 1
            and self.trainer.accelerator.scaler is None
        )
