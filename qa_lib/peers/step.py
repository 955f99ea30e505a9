"""A rival's whole step as one CUDA graph: forward and backward passes, clipping and update.

This file imports nothing of the library.
"""

import torch
from torch import nn


def compile_parts(model: nn.Module, how: str, **options) -> None:
    """Compile a model of this package in place, with these options of torch.compile.

    `how` is "whole", "none", or "layers": then each layer is compiled by itself, and so is what
    stands before and after the layers.

    Raises ValueError: `how` is another word.
    """
    if how == "whole":
        model.compile(**options)
    elif how == "layers":
        layers = model.layers if hasattr(model, "layers") else model.blocks
        for layer in layers:
            layer.compile(**options)
        model.embed = torch.compile(model.embed, **options)
        model.loss = torch.compile(model.loss, **options)
    elif how != "none":
        raise ValueError(f"compile {how!r} is none of whole, layers, none")


class Step:
    """Does training steps on micro-batches of the number and the shapes of `example`.

    The update is that of `optimizer`, one of peers/adamw.py. With `autocast`, forward passes are in
    bf16. With `graph`, a whole step is captured once and then replayed; the steps before the
    capture, which compile, train as well.
    """

    WARM_UP = 3  # steps before the capture

    def __init__(
        self, model: nn.Module, optimizer, example: list[dict], autocast: bool, graph: bool
    ):
        self.model = model
        self.optimizer = optimizer
        self.device = optimizer.parameters[0].device
        self.autocast = autocast
        self.inputs = [
            {name: t.to(self.device, copy=True) for name, t in part.items()} for part in example
        ]
        self.graph = None
        self.steps = 0  # done so far
        if graph:
            self._capture()

    def _capture(self) -> None:
        """Do the warm-up steps, then capture a step as a graph."""
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
        """Do a step on these micro-batches; return the mean loss, which stays on the device.

        `batches` may be in pinned memory.
        """
        for inputs, batch in zip(self.inputs, batches, strict=True):
            for name, tensor in batch.items():
                inputs[name].copy_(tensor, non_blocking=True)
        self.steps += 1
        if self.graph is None:
            return self._run()
        self.graph.replay()
        return self.loss.clone()

    def _run(self) -> torch.Tensor:
        """Do a step on what `inputs` hold and return the mean loss.

        The gradients of the micro-batches are added up by few kernels.
        """
        mean_loss = torch.zeros((), device=self.device)
        gradients = None
        for inputs in self.inputs:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False
            ):
                loss = self.model(**inputs) / len(self.inputs)
            new = torch.autograd.grad(loss, self.optimizer.parameters)
            gradients = new if gradients is None else torch._foreach_add(gradients, new)
            mean_loss += loss.detach()
        self.optimizer.step(list(gradients))
        return mean_loss
