"""A rival's whole step, forward and backward passes, clipping and update, as one CUDA graph. Nothing of the library is
used."""

import torch
from torch import nn


def compile_parts(model: nn.Module, how: str, **options) -> None:
    """Compile a model of this package in place: "whole", each of its "layers" by itself, or "none" of it. By layers,
    what stands before and after them is compiled by itself, too."""
    if how == "whole":
        model.compile(**options)
    elif how == "layers":
        for layer in model.layers if hasattr(model, "layers") else model.blocks:
            layer.compile(**options)
        model.embed = torch.compile(model.embed, **options)
        model.loss = torch.compile(model.loss, **options)
    elif how != "none":
        raise ValueError(f"compile {how!r} is none of whole, layers, none")


class Step:
    """Steps of as many micro-batches as `example` has, each with tensors of the same shapes.

    The update is that of `optimizer`, one of peers/adamw.py. With `graph`, all of a step is captured once and
    replayed; the first steps, which compile, train as well.
    """

    WARM_UP = 3  # steps before the capture

    def __init__(
        self, model: nn.Module, optimizer, example: list[dict], autocast: bool, graph: bool
    ):
        self.model, self.optimizer = model, optimizer
        self.device = optimizer.parameters[0].device
        self.autocast = autocast
        self.inputs = [
            {name: t.to(self.device, copy=True) for name, t in part.items()} for part in example
        ]
        self.graph = None
        self.steps = 0
        if graph:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.steps = self.WARM_UP
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._run()

    def __call__(self, batches: list[dict]) -> torch.Tensor:
        """The mean loss, which stays on the device. `batches` may be in pinned memory."""
        for own, given in zip(self.inputs, batches, strict=True):
            for name, tensor in given.items():
                own[name].copy_(tensor, non_blocking=True)
        self.steps += 1
        if self.graph is None:
            return self._run()
        self.graph.replay()
        return self.loss.clone()

    def _run(self) -> torch.Tensor:
        """A step over `inputs`: the mean loss. Gradients of micro-batches are added up by few kernels."""
        total, gradients = torch.zeros((), device=self.device), None
        for part in self.inputs:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False
            ):
                loss = self.model(**part) / len(self.inputs)
            found = torch.autograd.grad(loss, self.optimizer.parameters)
            gradients = found if gradients is None else torch._foreach_add(gradients, found)
            total += loss.detach()
        self.optimizer.step(list(gradients))
        return total
