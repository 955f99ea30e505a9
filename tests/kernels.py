"""What tests of kernels share: a device, gradients of any function, and when tensors are near.

The kernels run on a GPU, or in Triton's interpreter where it is installed without one (conftest.py
asks for it).
"""

from collections.abc import Iterator

import torch

from qa_lib.kernels import fp8

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# The tests of PyTorch's opcheck that our operators must pass.
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


def with_gradients(run, inputs, *grads) -> list[torch.Tensor]:
    """What `run` makes of the inputs, and their gradients for these of its outputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = run(*inputs)
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    gradients = torch.autograd.grad(outputs, inputs, grads)
    return [*(output.detach() for output in outputs), *gradients]


def relative(tensor, expected) -> float:
    """How far a tensor is from another one, as a share of that one's norm."""
    return ((tensor - expected).float().norm() / expected.float().norm()).item()


def assert_close(tensors, expected, error: float) -> None:
    """Each tensor is as near to the expected one as this share of its norm."""
    for number, (tensor, wanted) in enumerate(zip(tensors, expected, strict=True)):
        assert (tensor.double() - wanted).norm() < error * wanted.norm(), f"tensor {number}"


def close_to_plain(fused, plain, inputs, grads, error: float) -> list[torch.Tensor]:
    """What `fused` gives with its gradients; it must be near to what `plain` gives in float64."""
    results = with_gradients(fused, inputs, *grads)
    wide_inputs = [x.double() for x in inputs]
    wide_grads = [grad.double() for grad in grads]
    assert_close(results, with_gradients(plain, wide_inputs, *wide_grads), error)
    return results


def in_8_bits(tensor, like, cast=fp8._in_8_bits) -> torch.Tensor:
    """A tensor in the type of `like`, e4m3 of activations or e5m2 of gradients, scaled as they are.

    `cast` is plain PyTorch or the kernel.
    """
    if like.dtype == torch.float8_e4m3fn:
        return cast(tensor, fp8.ACTIVATION, fp8.E4M3_MAX, like.dtype)
    return cast(tensor, fp8.GRADIENT, fp8.E5M2_MAX, like.dtype)


class Handed(torch.autograd.Function):
    """Its input as it is; the gradient goes to a placeholder in e5m2 as well, or there alone."""

    @staticmethod
    def forward(ctx, x, placeholder, grad8_alone):
        ctx.shape = placeholder.shape
        ctx.grad8_alone = grad8_alone
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad8 = fp8._in_8_bits(
            grad.reshape(ctx.shape), fp8.GRADIENT, fp8.E5M2_MAX, torch.float8_e5m2
        )
        return None if ctx.grad8_alone else grad, grad8, None


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """What a norm or attention hands on in e4m3 beside `x`."""
    return fp8._in_8_bits(
        x.detach().contiguous(), fp8.ACTIVATION, fp8.E4M3_MAX, torch.float8_e4m3fn
    )


def attention_with_copies(plain):
    """`varlen_attention_and_copy` whose copies in 8 bits are made on a CPU as well."""

    def attend(qkv, *rest, placeholder, grad8_alone, **words):
        qkv = Handed.apply(qkv, placeholder, grad8_alone)
        output, _ = plain(qkv, *rest, placeholder=placeholder, grad8_alone=grad8_alone, **words)
        return output, copy_of(output)

    return attend


def assert_copy(copy8, tensor) -> None:
    """A copy in 8 bits is what the kernel that casts makes of the tensor, and some saturates."""
    expected = in_8_bits(tensor, copy8, cast=fp8._cast).float().view(copy8.shape)
    assert expected.abs().max() == torch.finfo(copy8.dtype).max
    assert torch.equal(copy8.float(), expected)


def replayed(run, seed: torch.Tensor) -> Iterator:
    """What a captured graph of a call gives, once for each of two seeds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for number in (5, -6):
        seed.fill_(number)
        graph.replay()
        yield results
