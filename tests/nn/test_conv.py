"""ShortConvolution against torch's conv1d, in pieces, and packed."""

import pytest
import torch
from torch.nn import functional as F

from flaop.nn import ShortConvolution
from flaop.testing import relative_error

D = 6


def conv(device, window=4, **kwargs):
    return ShortConvolution(D, window, **kwargs).to(device, torch.float64)


def inputs(device, *shape):
    return torch.randn(*shape, D, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_conv1d(device, window, bias):
    layer = conv(device, window, bias=bias)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = inputs(device, 2, 9)
    expected = F.conv1d(
        F.pad(x.transpose(1, 2), (window - 1, 0)), layer.weight, layer.bias, groups=D
    )
    y, state = layer(x)
    assert state is None
    torch.testing.assert_close(y, F.silu(expected).transpose(1, 2))


@pytest.mark.parametrize("pieces", [[1] * 9, [3, 1, 5], [2, 2, 2, 3], [0, 8, 1]])
def test_pieces_equal_one_call(device, pieces):
    layer = conv(device)
    x = inputs(device, 2, 9)
    start = inputs(device, 2, 3)
    d_y, d_state = torch.randn_like(x), torch.randn_like(start)

    whole, whole_state = layer(x, start, output_state=True)
    parameters = [x, start, layer.weight]
    expected = torch.autograd.grad([whole, whole_state], parameters, [d_y, d_state])

    state, outputs = start, []
    for piece in x.split(pieces, dim=1):
        y, state = layer(piece, state, output_state=True)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    torch.testing.assert_close(y, whole, rtol=1e-13, atol=1e-13)
    assert torch.equal(state, whole_state)
    for got, want in zip(
        torch.autograd.grad([y, state], parameters, [d_y, d_state]), expected, strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_packed_equals_each_sequence_alone(device, window, with_state, index_type):
    layer = conv(device, window)
    bounds = [2, 3, 3, 8, 10, 15]  # one token, none, more than the window; two tokens outside
    cu_seqlens = torch.tensor(bounds, dtype=index_type, device=device)
    x = inputs(device, 1, 17)
    start = inputs(device, 5, window - 1)
    d_y, d_state = torch.randn_like(x), torch.randn_like(start)

    y, state = layer(x, start if with_state else None, cu_seqlens, output_state=True)
    alone = [
        layer(x[:, b:e], start[n : n + 1] if with_state else None, output_state=True)
        for n, (b, e) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    zeros = torch.zeros(1, 2, D, dtype=x.dtype, device=device)
    expected = torch.cat([zeros, *(a[0] for a in alone), zeros], dim=1)
    expected_state = torch.cat([a[1] for a in alone])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state, expected_state)

    parameters = [x, layer.weight] + [start] * with_state
    got = torch.autograd.grad([y, state], parameters, [d_y, d_state])
    want = torch.autograd.grad([expected, expected_state], parameters, [d_y, d_state])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_decreasing_bounds_stay_inside(device):
    layer = conv(device)
    x = inputs(device, 1, 8)
    y, state = layer(x, None, torch.tensor([0, 6, 4, 99], device=device), output_state=True)
    same, same_state = layer(x, None, torch.tensor([0, 6, 6, 8], device=device), output_state=True)
    assert torch.equal(y, same) and torch.equal(state, same_state)


def test_low_precision_sums_in_float32(device):
    layer = ShortConvolution(64).to(device)
    x = torch.randn(2, 50, 64, device=device).bfloat16()
    y, state = layer(x, output_state=True)
    assert y.dtype == state.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.float())[0].bfloat16())


def test_compiled_packed_with_state(device):
    layer = conv(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for T, bounds in ((9, [0, 4, 9]), (12, [0, 1, 12]), (20, [0, 20, 20])):
        x, start = inputs(device, 1, T), inputs(device, 2, 3)
        cu_seqlens = torch.tensor(bounds, device=device)
        y, state = compiled(x, start, cu_seqlens, output_state=True)
        want, want_state = layer(x, start, cu_seqlens, output_state=True)
        assert relative_error(y, want) < 1e-12 and relative_error(state, want_state) < 1e-12
        got = torch.autograd.grad(y.sum(), [x, start])
        for a, b in zip(got, torch.autograd.grad(want.sum(), [x, start]), strict=True):
            torch.testing.assert_close(a, b)


def test_bad_input():
    layer = ShortConvolution(D)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 6\], got \(2, 3, 5\)"):
        layer(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"state must be \[2, 3, 6\], got \(2, 4, 6\)"):
        layer(torch.zeros(2, 3, 6), torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match="needs x with B = 1"):
        layer(torch.zeros(2, 3, 6), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="kernel_size must be at least 1, got 0"):
        ShortConvolution(D, 0)
    with pytest.raises(ValueError, match="activation"):
        ShortConvolution(D, activation="relu")
