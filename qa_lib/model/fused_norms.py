"""Norms of an encoder's layers, fused with all else that follows a linear layer: variant E-norm.

One operator adds the linear layer's bias, drops out, adds the residual and takes the norm
(kernels/fused_norm.py). In 8 bits the norm also hands the next linear layer a copy of its output in
e4m3 (float8_layers.py). Weights keep their names, so that a checkpoint looks like any other. A
decoder has its norms before its linear layers: fused_decoder.py.

Models with fused norms get embeddings whose gradient has a kernel of its own, too.
"""

from torch import nn

from qa_lib.kernels.embedding_gradient import embedding
from qa_lib.kernels.fused_norm import fused_norm
from qa_lib.model.architectures import embeddings_of, encoder_of, layers_of
from qa_lib.model.float8_layers import LinearWithoutBias, is_float8, leave_copy


class FusedOutput(nn.Module):
    """A layer's output, as transformers calls it, with its `dense`, `dropout` and `LayerNorm`.

    One that `copies` hands an e4m3 copy of its output to the next linear layer.
    """

    copies = False

    def __init__(self, native: nn.Module):
        super().__init__()
        self.dense = native.dense
        self.dropout = native.dropout
        self.LayerNorm = native.LayerNorm
        self.dense.__class__ = LinearWithoutBias

    def forward(self, hidden_states, input_tensor):
        """Do what the original's forward does.

        Takes hidden_states [..., inner] and the residual `input_tensor` [..., width]; returns the
        output [..., width]. An output of this class carries its second tensor (see fused_norm) as
        an attribute `residual`, since transformers' layers hand on one tensor.
        """
        norm = self.LayerNorm
        if is_float8(self.dense):
            product, placeholder = self.dense.with_placeholder(hidden_states)
            grad8_alone = self.dense.reads_grad8_alone
        else:
            product = self.dense(hidden_states)
            placeholder = None
            grad8_alone = False
        output, residual, output8 = fused_norm(
            product,
            self.dense.bias,
            getattr(input_tensor, "residual", input_tensor),
            gamma=norm.weight,
            beta=norm.bias,
            seed=self.dropout.seed,
            dropout=self.dropout.p if self.training else 0.0,
            eps=norm.eps,
            placeholder=placeholder,
            copies=self.copies,
            grad8_alone=grad8_alone,
        )
        leave_copy(output, output8)
        # A reentrant checkpoint computes the layer without gradients at first. If the next layer
        # took that residual, its gradient would be lost.
        has_its_gradient = residual.requires_grad or not self.training
        if residual is not output and has_its_gradient:
            output.residual = residual
        return output


class FixedOrderEmbedding(nn.Embedding):
    """nn.Embedding whose gradient is summed in a fixed order (kernels/embedding_gradient.py)."""

    def forward(self, ids):
        return embedding(ids, self.weight, self.padding_idx)


def use_embedding_kernels(model: nn.Module) -> None:
    """Make the embeddings of a model FixedOrderEmbeddings, in place."""
    for module in embeddings_of(model):
        for embeddings in module.modules():
            if isinstance(embeddings, nn.Embedding):
                embeddings.__class__ = FixedOrderEmbedding


def use_fused_norms(model: nn.Module) -> None:
    """Replace what follows those linear layers of an encoder that end in a norm, in place.

    The embeddings are replaced, too. The model has hash dropout. A decoder has its norms before its
    linear layers, and takes `use_fused_decoder`.
    """
    encoder = encoder_of(model)
    use_embedding_kernels(model)
    for layer in layers_of(model):
        for name in encoder.dropouts:
            output_name = name.rpartition(".")[0]
            layer.set_submodule(output_name, FusedOutput(layer.get_submodule(output_name)))
