"""What tests of kernels share: where they run, gradients of any function, and how near to a plain one's they must be.

The kernels run on a GPU, or in Triton's interpreter where it is installed without one (conftest.py asks for it).
"""

import torch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
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
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, inputs, grads)]


def assert_close(found, wanted, error: float) -> None:
    """Each tensor is as near to the wanted one as this share of its norm."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.double() - other).norm() < error * other.norm(), number


def relative(one, other) -> float:
    """How far a tensor is from another one, as a share of that one's norm."""
    return ((one - other).float().norm() / other.float().norm()).item()


def close_to_plain(fused, plain, inputs, grads, error: float) -> list[torch.Tensor]:
    """What `fused` gives with its gradients, which must be near to what `plain` gives in float64."""
    found = with_gradients(fused, inputs, *grads)
    assert_close(
        found,
        with_gradients(plain, [x.double() for x in inputs], *(grad.double() for grad in grads)),
        error,
    )
    return found


def replayed(run, seed: torch.Tensor):
    """What a captured graph of a call gives, once for each of two seeds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for number in (5, -6):
        seed.fill_(number)
        graph.replay()
        yield found
