"""Each process has a share of the GEMMs of every layer (variant P-tensor).

A layer's two blocks are each a linear layer that widens, something element by element or head by
head, and a linear layer that narrows. Megatron-LM (Shoeybi et al. 2019) cuts the first by columns,
so that each process has some of the heads, or of the feed-forward block's units, and the second by
rows, so that each has a part of every sum: one all-reduce a block adds them up. Everything between
is computed nowhere twice; embeddings, norms and dropout of the hidden states are computed
everywhere, from the same random numbers. All processes see all micro-batches.

Its cost are those sums: each of the layer's two blocks sends the hidden states once in the forward
pass, and their gradients once for every linear layer that reads them in the backward pass (four,
with query, key and value apart), and none of it can wait. It is made for models that do not fit
elsewhere; one of this size is quicker by any other way.

The weights that every process has whole would stay equal everywhere, if sums did. But a GPU adds up
in whatever order its threads end, and rounds differently each time, so that copies of one weight
would drift apart over the steps. Their gradients are therefore averaged after the backward pass.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qa_lib.errors import SpecError
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.spec.rules import unshared
from qa_lib.spec.settings import Settings
from qa_lib.train.parallel.data_parallel import (
    NoParallel,
    flatten,
    gather,
    shard,
    square_norm,
    unflatten,
)
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.parallel.zero1 import Zero1


class Tensor(NoParallel):
    """The model's linear layers cut by PyTorch's DTensor, and an optimizer over what is here.

    `trained` are the model's parameters, `parameters` plain tensors on the memory that this process
    has of them: no optimizer takes lists of both kinds. `trained_of` leads from the latter to the
    former; `whole` are the parameters that every process has whole.
    """

    draws_alike = True
    sync_found_inf = Zero1.sync_found_inf

    def __init__(self, model: torch.nn.Module, ranks: ProcessGroup, settings: Settings):
        """Cut the model's layers, in place.

        Raises SpecError where the processes do not divide the heads. A plan refuses that before,
        but not for a model that was not here yet, nor for a run that more processes resume.
        """
        why = unshared(
            settings,
            layers=len(layers_of(model)),
            heads=model.config.num_attention_heads,
            world=ranks.world,
            stages=ranks.stages,
        )
        if why:
            raise SpecError(why)
        encoder = encoder_of(model)
        widening, narrowing = encoder.linears
        cuts = {
            f"{encoder.self_attention}.{name}": ColwiseParallel() for name in encoder.projections
        }
        cuts[encoder.attention_output] = RowwiseParallel()
        cuts[widening] = ColwiseParallel()
        cuts[narrowing] = RowwiseParallel()
        mesh = dist.init_device_mesh(ranks.device.type, (ranks.world,))
        for layer in layers_of(model):
            parallelize_module(layer, mesh, cuts)
        super().__init__(model, ranks, settings)
        self.trained = self.parameters
        self.parameters = [torch.nn.Parameter(local(p.detach())) for p in self.trained]
        self.trained_of = dict(zip(self.parameters, self.trained, strict=True))
        self.whole = [p for p, trained in self.trained_of.items() if not is_cut(trained)]

    def reduce_grads(self):
        for parameter, trained in self.trained_of.items():
            parameter.grad = local(trained.grad)
            trained.grad = None
        unflatten(self.ranks.mean(flatten(self.whole)), self.whole)

    def global_norm(self, norm):
        # Not from `norm`, whose rounding differs by process: all must scale by the same number.
        cut = [p for p, trained in self.trained_of.items() if is_cut(trained)]
        whole_square = torch.stack([square_norm(p.grad) for p in self.whole]).sum()
        cut_square = torch.stack([square_norm(p.grad) for p in cut]).sum()
        dist.all_reduce(cut_square)
        return (whole_square + cut_square).sqrt()

    def gather(self, state, parameter):
        trained = self.trained_of[parameter]
        if state.shape != parameter.shape or not isinstance(trained, DTensor):
            return state
        # Sent as bytes, here and below, since NCCL knows no int16.
        share = state.view(torch.uint8)
        cut = DTensor.from_local(share, trained.device_mesh, trained.placements)
        return gather(cut).view(state.dtype)

    def shard(self, state, parameter):
        trained = self.trained_of[parameter]
        if state.shape != trained.shape:
            return state
        return local(shard(state.view(torch.uint8), trained)).view(state.dtype)


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether each process has a share of a parameter.

    The biases of narrowing layers are DTensors, and everywhere whole.
    """
    return isinstance(parameter, DTensor) and parameter.placements[0].is_shard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor is in this process's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
