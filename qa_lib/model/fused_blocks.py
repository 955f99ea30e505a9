"""Layers of a block, rewired to our own dropout and kernels, and a decoder as a whole.

Variants E-dropout, E-norm, E-gelu and E-dropout-fp8 have such layers; variant L-norm has such a
decoder.

Dropout (Srivastava et al. 2014) needs a random bit for every element of the hidden states. PyTorch
takes them from Philox (Salmon et al. 2011), ten rounds of multiplications for each. Compiled,
dropout is fused into a kernel with a layer norm, calls Philox for every element and uses one result
in four: more time than the norm itself. A 32-bit hash of the element's number and a seed is as good
for this purpose at a tenth of the instructions, and the backward pass computes it again rather than
read a mask from memory. It pays where one kernel does it all, the compiler's or our own, so on GPUs
that Triton writes for, of compute capability 7.0 and newer.

Seeds are drawn anew before each forward pass, from PyTorch's generator on the device, so that a run
stays a function of its seed and a captured graph draws other patterns in each replay.

One operator does all that follows a linear layer, its bias included: dropout, residual and norm
(kernels/fused_norm.py), or GELU (kernels/gelu.py). The GEMMs may be in 8-bit floats
(kernels/fp8.py); the norm then hands the next linear layer a copy of its output in e4m3, as an
attribute of that output, since transformers' layers hand on one tensor. Weights keep their names,
so that a checkpoint looks like any other.

GPT-2 (Radford et al. 2019) has its norms before the linear layers: a layer is
h += attention(norm(h)) and then h += mlp(norm(h)). Between two GEMMs there are always the same
steps: a bias, dropout, the sum with the residual stream, and the norm that the next linear layer
begins with. Half of these norms belong to the next layer, and the last one to the model, so that no
layer alone can do it. `FusedDecoder` is therefore the whole training pass between embeddings and
head, written out. Its modules keep their places: evaluation and generation are transformers' own.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Model
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from qa_lib.errors import UserError
from qa_lib.kernels.embedding_gradient import embedding
from qa_lib.kernels.fp8 import cast_ahead, fp8_linear, fp8_linear_and_placeholder
from qa_lib.kernels.fused_norm import fused_add_norm, fused_norm
from qa_lib.kernels.gelu import fp8_feed_forward, fp8_feed_forward_and_placeholder, gelu
from qa_lib.kernels.hash_dropout import hash_dropout
from qa_lib.kernels.varlen_attention import varlen_attention, varlen_attention_and_copy
from qa_lib.model.architectures import embeddings_of, encoder_of, layers_of
from qa_lib.spec.rules import unfit_heads

# Dropout by a hash.


class HashDropout(nn.Module):
    """nn.Dropout with rate `p` for tensors of fewer than 2^31 elements.

    Its `seed`, an int32 on `device`, decides what it drops; `renew` draws it anew. A kernel reads
    it, so it has to be on the device of the tensors.
    """

    def __init__(self, p: float, device: torch.device | None = None):
        super().__init__()
        self.p = p
        seed = torch.zeros((), dtype=torch.int32, device=device)
        self.register_buffer("seed", seed, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hash_dropout(x, self.seed, self.p) if self.training and self.p else x


def use_hash_dropout(model: nn.Module) -> None:
    """Replace the dropouts of the hidden states, in place.

    Attention's own dropout is its kernel's affair (kernels/varlen_attention.py).
    """
    encoder = encoder_of(model)
    owners = [(model, encoder.embeddings_dropout or f"{encoder.embeddings[0]}.dropout")]
    owners += [(layer, name) for layer in layers_of(model) for name in encoder.dropouts]
    for owner, name in owners:
        owner.set_submodule(name, hash_dropout_for(owner, owner.get_submodule(name).p))


def hash_dropout_for(module: nn.Module, p: float) -> HashDropout:
    """Return a HashDropout with rate `p` on the device of a module's weights."""
    return HashDropout(p, next(module.parameters()).device)


def renew(model: nn.Module) -> None:
    """Draw new seeds for a model's hash dropouts, from PyTorch's generator on its device.

    The loop calls it before each forward pass. It does nothing to a model without hash dropout.
    """
    seeds = [module.seed for module in model.modules() if isinstance(module, HashDropout)]
    if not seeds:
        return
    torch._foreach_copy_(seeds, list(drawn_seeds(len(seeds), seeds[0].device)))


