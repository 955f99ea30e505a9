"""A whole optimizer step as one CUDA graph: one launch for the host (variant E-graph).

A step of BERT-base is some 1,700 kernels, each launched by Python, PyTorch and the driver in turn.
Where the host needs longer for that than the GPU for the kernels, the GPU waits. A CUDA graph
records the launches of one step and replays all of them at once. The price: every replay is the
same kernels on the same addresses, so shapes stay the same (packed sequences see to that), inputs
are copied into the recorded ones, and nothing in the step may wait for the device. Every GPU that
PyTorch supports can do it.
"""

from collections.abc import Callable

import torch

# Steps before the capture: the compiler, cuBLAS and the optimizer's state must have settled.
WARM_UP = 3


class CapturedStep:
    """Calls `step(inputs, *fixed) -> loss` WARM_UP times, then captures it and replays the graph.

    `inputs` is a list of dicts of device tensors whose shapes stay the same; what is `fixed` stays
    as it was at the capture; `step` must not wait for the device. Each call is a real step on its
    own inputs: a capture runs nothing, and the first replay follows it at once. Dropout draws new
    numbers in every replay, since PyTorch's generator is registered with the graph.
    """

    def __init__(self, step: Callable[..., torch.Tensor]):
        self.step = step
        self.calls = 0
        self.stream = torch.cuda.Stream()

    def __call__(self, inputs: list[dict[str, torch.Tensor]], *fixed) -> torch.Tensor:
        """Do one step, and return its loss, a tensor of its own on the device."""
        self.calls += 1
        if self.calls <= WARM_UP:
            return self._warm_up(inputs, *fixed)
        if self.calls == WARM_UP + 1:
            self._capture(inputs, *fixed)
        else:
            # By name: another batch may have them in another order.
            in_order = [
                {name: new[name] for name in part}
                for part, new in zip(self.inputs, inputs, strict=True)
            ]
            torch._foreach_copy_(_tensors(self.inputs), _tensors(in_order))
        self.graph.replay()
        return self.loss.clone()

    def _warm_up(self, inputs, *fixed) -> torch.Tensor:
        """Do a step on the stream of the capture, without capturing it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(inputs, *fixed)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _capture(self, inputs, *fixed) -> None:
        """Record a step on copies of the inputs; nothing runs."""
        self.inputs = [{name: tensor.clone() for name, tensor in part.items()} for part in inputs]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may ask CUDA meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.loss = self.step(self.inputs, *fixed)


def _tensors(inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return all tensors of a list of dicts, in order."""
    return [tensor for part in inputs for tensor in part.values()]
