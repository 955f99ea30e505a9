"""Round weights to 8 or 4 bits and activations to 8, for answering on a CPU, and train for that.

Variant A1-int8 is trained for it.

A whole number of 8 bits takes a quarter of a float's memory, and processors have instructions that
multiply many such numbers at once. A weight w becomes round(w / s), with a scale s for each row of
a matrix (8 bits) or each GROUP weights of a row (4 bits), so that the largest just fits.
Activations get theirs as they come, token by token ("dynamic"). Sums are exact, in 32 bits;
embeddings, layer norms and the answer head stay as they are.

Rounding a trained model is free and costs some quality. Training can make up for that (Jacob et al.
2018): its forward pass rounds as the finished model will, but in floating point, and its backward
pass takes rounding for the identity. The weights stay fp32 meanwhile and are saved as such; rounded
afterwards they compute what they were trained on.

torchao has the arithmetic. Files hold only whole numbers and scales as plain safetensors, and how
they are meant is said here and not in them. torchao multiplies int8 by int8; its GEMMs with 4 bits
widen the weights to fp32 first, so that these save room on a disk, and no time.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from qa_lib.errors import UserError
from qa_lib.model.architectures import layers_of
from qa_lib.model.hf_checkpoint import QUANTIZED, replacing
from qa_lib.packages import TORCHAO, is_torchao_usable, version_of

WIDTHS = ("int8", "int4")
GROUP = 32  # weights that share a scale in 4 bits


def use_rounding(model: nn.Module, width: str) -> None:
    """Let the linear layers of every layer train on rounded operands, in place.

    Weights keep their names and their fp32. Raises UserError without torchao, and for layers whose
    linear layers cannot be quantized.
    """
    qat = _torchao().qat
    activations = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    if width == "int4":
        weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=GROUP)
    else:
        weights = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel")
    scheme = qat.QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    _quantize_layers(model, scheme)


def is_rounding(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that `use_rounding` has changed."""
    return hasattr(module, "weight_fake_quantizer")


def quantize(model: nn.Module, width: str) -> None:
    """Round the weights of every layer's linear layers to `width`, in place; they train no more.

    Raises UserError for a width other than "int8" and "int4", without torchao, and for layers whose
    linear layers cannot be quantized.
    """
    if width not in WIDTHS:
        raise UserError(f"weights of {width!r}: {' or '.join(WIDTHS)} can be had")
    ao = _torchao()
    if width == "int4":
        scheme = ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(GROUP))
    else:
        # Asymmetric, which training imitates. By default torchao would also change Inductor's
        # settings, for all variants.
        scheme = ao.Int8DynamicActivationInt8WeightConfig(
            ao.MappingType.ASYMMETRIC, set_inductor_config=False
        )
    _quantize_layers(model, scheme)
    model.config.quantized = width


def _torchao():
    """Return torchao.quantization. Raises UserError where it is not installed."""
    try:
        import torchao.quantization.qat
    except ImportError:
        raise UserError(
            "quantized weights need a package that is not installed: pip install torchao"
        ) from None
    installed = version_of("torchao")
    if installed and not is_torchao_usable():
        raise UserError(
            f"quantized weights need torchao {TORCHAO} or newer, here {installed}: "
            "pip install -U torchao"
        )
    return torchao.quantization


def _quantize_layers(model: nn.Module, scheme) -> None:
    """Apply one of torchao's schemes to the linear layers of every layer, in place.

    Raises UserError for layers without linear layers, and for one whose inputs are no multiple of
    GROUP.
    """
    for layer in layers_of(model):
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        if not linears:
            raise UserError(
                f"{type(model).__name__}: its layers have no torch.nn.Linear, "
                "which alone can be quantized"
            )
        for linear in linears:
            if linear.in_features % GROUP:
                raise UserError(
                    f"a linear layer of {linear.in_features} inputs cannot be quantized, "
                    f"which goes by groups of {GROUP}"
                )
        _torchao().quantize_(layer, scheme)


def save_quantized(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a quantized model in place of `folder`.

    It has config, tokenizer, and the whole numbers and scales as safetensors.
    """
    from safetensors.torch import save_file

    tensors = {}
    for name, value in _parts(model).items():
        is_int4 = name.endswith(".qdata") and model.config.quantized == "int4"
        tensors[name] = _pack(value) if is_int4 else value.contiguous()
    with replacing(folder) as work:
        save_file(tensors, work / QUANTIZED)
        model.config.save_pretrained(work)
        tokenizer.save_pretrained(work)


def fill_quantized(model: nn.Module, folder: Path) -> None:
    """Give a quantized model the numbers of a folder that was made of the same config.

    Raises UserError for a folder that has other tensors.
    """
    from safetensors.torch import load_file

    stored = load_file(folder / QUANTIZED)
    for name, value in _parts(model).items():
        tensor = stored.pop(name, None)
        if tensor is not None and tensor.dtype == torch.uint8:
            tensor = _unpack(tensor)
        fits = tensor is not None and tensor.shape == value.shape and tensor.dtype == value.dtype
        if not fits:
            raise UserError(
                f"{folder}: {QUANTIZED} has no {name} of {list(value.shape)} in {value.dtype}"
            )
        value.copy_(tensor)
    if stored:
        raise UserError(
            f"{folder}: {QUANTIZED} has {min(stored)}, which the model by config.json has not"
        )


def _parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a quantized model is made of; its zero points are all 0."""
    parts = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "qdata"):
            parts[f"{name}.qdata"] = value.qdata
            parts[f"{name}.scale"] = value.scale
        else:
            parts[name] = value
    return parts


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Put two numbers from -8 to 7 into each byte: int8 [n, m] to uint8 [n, m / 2]."""
    low = codes[:, ::2]
    high = codes[:, 1::2]
    return (low & 15 | high << 4).view(torch.uint8)


def _unpack(pairs: torch.Tensor) -> torch.Tensor:
    """Undo `_pack`. A shift to the right keeps the sign."""
    pairs = pairs.view(torch.int8)
    return torch.stack([pairs << 4 >> 4, pairs >> 4], dim=-1).flatten(1)