def drawn_seeds(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return so many new seeds for hash dropouts, int32 tensors of no dimension."""
    if torch.compiler.is_compiling():  # PyTorch's compiler does not know the other
        return torch.randint(2**31, (count,), dtype=torch.int32, device=device).unbind()
    return torch.empty(count, dtype=torch.int32, device=device).random_().unbind()


# Fused norms in an encoder.


class LinearWithoutBias(nn.Linear):
    """nn.Linear with a `bias` that the module around it adds."""

    def forward(self, x):
        return F.linear(x, self.weight)


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
        if isinstance(self.dense, Float8Linear):
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


# The sigmoid GELU and 8-bit floats in a feed-forward block.


def leave_copy(x: torch.Tensor, x8: torch.Tensor | None) -> None:
    """Leave an e4m3 copy of `x`, if there is one, with it for the next linear layer."""
    if x8 is not None:
        x.e4m3 = x8


def take_copy(x: torch.Tensor) -> torch.Tensor | None:
    """Return the e4m3 copy that was left with `x`; None if there is none.

    It is no longer there then: `x` may be kept for the backward pass, which has no use for a copy.
    """
    # PyTorch's compiler fuses conversions itself: there nobody leaves a copy.
    return None if torch.compiler.is_compiling() else vars(x).pop("e4m3", None)


def float8_linear(
    x, weight: torch.Tensor, bias: torch.Tensor | None = None, weight_grad8: bool = False
) -> torch.Tensor:
    """Apply fp8_linear, or a whole feed-forward block in 8-bit floats.

    It is the block if the first of its linear layers has returned its own arguments as `x`, a
    tuple, and left its work to this one, the second.
    """
    return _block_or_layer(fp8_feed_forward, fp8_linear, x, weight, bias, weight_grad8)


def float8_linear_and_placeholder(
    x, weight: torch.Tensor, bias: torch.Tensor | None, weight_grad8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `float8_linear` does, and return a placeholder for the result's gradient as well."""
    block, layer = fp8_feed_forward_and_placeholder, fp8_linear_and_placeholder
    return _block_or_layer(block, layer, x, weight, bias, weight_grad8)


def _block_or_layer(block: Callable, layer: Callable, x, weight, bias, weight_grad8: bool):
    """Return what `block` or `layer` returns; the other arguments are those of float8_linear."""
    if not isinstance(x, tuple):
        return layer(x, weight, bias, take_copy(x), weight_grad8)
    inputs, inputs8, up, up_bias, tanh = x
    return block(
        inputs, up, up_bias, tanh, down=weight, last=bias, x8=inputs8, weight_grad8=weight_grad8
    )


class FusedIntermediate(nn.Module):
    """A layer's intermediate, as transformers calls it: linear layer, bias and GELU.

    The linear layer is `dense`, by the same name. GELU is that of kernels/gelu.py, to a fraction of
    half precision's rounding. After use_float8 it leaves all of that to the next linear layer (see
    float8_linear).
    """

    def __init__(self, native: nn.Linear):
        super().__init__()
        self.dense = native
        self.dense.__class__ = LinearWithoutBias

    def forward(self, hidden_states: torch.Tensor):
        if isinstance(self.dense, Float8Linear):
            copy = take_copy(hidden_states)
            return hidden_states, copy, self.dense.weight, self.dense.bias, False
        return gelu(self.dense(hidden_states), self.dense.bias)


class Float8Linear(nn.Linear):
    """nn.Linear for bf16 inputs and weights whose GEMMs are in 8-bit floats.

    One that does not add its bias (`adds_bias`) was a LinearWithoutBias. `weight_grad8` says
    whether the gradient of its weight has 8 bits as well.
    """

    adds_bias = True
    in_8_bits = True
    weight_grad8 = False

    @property
    def reads_grad8_alone(self) -> bool:
        """Whether nothing reads the gradient of its output in bf16, of which a bias's is a sum."""
        return self.weight_grad8 and not self.adds_bias

    def forward(self, x):
        bias = self.bias if self.adds_bias else None
        return float8_linear(x, self.weight, bias, self.weight_grad8)

    def with_placeholder(self, x) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and a placeholder for its gradient in e5m2 (kernels/fp8.py).

        It is None for PyTorch's compiler, which fuses conversions itself.
        """
        if torch.compiler.is_compiling():
            return self(x), None
        bias = self.bias if self.adds_bias else None
        return float8_linear_and_placeholder(x, self.weight, bias, self.weight_grad8)


def conv1d_without_bias(linear: Conv1D, x) -> torch.Tensor:
    """Apply GPT-2's linear layer, whose weight is [in, out], without its bias.

    In 8 bits it does what `float8_linear` does.
    """
    if in_float8(linear):
        return float8_linear(x, linear.weight.t(), weight_grad8=has_grad8(linear))
    return x @ linear.weight


def float8_conv1d(
    linear: Conv1D, x, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply GPT-2's linear layer in 8 bits with this bias or none, and return a placeholder, too.

    The placeholder is that of `float8_linear_and_placeholder`. It is None for PyTorch's compiler,
    which fuses conversions itself.
    """
    inputs = (x, linear.weight.t(), bias, has_grad8(linear))
    if torch.compiler.is_compiling():
        return float8_linear(*inputs), None
    return float8_linear_and_placeholder(*inputs)


def in_float8(linear: Conv1D) -> bool:
    """Return whether the GEMMs of GPT-2's linear layer are in 8 bits."""
    return getattr(linear, "float8", False)


def has_grad8(linear: Conv1D) -> bool:
    """Return whether the gradient of the weight of GPT-2's linear layer has 8 bits as well."""
    return getattr(linear, "weight_grad8", False)


class Conv1DGelu(Conv1D):
    """A linear layer of GPT-2 with its bias and the approximation of GELU by tanh."""

    def forward(self, x):
        # Out of training the next layer is transformers' own: this one cannot leave it its work.
        if in_float8(self) and self.training:
            return x, take_copy(x), self.weight.t(), self.bias, True
        return gelu(conv1d_without_bias(self, x), self.bias, tanh=True)


def use_sigmoid_gelu(model: nn.Module) -> None:
    """Replace the first linear layers of the feed-forward blocks and their activations, in place.

    Raises UserError where the activations are not GELU.
    """
    encoder = encoder_of(model)
    first_linear = encoder.linears[0]
    for layer in layers_of(model):
        activation = layer.get_submodule(encoder.activation)
        linear = layer.get_submodule(first_linear)
        if isinstance(activation, NewGELUActivation):
            linear.__class__ = Conv1DGelu
            layer.set_submodule(encoder.activation, nn.Identity())
        elif isinstance(activation, GELUActivation):
            layer.set_submodule(first_linear.rpartition(".")[0], FusedIntermediate(linear))
        else:
            raise UserError(
                f"gelu 'sigmoid' stands for GELU, and this model has {type(activation).__name__}"
            )


def use_float8(model: nn.Module) -> None:
    """Give the feed-forward GEMMs of every layer 8-bit operands, in place; weights stay in bf16.

    A decoder must have its fused training pass and the sigmoid GELU, which alone ask for `float8`.
    """
    is_decoder = encoder_of(model).causal
    for layer in layers_of(model):
        for name in encoder_of(model).linears:
            linear = layer.get_submodule(name)
            if is_decoder:
                linear.float8 = True
            else:
                to_float8(linear)


def use_float8_weight_gradients(model: nn.Module) -> None:
    """Give the GEMMs of weights' gradients 8-bit operands, in place, after use_float8.

    They are those of the feed-forward blocks, and that of the projections before attention where it
    has 8 bits. The layer after attention is too narrow: turning its operands takes longer than the
    GEMM saves.
    """
    encoder = encoder_of(model)
    for layer in layers_of(model):
        linears = [layer.get_submodule(name) for name in encoder.linears]
        if encoder.causal:
            if in_float8(layer.attn.c_attn):
                linears.append(layer.attn.c_attn)
        else:
            qkv = getattr(layer.get_submodule(encoder.self_attention), "qkv", None)
            if getattr(qkv, "in_8_bits", False):
                linears.append(qkv)
        for linear in linears:
            linear.weight_grad8 = True


def use_float8_around_causal_attention(model: nn.Module) -> None:
    """Give the GEMMs before and after a decoder's attention 8-bit operands, in place.

    The decoder has its fused training pass and our own attention kernel. Weights stay in bf16.
    """
    for layer in layers_of(model):
        layer.attn.c_attn.float8 = True
        layer.attn.c_proj.float8 = True


def to_float8(linear: nn.Linear) -> None:
    """Make a linear layer a Float8Linear, in place."""
    linear.adds_bias = not isinstance(linear, LinearWithoutBias)
    linear.__class__ = Float8Linear


def cast_weights(model: nn.Module) -> None:
    """Cast the weights of an encoder's linear layers in 8 bits, all of one shape at once.

    The loop calls it before each forward pass, which takes these copies. It does nothing to other
    models, nor on a CPU. Modules whose GEMMs are in 8 bits say so by `in_8_bits`.
    """
    by_shape = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "in_8_bits", False) and weight.is_cuda and weight.is_contiguous():
            by_shape.setdefault(weight.shape, []).append(weight)
    with torch.no_grad():
        for weights in by_shape.values():
            cast_ahead(weights)


