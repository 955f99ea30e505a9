import pytest
import torch

from qa_lib.master import MasterAdamW

SHAPES = [(33, 17), (128,), (4, 5, 6)]


def train(optimizer_of, dtype, steps=20):
    """Parameters after steps on fixed gradients; the optimizer as well."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = optimizer_of(parameters)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(dtype)
        optimizer.step()
    return parameters, optimizer


def test_on_fp32_weights_it_is_adamw():
    ours, _ = train(lambda p: MasterAdamW(p, lr=torch.tensor(1e-2)), torch.float32)
    theirs, _ = train(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0), torch.float32)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_small_steps_are_not_lost_in_bf16():
    """Steps of 1e-5 are far below bf16's resolution near 1: plain bf16 would stand still, the masters move."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([parameter], lr=torch.tensor(1e-5))
    for _ in range(400):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.allclose(optimizer.state[parameter]["master"], torch.tensor(1 - 400e-5), atol=1e-5)
    assert parameter[0].item() == pytest.approx(1 - 400e-5, abs=2e-3)
    assert parameter[0].item() < 1
