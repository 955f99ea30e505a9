"""Communication beside computation: what processes send each other while their GPUs compute.

Variants P-overlap and P-overlap-zero1 have it.

The backward pass makes the gradients of the last layers first, and nobody needs those before the
optimizer. So they are sent while the layers below are still at work, a region of the model at a
time (model/packed.py), each compiled by itself: a model that is compiled as one has all its
gradients at the end. Only the lowest region, the embeddings, is left to wait for.

If the optimizer is sharded, the new weights travel last. The next step's forward pass needs those
of the lowest region first, so that the others can come while it computes.

A GPU does work beside other work if it is given on another *stream*. Between streams there is no
order but what is asked for: `SideStream.work` comes after all before it, `join` makes what follows
wait. It is not free: whatever runs beside the backward pass takes some of the GPU's processors and
memory bandwidth from it.
"""

import contextlib
import weakref
from collections.abc import Callable

import torch

from qa_lib.model.packed import RegionalModel, regions_of
from qa_lib.train.parallel.data_parallel import OneBucketDDP, flatten, square_norm, unflatten
from qa_lib.train.parallel.zero1 import FlatShard, Zero1


class SideStream:
    """Work that a GPU does beside the rest, on a stream of its own; a CPU does it at once."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def work(self) -> contextlib.AbstractContextManager:
        """Return a context for work that comes after all before it, and that nobody waits for."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)  # does nothing for None

    def event(self) -> torch.cuda.Event | None:
        """Return an event behind the work so far, for `join`; None on a CPU."""
        return self.stream.record_event() if self.stream else None

    def join(self, event: torch.cuda.Event | None = None) -> None:
        """Let what follows wait for the work, or for what of it came before an event."""
        if self.stream:
            torch.cuda.current_stream().wait_event(event or self.event())


class GradReadyHooks:
    """Calls `send(number)` when a backward pass has made all gradients of one of some lists.

    `lists` are lists of parameters, and `number` is the place of one of them among these.
    """

    def __init__(self, lists: list[list[torch.nn.Parameter]], send: Callable[[int], None]):
        self.lists = lists
        self.send = send
        # How many gradients of each list have not come; None while nobody waits for them.
        self.missing: list[int] | None = None
        # A hook lies in a parameter where Python's collector does not look, so that one that held
        # what holds the parameter would keep the whole model for good.
        hooks = weakref.proxy(self)
        for number, parameters in enumerate(lists):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: hooks.arrived(number)
                )

    @contextlib.contextmanager
    def awaited(self, last: bool):
        """Surround forward and backward pass of a micro-batch; gradients are awaited in the last.

        Raises RuntimeError where some of these have not come.
        """
        self.missing = [len(parameters) for parameters in self.lists] if last else None
        yield
        missing = sum(self.missing) if last else 0
        if missing:
            raise RuntimeError(
                f"{missing} of the model's parameters have no gradient, "
                "and their regions wait for them"
            )

    def arrived(self, number: int) -> None:
        """Take note that one more gradient of that list is there."""
        if self.missing:
            self.missing[number] -= 1
            if self.missing[number] == 0:
                self.send(number)


def split_by_region(
    parameters: list[torch.nn.Parameter], model: torch.nn.Module
) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of each of the model's regions, in order of the forward pass.

    A parameter of two regions has its gradient after the lower one, and goes with that. One of no
    region goes with the embeddings, the lowest.
    """
    regions = regions_of(model)
    region_of = dict.fromkeys(parameters, 0)
    for number, region in reversed(list(enumerate(regions))):
        for module in region:
            for parameter in module.parameters():
                if parameter in region_of:
                    region_of[parameter] = number
    return [[p for p in parameters if region_of[p] == number] for number in range(len(regions))]


class OverlapDDP(OneBucketDDP):
    """The gradients of each of the model's regions in one tensor.

    Its reduction begins as soon as all of them are there.
    """

    def __init__(self, model, ranks, settings):
        super().__init__(model, ranks, settings)
        self.regions = split_by_region(self.parameters, model)
        self.side_stream = SideStream(ranks.device)
        # For each region that was sent: its gradients in one tensor, their square norm, and its
        # parameters.
        self.sent = []
        self.grad_hooks = GradReadyHooks(self.regions if ranks.world > 1 else [], self._send)

    def micro_batch(self, last):
        return self.grad_hooks.awaited(last) if self.ranks.world > 1 else super().micro_batch(last)

    def _send(self, number: int) -> None:
        """Begin the reduction of a region's gradients."""
        region = self.regions[number]
        with self.side_stream.work():
            flat = flatten(region)
            square = square_norm(flat)
            self.sent.append((self.ranks.mean(flat), square, region))

    def reduce_grads(self):
        if self.ranks.world == 1:
            return super().reduce_grads()
        self.side_stream.join()
        for flat, _, region in self.sent:
            unflatten(flat, region)
        self.local_square_norm = sum(square for _, square, _ in self.sent)
        self.sent.clear()


class OverlapZero1(Zero1):
    """ZeRO-1 with a FlatShard for each of the model's regions.

    Gradients are reduced as soon as a region has all of them. The new weights come in the next
    step, while the regions below them compute: every process has only its part of them until then,
    or until `finish`.
    """

    has_all_weights = False

    def flatten_parameters(self):
        regions = split_by_region(self.parameters, self.model)
        self.by_region = {
            number: FlatShard(region, self.ranks) for number, region in enumerate(regions) if region
        }
        self.side_stream = SideStream(self.ranks.device)
        self.squares = []  # the square norms of the gradients that were sent
        self.grad_hooks = GradReadyHooks(regions, self._send)
        return list(self.by_region.values())

    def wrapped(self, forward):
        forward = super().wrapped(forward)
        if isinstance(forward, RegionalModel):
            forward.before = self._await
        return forward

    def begin(self):
        self.events = {}
        for number, flat_shard in self.by_region.items():
            with self.side_stream.work():
                flat_shard.all_gather_params()
                self.events[number] = self.side_stream.event()
        if self.settings.compile != "regional":
            self.side_stream.join()

    def _await(self, number: int) -> None:
        """Let the forward pass of a region wait for its weights."""
        if number in self.events:
            self.side_stream.join(self.events[number])

    def micro_batch(self, last):
        return self.grad_hooks.awaited(last)

    def _send(self, number: int) -> None:
        """Begin the reduction of a region's gradients."""
        with self.side_stream.work():
            self.squares.append(self.by_region[number].reduce_grads())

    def reduce_grads(self):
        self.side_stream.join()
        self.release_grads(self.squares)
        self.squares = []

    def all_gather_params(self):
        pass  # in `begin` of the next step

    def finish(self):
        super().all_gather_params()