def copy_operands(model: nn.Module, feed_forward: bool, projections: bool) -> None:
    """Have an encoder's fused norms hand on e4m3 copies to linear layers in 8 bits, in place.

    `feed_forward` and `projections` say whether those of the feed-forward blocks, and those before
    attention, are in 8 bits.
    """
    before_feed_forward, before_projections = (
        name.rpartition(".")[0] for name in encoder_of(model).dropouts
    )
    *layers, last_layer = layers_of(model)
    for layer in layers:
        layer.get_submodule(before_feed_forward).copies = feed_forward
        layer.get_submodule(before_projections).copies = projections
    last_layer.get_submodule(before_feed_forward).copies = feed_forward


# The decoder.


class FusedDecoder(GPT2Model):
    """transformers' GPT2Model with hash dropout, whose forward pass in training is written out."""

    def forward(self, input_ids=None, **kwargs):
        """Return hidden states [batch, tokens, width] for input_ids [batch, tokens].

        In training there is no padding, and other arguments are ignored; else it is transformers'
        own forward.
        """
        if not self.training:
            return super().forward(input_ids, **kwargs)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(positions))
        normed = self.h[0].ln_1(hidden)
        next_norms = [*((block.ln_1, block.attn.c_attn) for block in self.h[1:]), (self.ln_f, None)]
        for block, (next_norm, next_linear) in zip(self.h, next_norms, strict=True):
            attended = self.attend(block.attn, normed)
            hidden, normed = _add_norm(
                attended,
                block.attn.c_proj,
                hidden,
                block.attn.resid_dropout,
                norm=block.ln_2,
                copies=in_float8(block.mlp.c_fc),
            )
            inner = block.mlp.act(block.mlp.c_fc(normed))
            hidden, normed = _add_norm(
                inner,
                block.mlp.c_proj,
                hidden,
                block.mlp.dropout,
                norm=next_norm,
                copies=in_float8(next_linear),
            )
        return BaseModelOutputWithPastAndCrossAttentions(normed)

    def attend(self, attention, normed):
        """Do what a GPT2Attention does before its last linear layer; [batch, tokens, width]."""
        if isinstance(attention.attn_dropout, HashDropout):
            return self._attend_by_our_kernel(attention, normed)
        heads = (3, attention.num_heads, attention.head_dim)
        qkv = attention.c_attn(normed).unflatten(2, heads)
        query, key, value = qkv.transpose(1, 3).unbind(2)
        kernel = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = kernel(
            attention,
            query,
            key,
            value,
            None,
            dropout=attention.attn_dropout.p,
            scaling=attention.scaling,
        )
        return output.flatten(2)

    def _attend_by_our_kernel(self, attention, normed):
        """Attend by kernels/varlen_attention.py, which gives the projections' bias its gradient."""
        batch, length, width = normed.shape
        linear = attention.c_attn
        bias = linear.bias.detach()
        placeholder = None
        if in_float8(linear):
            qkv, placeholder = float8_conv1d(linear, normed, bias)
        else:
            qkv = torch.addmm(bias, normed.flatten(0, 1), linear.weight)
        cu_seqlens = torch.arange(
            0, batch * length + 1, length, dtype=torch.int32, device=normed.device
        )
        inputs = (
            qkv.view(batch * length, 3, attention.num_heads, attention.head_dim),
            linear.bias,
            cu_seqlens,
            length,
            attention.attn_dropout.seed,
            attention.attn_dropout.p,
            attention.scaling,
        )
        if placeholder is None:
            return varlen_attention(*inputs, causal=True).reshape(batch, length, width)
        attended, attended8 = varlen_attention_and_copy(
            *inputs, placeholder=placeholder, grad8_alone=has_grad8(linear), causal=True
        )
        attended = attended.reshape(batch, length, width)
        if in_float8(attention.c_proj):
            leave_copy(attended, attended8)
        return attended


