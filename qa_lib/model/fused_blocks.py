"""Layers of a block, rewired to our own dropout and kernels (variants E-dropout, E-norm, E-gelu and E-dropout-fp8), and
a decoder as a whole (variant L-norm).

Dropout (Srivastava et al. 2014) needs a random bit for every element of the hidden states. PyTorch takes them from
Philox (Salmon et al. 2011), ten rounds of multiplications for each. Compiled, dropout is fused into a kernel with a
layer norm, calls Philox for every element and uses one result in four: more time than the norm itself. A 32-bit hash of
the element's number and a seed is as good for this purpose at a tenth of the instructions, and the backward pass
computes it again rather than read a mask from memory. It pays where one kernel does it all, the compiler's or our
own, so on GPUs that Triton writes for, of compute capability 7.0 and newer.

Seeds are drawn anew before each forward pass, from PyTorch's generator on the device, so that a run stays a function
of its seed and a captured graph draws other patterns in each replay.

What follows a linear layer is done by one operator, its bias included: dropout, residual and norm
(kernels/fused_norm.py), or GELU (kernels/gelu.py). The feed-forward block's GEMMs may be in 8-bit floats
(kernels/fp8.py). Weights keep their names, so that a checkpoint looks like any other.

GPT-2 (Radford et al. 2019) has its norms before the linear layers: a layer is h += attention(norm(h)) and then
h += mlp(norm(h)). What lies between two GEMMs is always the same: a bias, dropout, the sum with the residual stream,
and the norm that the next linear layer begins with. Half of these norms belong to the next layer, and the last one to
the model, so that no layer alone can do it. `FusedDecoder` is therefore the whole training pass between embeddings and
head, written out. Its modules keep their places: evaluation and generation are transformers' own.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Model
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from qa_lib.errors import UserError
from qa_lib.kernels.common import hash_dropout
from qa_lib.kernels.fp8 import fp8_linear
from qa_lib.kernels.fused_norm import fused_add_norm, fused_norm
from qa_lib.kernels.gelu import fp8_feed_forward, gelu
from qa_lib.kernels.varlen_attention import varlen_attention
from qa_lib.model.architectures import embeddings_of, encoder_of, layers_of
from qa_lib.variants import Settings


class HashDropout(nn.Module):
    """nn.Dropout with rate `p` for tensors of fewer than 2^31 elements; its `seed` decides what it drops."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.register_buffer("seed", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hash_dropout(x, self.seed, self.p) if self.training and self.p else x


class LinearWithoutBias(nn.Linear):
    """nn.Linear with a `bias` that the module around it adds."""

    def forward(self, x):
        return F.linear(x, self.weight)


class FusedOutput(nn.Module):
    """What transformers calls a layer's output: `dense`, `dropout` and `LayerNorm`, by the same names."""

    def __init__(self, native: nn.Module):
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = native.dense, native.dropout, native.LayerNorm
        self.dense.__class__ = LinearWithoutBias

    def forward(self, hidden_states, input_tensor):
        """As the original's forward: hidden_states [..., inner], the residual and the output [..., width]."""
        norm, rate = self.LayerNorm, self.dropout.p if self.training else 0.0
        x, bias = self.dense(hidden_states), self.dense.bias
        residual = getattr(input_tensor, "residual", input_tensor)
        output, past = fused_norm(
            x, bias, residual, norm.weight, norm.bias, self.dropout.seed, rate, norm.eps
        )
        if past is not output:  # transformers' layer hands on one tensor, and the second with it
            output.residual = past
        return output


class AddedEmbedding(nn.Embedding):
    """nn.Embedding whose gradient is a sum by atomic additions in fp32, as the compiler has it. PyTorch's own kernels
    sort the ids first, in a dozen launches a table."""

    def forward(self, ids):
        if torch.compiler.is_compiling() or not ids.is_cuda:
            return super().forward(ids)
        return _Lookup.apply(ids, self.weight, self.padding_idx)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding):
        ctx.save_for_backward(ids)
        ctx.words, ctx.padding = len(weight), padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        total = grad.new_zeros(ctx.words, grad.shape[-1], dtype=torch.float32)
        total.index_add_(0, ctx.saved_tensors[0].flatten(), grad.flatten(0, -2).float())
        if ctx.padding is not None:
            total[ctx.padding] = 0.0
        return None, total.to(grad.dtype), None


