"""An encoder made ready for our own attention kernel (kernels/varlen_attention.py): E-varlen."""

from torch import nn

from qa_lib.errors import UserError
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.fused_projections import BiasDeferredLinear, FusedSelfAttention
from qa_lib.model.hash_dropout import hash_dropout_for
from qa_lib.spec.rules import unfit_heads


def use_varlen_attention(model: nn.Module, defers_bias: bool = True) -> None:
    """Prepare a model for the kernel of kernels/varlen_attention.py, in place.

    Every layer's attention gets a seed for its dropout, which hash_dropout.renew draws anew, and
    the gradient of fused projections' bias is left to the kernel, if it `defers_bias`. Raises
    UserError for heads of a width that the kernel does not take.
    """
    width = model.config.hidden_size // model.config.num_attention_heads
    why = unfit_heads(width)
    if why:
        raise UserError(why)
    for layer in layers_of(model):
        self_attention = layer.get_submodule(encoder_of(model).self_attention)
        self_attention.dropout = hash_dropout_for(self_attention, self_attention.dropout.p)
        if defers_bias and isinstance(self_attention, FusedSelfAttention):
            self_attention.qkv.__class__ = BiasDeferredLinear
