"""The KimiDeltaAttention layer: pieces, packing, decode from a cache, initial decay."""

import pytest
import torch
from torch.nn import functional as F

from flaop.nn import KimiDeltaAttention, KimiDeltaAttentionState
from flaop.testing import relative_error

VARIANTS = {
    "softplus": {},
    "bounded": {"gate": "bounded", "state_v_first": True},
    "grouped": {"num_v_heads": 4, "head_v_dim": 24, "allow_neg_eigval": True},
}


@pytest.fixture(params=VARIANTS)
def layer(request, device):
    return KimiDeltaAttention(32, 2, 16, **VARIANTS[request.param]).to(device)


def random_state(layer, batch_size):
    state = layer.initial_state(batch_size)
    return KimiDeltaAttentionState(*(torch.randn_like(s).requires_grad_() for s in state))


def test_pieces_equal_one_call(layer, device):
    x = torch.randn(2, 90, 32, device=device, requires_grad=True)
    start = random_state(layer, 2)
    d_y = torch.randn_like(x)

    whole, whole_state = layer(x, start, output_state=True)
    inputs = [x, *start, *layer.parameters()]
    d_state = [torch.randn_like(s) for s in whole_state]
    expected = torch.autograd.grad([whole, *whole_state], inputs, [d_y, *d_state])

    state, outputs = start, []
    for piece in x.split([70, 2, 1, 17], dim=1):
        y, state = layer(piece, state, output_state=True)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    assert relative_error(y, whole) < 1e-4
    for got, want in zip(state, whole_state, strict=True):
        assert relative_error(got, want) < 1e-4
    gradients = torch.autograd.grad([y, *state], inputs, [d_y, *d_state])
    for got, want in zip(gradients, expected, strict=True):
        assert relative_error(got, want) < 5e-4


def test_packed_equals_each_sequence_alone(layer, device):
    bounds = [0, 66, 66, 67, 80]
    x = torch.randn(1, 80, 32, device=device)
    start = random_state(layer, 4)
    cu_seqlens = torch.tensor(bounds, device=device)
    y, state = layer(x, start, cu_seqlens, output_state=True)
    for n, (b, e) in enumerate(zip(bounds, bounds[1:], strict=False)):
        first = KimiDeltaAttentionState(*(s[n : n + 1] for s in start))
        alone = layer(x[:, b:e], first, output_state=True) if e > b else (x[:, :0], first)
        torch.testing.assert_close(y[:, b:e], alone[0], rtol=1e-4, atol=1e-4)
        for got, want in zip(state, alone[1], strict=True):
            torch.testing.assert_close(got[n : n + 1], want, rtol=1e-4, atol=1e-4)


def test_decode_from_the_cache(layer, device):
    x = torch.randn(2, 80, 32, device=device)
    with torch.no_grad():
        expected, state = layer(x, output_state=True)
    cache = layer.make_cache(2, max_length=80)
    addresses = [b.data_ptr() for b in cache.buffers()]
    for _ in range(2):  # a second time after the reset
        outputs = [layer.extend(piece, cache) for piece in x.split([70] + [1] * 10, dim=1)]
        assert relative_error(torch.cat(outputs, dim=1), expected) < 1e-4
        for got, want in zip(cache.state(), state, strict=True):
            assert relative_error(got, want) < 1e-4
        cache.reset()
    assert addresses == [b.data_ptr() for b in cache.buffers()]
    assert not any(b.any() for b in cache.buffers())


def test_states_pass_through_a_compiled_call(layer, device):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 70, 32, device=device)
    start = random_state(layer, 2)
    got, want = (call(x, start, output_state=True) for call in (compiled, layer))
    assert type(got[1]) is KimiDeltaAttentionState
    for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
        assert relative_error(a, b) < 1e-4
    gradients = [
        torch.autograd.grad([y.sum(), *(s.sum() for s in state)], start) for y, state in (got, want)
    ]
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a, b) < 5e-4


def test_every_parameter_learns(layer, device):
    y, _ = layer(torch.randn(2, 70, 32, device=device))
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("dt_range", [(1e-3, 1e-1), (1e-5, 1e-3)])
def test_initial_decay_rates(dt_range):
    for gate in ("softplus", "bounded"):
        layer = KimiDeltaAttention(8, 8, 64, gate=gate, dt_range=dt_range)
        bias, A = layer.dt_bias.double().view(8, 64), layer.A_log.double().exp()[:, None]
        rate = A * F.softplus(bias) if gate == "softplus" else 5 * torch.sigmoid(A * bias)
        assert 0.9 * dt_range[0] < rate.min() and rate.max() < 17 * dt_range[1]


def test_forced_backend(device):
    x = torch.randn(1, 80, 16, device=device)
    layer = KimiDeltaAttention(16, 1, 16, backend="fused_recurrent").to(device)
    with torch.no_grad():
        recurrent = layer(x)[0]
        layer.backend = "chunk"
        assert relative_error(layer(x)[0], recurrent) < 1e-4
    layer.backend = "flash_kda"
    with pytest.raises(ValueError, match="flash_kda"):
        layer(x)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of num_heads, got 3 and"):
        KimiDeltaAttention(16, 2, 8, num_v_heads=3)
    with pytest.raises(ValueError, match="gate must be one of"):
        KimiDeltaAttention(16, 2, 8, gate="sigmoid")
    with pytest.raises(ValueError, match=r"lower_bound must be in \[-5, 0\), got -6.0"):
        KimiDeltaAttention(16, 2, 8, gate="bounded", lower_bound=-6.0)
    with pytest.raises(ValueError, match="dt_range"):
        KimiDeltaAttention(16, 2, 8, dt_range=(0.1, 0.01))