def _add_norm(x, linear: Conv1D, hidden, dropout: HashDropout, norm: nn.LayerNorm, copies: bool):
    """Return the residual stream after a linear layer in training, and the norm of that stream.

    `x` is the linear layer's input, `hidden` the residual stream before it. The norm may carry an
    e4m3 copy, if it `copies`.
    """
    placeholder = None
    if in_float8(linear):
        product, placeholder = float8_conv1d(linear, x, None)
    else:
        product = x @ linear.weight
    total, normed, normed8 = fused_add_norm(
        product,
        linear.bias,
        hidden,
        gamma=norm.weight,
        beta=norm.bias,
        seed=dropout.seed,
        dropout=dropout.p,
        eps=norm.eps,
        placeholder=placeholder,
        copies=copies,
        grad8_alone=placeholder is not None and has_grad8(linear),
    )
    leave_copy(normed, normed8)
    return total, normed


def use_fused_decoder(model: nn.Module) -> None:
    """Give a GPT-2 with hash dropout the fused training pass, in place; replace its embeddings."""
    use_embedding_kernels(model)
    model.transformer.__class__ = FusedDecoder


def use_causal_attention(model: nn.Module) -> None:
    """Have the fused training pass call our own attention kernel, in place.

    Raises UserError for heads of a width that the kernel does not take.
    """
    width = model.config.hidden_size // model.config.num_attention_heads
    why = unfit_heads(width, "triton-causal")
    if why:
        raise UserError(why)
    for block in model.transformer.h:
        block.attn.attn_dropout = hash_dropout_for(block.attn, block.attn.attn_dropout.p)
