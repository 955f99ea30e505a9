import pytest
import torch

from qa_lib.train.masters import MasterAdamW

SHAPES = [(33, 17), (128,), (4, 5, 6)]


def train(optimizer_of, dtype, steps=20, clip=None):
    """Parameters after steps on fixed gradients, clipped to the norm `clip`."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = optimizer_of(parameters)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(dtype) / (step + 1)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return parameters


def test_on_fp32_weights_it_is_adamw_with_clipping():
    """The norm of the gradients falls from 28 to 1.4, so that a limit of 3 clips the first half of the steps."""
    ours = train(lambda p: MasterAdamW(p, lr=torch.tensor(1e-2), max_norm=3.0), torch.float32)
    theirs = train(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0), torch.float32, clip=3.0)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_small_steps_are_not_lost_in_bf16():
    """Steps of 1e-5 are far below bf16's resolution near 1: plain bf16 would stand still, the masters move."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([parameter], lr=torch.tensor(1e-5), max_norm=torch.inf)
    for _ in range(400):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.allclose(optimizer.state[parameter]["master"], torch.tensor(1 - 400e-5), atol=1e-5)
    assert parameter[0].item() == pytest.approx(1 - 400e-5, abs=2e-3)
    assert parameter[0].item() < 1
