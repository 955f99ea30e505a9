"""The optimizer step of one's own loop as a CUDA graph (train/cuda_graph.py says what that is)."""

from collections.abc import Callable, Mapping

import torch

from qa_lib.calls import expect
from qa_lib.errors import UserError, first_line
from qa_lib.train.cuda_graph import CapturedStep
from qa_lib.train.master_adamw import MasterAdamW


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that a model of transformers computes itself.

    Raises UserError where it computes none.
    """
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise UserError(
            f"the model returns no loss for {', '.join(batch)}: give the batch labels, "
            "or GraphedStep(..., loss=...) a function that computes it"
        )
    return loss


class GraphedStep:
    """A step of a training, called with a batch: forward, backward, clipping, update, one launch.

    The first three calls run as they are, the fourth is captured, and from then on the graph is
    replayed; each is a step on its own batch. `loss(model, batch)` returns a tensor of no
    dimension, by default `model(**batch).loss`. `max_norm` clips the gradients, None leaves them.
    A batch is a dict of tensors on the model's device, whose shapes are those of the first one:
    `pack(..., drop_last=True)` gives such batches, and so does padding to one length. Learning
    rates are moved to the device, where schedulers go on writing them. Without `capture` the same
    step runs uncaptured, on any device and with batches of any shapes.

    Raises UserError for a model that is not on CUDA, an optimizer that cannot be captured or holds
    no parameters, a loss that is not one number, a batch of other shapes, and a step that waits for
    the device.

        import torch
        from qa_lib import GraphedStep, MasterAdamW

        model.to(torch.bfloat16)
        optimizer = MasterAdamW(model.parameters(), lr=2e-5)
        step = GraphedStep(model, optimizer, max_norm=1.0, capture=torch.cuda.is_available())
        for batch in loader:
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            loss = step(batch)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, dict], torch.Tensor] = loss_of,
        max_norm: float | None = None,
        capture: bool = True,
    ):
        expect("optimizer", optimizer, torch.optim.Optimizer, "GraphedStep(model, optimizer)")
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.max_norm = max_norm
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self.parameters:
            name = type(optimizer).__name__
            raise UserError(f"the {name} holds no parameters: {name}(model.parameters())")
        if not set(self.parameters) & set(model.parameters()):
            name = type(optimizer).__name__
            raise UserError(
                f"the {name} holds no parameter of this model, but those of another: "
                f"{name}(model.parameters())"
            )
        self.captures = capture
        self.device = self.parameters[0].device
        self.shapes: dict[str, tuple] | None = None
        self.take_step = self._step
        self.rates: list[torch.Tensor] = []
        if capture:
            check_capture(self.device, optimizer)
            self.rates = rates_on_device(optimizer, self.device)
            self.take_step = CapturedStep(self._step)

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Do a step on a batch, and return its loss, which stays on the device."""
        self._check_batch(batch)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=False):
            if group["lr"] is not rate:  # set by hand
                rate.fill_(float(group["lr"]))
                group["lr"] = rate
        try:
            return self.take_step([batch])
        except RuntimeError as problem:
            if not self.rates or isinstance(problem, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"the step cannot be captured: {first_line(problem)} (what waits for the device, "
                "as .item() and printing do, has to come after the step)"
            ) from problem

    def _step(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Do the step on the only batch of a list."""
        (batch,) = batches
        loss = self.loss(self.model, batch)
        _check_loss(loss)
        loss.backward()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _check_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Raise UserError for a batch that is elsewhere, or of other shapes than those captured."""
        expect("the batch", batch, Mapping, "give a dict of tensors")
        for name, tensor in batch.items():
            if not torch.is_tensor(tensor) or tensor.device != self.device:
                where = tensor.device if torch.is_tensor(tensor) else f"a {type(tensor).__name__}"
                raise UserError(
                    f"{name} of the batch is {where}, and the model is on {self.device}: "
                    f"move it there, or leave it out"
                )
        if not self.captures:
            return
        shapes = shapes_of(batch)
        if self.shapes is None:
            self.shapes = shapes
        changed = [
            name for name in shapes | self.shapes if shapes.get(name) != self.shapes.get(name)
        ]
        if changed:
            name = changed[0]
            raise UserError(
                f"{name} of the batch has shape {shapes.get(name)}, and in the first batch "
                f"{self.shapes.get(name)}: a captured step takes one shape, "
                "pack(..., drop_last=True) or padding='max_length'"
            )


def _check_loss(loss: torch.Tensor) -> None:
    """Raise UserError for a loss that has no gradient, since it is not one number in a tensor."""
    wanted = "give GraphedStep(..., loss=...) a function that returns its mean, in a tensor"
    expect("the loss", loss, torch.Tensor, wanted)
    if loss.numel() != 1:
        raise UserError(f"the loss has shape {tuple(loss.shape)}: {wanted}")


def shapes_of(batch: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Return the shape of each tensor of a batch."""
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def check_capture(
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    uncaptured: str = "capture=False",
) -> None:
    """Raise UserError where a step on a device, by an optimizer, cannot be captured.

    Its message says that `uncaptured` is the argument for a step that is not.
    """
    if device.type != "cuda":
        raise UserError(
            f"a step is captured on CUDA alone, and the model is on {device.type}: move it to a "
            f"GPU, or leave the step uncaptured ({uncaptured})"
        )
    why = optimizer and why_not_captured(optimizer)
    if why:
        raise UserError(why)


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why steps of an optimizer cannot be captured; None if they can."""
    if isinstance(optimizer, MasterAdamW):
        return None
    if all(group.get("capturable") for group in optimizer.param_groups):
        return None
    name = type(optimizer).__name__
    if all("capturable" in group for group in optimizer.param_groups):
        return (
            f"{name} counts its steps on the host, which a captured step cannot: "
            f"{name}(..., capturable=True), or MasterAdamW for weights in half precision"
        )
    return f"{name} cannot be captured: take AdamW(..., capturable=True), or MasterAdamW"


def rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """Make the learning rate of each group a tensor on the device; return these.

    Schedulers write into a rate that is a tensor.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    return [group["lr"] for group in optimizer.param_groups]