def float8_linear(x, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp8_linear; or all of a feed-forward block, where the first of its linear layers has left its arguments as x."""
    return (
        fp8_feed_forward(*x, weight, bias) if isinstance(x, tuple) else fp8_linear(x, weight, bias)
    )


def conv1d_without_bias(linear: Conv1D, x) -> torch.Tensor:
    """GPT-2's linear layer, whose weight is [in, out], without its bias; as float8_linear after use_float8."""
    return float8_linear(x, linear.weight.t()) if hasattr(linear, "float8") else x @ linear.weight


class Conv1DGelu(Conv1D):
    """A linear layer of GPT-2 with its bias and the approximation of GELU by tanh."""

    def forward(self, x):
        if hasattr(self, "float8") and self.training:  # else the next layer is transformers' own
            return x, self.weight.t(), self.bias, True
        return gelu(conv1d_without_bias(self, x), self.bias, tanh=True)


class FusedIntermediate(nn.Module):
    """What transformers calls a layer's intermediate, with `dense` by the same name: the first linear layer of a
    feed-forward block, its bias and GELU, to a fraction of half precision's rounding. After use_float8 it leaves all of
    that to the next linear layer."""

    def __init__(self, native: nn.Linear):
        super().__init__()
        self.dense = native
        self.dense.__class__ = LinearWithoutBias

    def forward(self, hidden_states: torch.Tensor):
        if isinstance(self.dense, Float8Linear):
            return hidden_states, self.dense.weight, self.dense.bias, False
        return gelu(self.dense(hidden_states), self.dense.bias)


class Float8Linear(nn.Linear):
    """nn.Linear for bf16 inputs and weights whose GEMMs are in 8-bit floats; not `adds_bias` as LinearWithoutBias."""

    adds_bias = True

    def forward(self, x):
        return float8_linear(x, self.weight, self.bias if self.adds_bias else None)


class FusedDecoder(GPT2Model):
    """transformers' GPT2Model with hash dropout; only its forward pass in training is another."""

    def forward(self, input_ids=None, **kwargs):
        """In training, input_ids [batch, tokens] without padding to hidden states [batch, tokens, width]."""
        if not self.training:
            return super().forward(input_ids, **kwargs)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(positions))
        normed = self.h[0].ln_1(hidden)
        for block, next_norm in zip(
            self.h, [*(block.ln_1 for block in self.h[1:]), self.ln_f], strict=True
        ):
            attended = self.attend(block.attn, normed)
            hidden, normed = _add_norm(
                attended, block.attn.c_proj, hidden, block.attn.resid_dropout, block.ln_2
            )
            inner = block.mlp.act(block.mlp.c_fc(normed))
            hidden, normed = _add_norm(
                inner, block.mlp.c_proj, hidden, block.mlp.dropout, next_norm
            )
        return BaseModelOutputWithPastAndCrossAttentions(normed)

    def attend(self, attention, normed):
        """What GPT2Attention does before its last linear layer."""
        linear, dropout = attention.c_attn, attention.attn_dropout
        batch, length, width = normed.shape
        heads = (3, attention.num_heads, attention.head_dim)
        if isinstance(dropout, HashDropout):  # our own kernel, which gives the bias its gradient
            qkv = torch.addmm(linear.bias.detach(), normed.flatten(0, 1), linear.weight).unflatten(
                1, heads
            )
            ends = torch.arange(
                0, batch * length + 1, length, dtype=torch.int32, device=normed.device
            )
            attended = varlen_attention(
                qkv,
                linear.bias,
                ends,
                length,
                dropout.seed,
                dropout.p,
                attention.scaling,
                causal=True,
            )
            return attended.reshape(batch, length, width)
        query, key, value = linear(normed).unflatten(2, heads).transpose(1, 3).unbind(2)
        kernel = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return kernel(
            attention, query, key, value, None, dropout=dropout.p, scaling=attention.scaling
        )[0].flatten(2)


