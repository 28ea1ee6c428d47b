"""Full attention: pieces, packing, static cache."""

import pytest
import torch

from flaop.nn import Attention


@pytest.fixture
def layer(device):
    return Attention(16, 2, 8).to(device, torch.float64)


@pytest.fixture
def x(device):
    return torch.randn(2, 12, 16, dtype=torch.float64, device=device, requires_grad=True)


def test_pieces_equal_one_call(layer, x):
    whole, _ = layer(x)
    state, outputs = None, []
    for piece in x.split([5, 1, 6], dim=1):
        y, state = layer(piece, state, output_state=True)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    torch.testing.assert_close(y, whole)
    d_y = torch.randn_like(y)
    got, want = (torch.autograd.grad(out, x, d_y)[0] for out in (y, whole))
    torch.testing.assert_close(got, want)


def test_static_cache(layer, x):
    whole, _ = layer(x)
    cache = layer.make_cache(2, max_length=20)
    for _ in range(2):
        outputs = [layer.extend(piece, cache) for piece in x.split([5, 1, 1, 5], dim=1)]
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
        assert cache.length.tolist() == [12, 12, 0]
        cache.reset()


def test_packed_equals_each_sequence_alone(layer, x):
    x = x[:1]
    y, _ = layer(x, cu_seqlens=torch.tensor([1, 5, 5, 11], device=x.device))
    for b, e in ((1, 5), (5, 11)):
        torch.testing.assert_close(y[:, b:e], layer(x[:, b:e])[0])
    assert y.isfinite().all()
    with pytest.raises(ValueError, match="packed"):
        layer(x, cu_seqlens=torch.tensor([0, 12]), output_state=True)
