"""Dropout by a hash keeps the rate, scales what it keeps, and draws anew when told to."""

import pytest
import torch

from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import HashDropout, renew
from tests.tiny import planned

P = 0.1


def dropout_of(seed: int) -> HashDropout:
    dropout = HashDropout(P)
    dropout.seed.fill_(seed)
    return dropout


def test_rate_and_scale():
    values = torch.randn(512, 768) + 3
    dropped = dropout_of(7)(values)
    kept = dropped != 0
    assert 1 - kept.float().mean().item() == pytest.approx(P, abs=0.002)  # 4 standard deviations
    assert torch.allclose(dropped[kept], values[kept] / (1 - P))


def test_patterns_of_seeds_neighbours_rows_and_columns_are_unrelated():
    found = [dropout_of(seed)(torch.ones(1024, 768)) != 0 for seed in (5, 6, 99, 5 + 768, 2**31 - 1)]
    kept = torch.stack(found).flatten(1).float() - (1 - P)
    noise = 1 / kept.shape[1] ** 0.5
    related = kept @ kept.T / kept.shape[1] / (P * (1 - P))
    assert (related - torch.eye(len(kept))).abs().max() < 5 * noise
    for distance in (1, 2, 64, 768, 1536):
        assert (kept[0, distance:] * kept[0, :-distance]).mean().abs() / (P * (1 - P)) < 5 * noise
    one = kept[0].view(1024, 768)
    for axis, n in ((0, 1024), (1, 768)):
        assert one.mean(axis).std().item() == pytest.approx((P * (1 - P) / n) ** 0.5, rel=0.15)


def test_gradients_pass_where_values_do_and_evaluation_drops_nothing():
    dropout = dropout_of(3)
    x = torch.ones(64, 64, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert dropout.eval()(x) is x


def test_every_layer_has_its_own_and_renewal_changes_all_reproducibly():
    model = build_model(planned("E-packed", settings={"dropout": "hash"})).to(torch.bfloat16)
    found = [module for module in model.modules() if isinstance(module, HashDropout)]
    assert len(found) == 1 + 2 * model.config.num_hidden_layers and found[0].seed.dtype == torch.int32

    def renewed(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        renew(model)
        return torch.stack([module.seed for module in found])

    first = renewed(0)
    assert len(set(first.tolist())) == len(found)
    assert not (renewed() == first).any() and torch.equal(renewed(0), first)
