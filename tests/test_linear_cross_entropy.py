"""Head and loss in parts of the tokens: the value and the gradients are those of plain PyTorch."""

import pytest
import torch

from qa_lib.kernels import linear_cross_entropy as lce
from tests.kernels import DEVICE


def drawn(tokens, words, dtype=torch.float32):
    torch.manual_seed(0)
    targets = torch.randint(words, (tokens,), device=DEVICE)
    targets[::3] = lce.IGNORED
    targets[1], targets[-1] = 0, words - 1
    return 3 * torch.randn(tokens, words, device=DEVICE, dtype=dtype), targets


@pytest.mark.triton
@pytest.mark.parametrize(("tokens", "words", "block"), [(5, 7, 16), (4, 64, 16), (6, 100, 32)])
def test_the_kernel_leaves_the_gradient_in_place_of_the_logits(tokens, words, block):
    logits, targets = drawn(tokens, words)
    wide = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(wide, targets, ignore_index=lce.IGNORED, reduction="none")
    (wanted,) = torch.autograd.grad(loss.sum() * 0.25, wide)
    losses, scale = torch.empty(tokens, device=DEVICE), torch.tensor(0.25, device=DEVICE)
    scaled = torch.empty_like(logits)  # in place of what is in 8-bit floats
    lce.loss_kernel[(tokens,)](
        logits, scaled, targets, scale, losses, WORDS=words, IGNORED=lce.IGNORED, FACTOR=8.0, BLOCK=block, num_warps=1
    )
    torch.testing.assert_close(losses.double(), loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaled * 0.25, 8 * logits, rtol=1e-5, atol=1e-6)