def _add_norm(x, linear, hidden, dropout, norm):
    """The residual stream `hidden` after a linear layer whose input is `x`, and its norm; in training."""
    x = conv1d_without_bias(linear, x)
    return fused_add_norm(
        x, linear.bias, hidden, norm.weight, norm.bias, dropout.seed, dropout.p, norm.eps
    )


def use_hash_dropout(model: nn.Module) -> None:
    """Replace the dropouts of the hidden states, in place; attention's own is its kernel's affair
    (kernels/varlen_attention.py)."""
    encoder = encoder_of(model)
    owners = [(model, encoder.embeddings_dropout or f"{encoder.embeddings[0]}.dropout")]
    owners += [(layer, name) for layer in layers_of(model) for name in encoder.dropouts]
    for owner, name in owners:
        owner.set_submodule(name, HashDropout(owner.get_submodule(name).p))


def renew(model: nn.Module) -> None:
    """Draw new seeds for a model's hash dropouts, from PyTorch's generator on its device; before each forward pass.

    Does nothing to a model without them.
    """
    seeds = [module.seed for module in model.modules() if isinstance(module, HashDropout)]
    if seeds:
        drawn = torch.empty(len(seeds), dtype=torch.int32, device=seeds[0].device).random_()
        torch._foreach_copy_(seeds, list(drawn.unbind()))


def use_fused_norms(model: nn.Module) -> None:
    """Replace what follows the linear layers of every layer that end in a norm, in place, for a model with hash
    dropout; and its embeddings. Of a decoder, whose norms come before its linear layers, see `use_fused_decoder`."""
    encoder = encoder_of(model)
    for module in embeddings_of(model):
        for embedding in module.modules():
            if isinstance(embedding, nn.Embedding):
                embedding.__class__ = AddedEmbedding
    for layer in layers_of(model):
        for name in encoder.dropouts:
            owner = name.rpartition(".")[0]
            layer.set_submodule(owner, FusedOutput(layer.get_submodule(owner)))


def check_fused_decoder(settings: Settings) -> None:
    """Raise UserError for settings that need a decoder's layers to be called one by one."""
    allowed = {
        "attention": ("sdpa", "triton-causal"),
        "activation_checkpointing": (False, "elementwise"),
        "parallel": ("none", "ddp", "ddp-bf16", "ddp-one-bucket", "zero1"),
    }
    for name, values in allowed.items():
        if (value := getattr(settings, name)) not in values:
            known = " or ".join(map(repr, values))
            raise UserError(f"norms 'fused' of a decoder take {name} {known}, and not {value!r}")


def use_fused_decoder(model: nn.Module) -> None:
    """Give a GPT-2 with hash dropout the fused training pass, in place."""
    model.transformer.__class__ = FusedDecoder


def use_causal_attention(model: nn.Module) -> None:
    """Have the fused training pass call our own attention kernel, in place."""
    for block in model.transformer.h:
        block.attn.attn_dropout = HashDropout(block.attn.attn_dropout.p)


def use_sigmoid_gelu(model: nn.Module) -> None:
    """Replace the first linear layers of the feed-forward blocks and their activations, in place. Raises UserError
    where these are not GELU."""
    encoder = encoder_of(model)
    for layer in layers_of(model):
        found = layer.get_submodule(encoder.activation)
        if isinstance(found, NewGELUActivation):
            layer.get_submodule(encoder.linears[0]).__class__ = Conv1DGelu
            layer.set_submodule(encoder.activation, nn.Identity())
            continue
        if not isinstance(found, GELUActivation):
            raise UserError(
                f"activation 'sigmoid' stands for GELU, and this model has {type(found).__name__}"
            )
        first = encoder.linears[0]
        layer.set_submodule(first.rpartition(".")[0], FusedIntermediate(layer.get_submodule(first)))


def use_float8(model: nn.Module) -> None:
    """Give the feed-forward GEMMs of every layer 8-bit operands, in place; weights stay as they are. A decoder must
    have its fused training pass and GELU, which alone ask."""
    for layer in layers_of(model):
        for name in encoder_of(model).linears:
            linear = layer.get_submodule(name)
            if encoder_of(model).causal:
                linear.float8 = True
            else:
                linear.adds_bias = not isinstance(linear, LinearWithoutBias)
                linear.__class__ = Float8Linear
