"""Communication beside computation: what several processes send each other while their GPUs compute (variants P-overlap
and P-overlap-zero1).

The backward pass makes the gradients of the last layers first, and nobody needs those before the optimizer. So they are
sent while the layers below are still at work, a region of the model at a time (model/packed.py), each compiled by
itself: a model that is compiled as one has all its gradients at the end. What is left to wait for is the lowest region,
the embeddings.

With a sharded optimizer it is the new weights that travel last. The next step's forward pass needs those of the lowest
region first, so that the others can come while it computes.

A GPU does work beside other work if it is given on another *stream*. Between streams there is no order but what is
asked for: `SideStream.work` comes after all before it, `join` makes what follows wait. It is not free: whatever runs
beside the backward pass takes some of the GPU's processors and memory bandwidth from it.
"""

import contextlib
import weakref
from collections.abc import Callable

import torch

from qa_lib.model.packed import RegionalModel, regions_of
from qa_lib.train.data_parallel import OneBucketDDP, flatten, square_norm, unflatten
from qa_lib.train.zero1 import FlatShard, Zero1


class SideStream:
    """Work that the device does beside the rest: on a stream of its own, or on a CPU at once."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def work(self) -> contextlib.AbstractContextManager:
        """What is started inside comes after all that was started before, and what follows does not wait for it."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)  # nothing, of None

    def event(self) -> torch.cuda.Event | None:
        """An event behind the work so far, for `join`."""
        return self.stream and self.stream.record_event()

    def join(self, event: torch.cuda.Event | None = None) -> None:
        """Let what follows wait for the work, or for what of it came before an event."""
        if self.stream:
            torch.cuda.current_stream().wait_event(event or self.event())


class GradReadyHooks:
    """Calls `send(number)` as soon as a backward pass has made all gradients of one of some lists of parameters."""

    def __init__(self, lists: list[list[torch.nn.Parameter]], send: Callable[[int], None]):
        self.lists, self.send, self.missing = (
            lists,
            send,
            None,
        )  # of each list so many gradients, if they are awaited
        # A hook lies in a parameter where Python's collector does not look, so that one that held what holds the
        # parameter would keep the whole model for good.
        own = weakref.proxy(self)
        for number, parameters in enumerate(lists):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: own.arrived(number)
                )

    @contextlib.contextmanager
    def awaited(self, last: bool):
        """Around forward and backward pass of a micro-batch; `last` as in `micro_batch`. RuntimeError where some
        gradients have not come."""
        self.missing = list(map(len, self.lists)) if last else None
        yield
        if last and (missing := sum(self.missing)):
            raise RuntimeError(
                f"{missing} of the model's parameters have no gradient, and their regions wait for them"
            )

    def arrived(self, number: int) -> None:
        """One more gradient of that list is there."""
        if self.missing:
            self.missing[number] -= 1
            if self.missing[number] == 0:
                self.send(number)


def split_by_region(
    parameters: list[torch.nn.Parameter], model: torch.nn.Module
) -> list[list[torch.nn.Parameter]]:
    """Those of each of the model's regions, in order of the forward pass. A parameter of two regions is through with
    the lower one, and what is in none goes with the embeddings."""
    region_of, regions = dict.fromkeys(parameters, 0), regions_of(model)
    for number, region in reversed(list(enumerate(regions))):
        region_of |= {p: number for module in region for p in module.parameters() if p in region_of}
    return [[p for p in parameters if region_of[p] == number] for number in range(len(regions))]


class OverlapDDP(OneBucketDDP):
    """The gradients of each of the model's regions in one tensor, whose reduction begins as soon as all are there."""

    def __init__(self, model, ranks, settings):
        super().__init__(model, ranks, settings)
        self.regions = split_by_region(self.parameters, model)
        self.side_stream, self.sent = (
            SideStream(ranks.device),
            [],
        )  # gradients, their square norm, their region
        self.grad_hooks = GradReadyHooks(self.regions if ranks.world > 1 else [], self._send)

    def micro_batch(self, last):
        return self.grad_hooks.awaited(last) if self.ranks.world > 1 else super().micro_batch(last)

    def _send(self, number: int) -> None:
        with self.side_stream.work():
            flat = flatten(self.regions[number])
            own = square_norm(flat)
            self.sent.append((self.ranks.mean(flat), own, self.regions[number]))

    def reduce_grads(self):
        if self.ranks.world == 1:
            return super().reduce_grads()
        self.side_stream.join()
        for flat, _, region in self.sent:
            unflatten(flat, region)
        self.own = sum(own for _, own, _ in self.sent)
        self.sent.clear()


class OverlapZero1(Zero1):
    """ZeRO-1 with a FlatShard for each of the model's regions. Gradients are reduced as soon as a region has all of
    them, and the new weights come in the next step, while the regions below them compute: every process has only its
    part of them until then, or until `finish`."""

    def divided(self):
        regions = split_by_region(self.parameters, self.model)
        shares = {
            number: FlatShard(region, self.ranks) for number, region in enumerate(regions) if region
        }
        self.by_region, self.side_stream, self.norms = shares, SideStream(self.ranks.device), []
        self.grad_hooks = GradReadyHooks(regions, self._send)
        return [*shares.values()]

    def wrapped(self, forward):
        forward = super().wrapped(forward)
        if isinstance(forward, RegionalModel):
            forward.before = self._await
        return forward

    def begin(self):
        self.events = {}
        for number, share in self.by_region.items():
            with self.side_stream.work():
                share.all_gather_params()
                self.events[number] = self.side_stream.event()
        if self.settings.compile != "regional":
            self.side_stream.join()

    def _await(self, number: int) -> None:
        if number in self.events:
            self.side_stream.join(self.events[number])

    def micro_batch(self, last):
        return self.grad_hooks.awaited(last)

    def _send(self, number: int) -> None:
        with self.side_stream.work():
            self.norms.append(self.by_region[number].reduce_grads())

    def reduce_grads(self):
        self.side_stream.join()
        self.release_grads(self.norms)
        self.norms = []

    def all_gather_params(self):
        pass  # in `begin` of the next step

    def finish(self):
        super().all_gather_params()
