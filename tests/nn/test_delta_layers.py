"""GatedDeltaNet and DeltaNet written out, their initial decay, precision and arguments.

Pieces, packing, decode, paths, compilation and capture are tested in test_decay_layers.py.
"""

import pytest
import torch
from torch.nn import functional as F

from flaop.nn import DeltaNet, GatedDeltaNet, HybridConfig, HybridModel
from flaop.testing import gdn_oracle, relative_error

SIZES = {"num_v_heads": 4, "head_v_dim": 24}
LAYERS = {"gdn": GatedDeltaNet, "deltanet": DeltaNet}


@pytest.fixture(params=LAYERS)
def kind(request):
    return LAYERS[request.param]


def written_out(layer, x):
    """The layer and its recurrent state in float64, from its parameters."""
    layer, x = layer.double().cpu(), x.double().cpu()

    def heads(name, count):
        y = getattr(layer, f"{name}_proj")(x)
        if layer.conv_size:
            weight = getattr(layer, f"{name}_conv1d").weight
            y = F.conv1d(F.pad(y.mT, (3, 0)), weight, groups=weight.shape[0]).mT
        return F.silu(y).unflatten(-1, (count, -1))

    gated = isinstance(layer, GatedDeltaNet)
    gate = {"A_log": layer.A_log, "dt_bias": layer.dt_bias} if gated else {}
    o, state = gdn_oracle(
        heads("q", 2), heads("k", 2), heads("v", 4), layer.a_proj(x) if gated else None,
        layer.b_proj(x), **gate, use_gate_in_kernel=gated, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=layer.allow_neg_eigval,
    )  # fmt: skip
    o = F.rms_norm(o, (24,), layer.o_norm.weight, 1e-5).flatten(2)
    if layer.g_proj is not None:
        o = o * F.silu(layer.g_proj(x))
    return layer.o_proj(o), state


@pytest.mark.parametrize("conv_size", [4, 0])
@pytest.mark.parametrize("use_gate", [True, False])
@pytest.mark.parametrize("allow_neg_eigval", [True, False])
@torch.no_grad()
def test_against_the_recurrence(device, kind, conv_size, use_gate, allow_neg_eigval):
    options = {"use_gate": use_gate, "allow_neg_eigval": allow_neg_eigval}
    layer = kind(32, 2, 16, **SIZES, conv_size=conv_size, **options).to(device)
    torch.nn.init.normal_(layer.o_norm.weight)
    x = torch.randn(2, 70, 32, device=device)
    y, state = layer(x, output_state=True)
    expected, states = written_out(layer, x)
    limit = 1e-5 if device == "cpu" else 1e-4
    assert relative_error(y, expected) < limit
    assert relative_error(state.recurrent, states) < limit


@torch.no_grad()
def test_bfloat16(device, kind):
    layer = kind(32, 2, 16, **SIZES).to(device, torch.bfloat16)
    x = torch.randn(2, 70, 32, device=device, dtype=torch.bfloat16)
    cache = layer.make_cache(2, max_length=70)
    assert cache.q_conv.dtype == torch.bfloat16 and cache.recurrent.dtype == torch.float32
    y = torch.cat([layer.extend(piece, cache) for piece in x.split([66, 4], dim=1)], dim=1)
    assert y.dtype == torch.bfloat16
    expected, states = written_out(layer, x)
    assert relative_error(y, expected) < 3e-2
    assert relative_error(cache.state().recurrent, states) < 3e-2


@pytest.mark.parametrize("dt_range", [(1e-3, 1e-1), (1e-5, 1e-3)])
def test_initial_decay_rates(dt_range):
    layer = GatedDeltaNet(8, 64, 4, num_v_heads=256, dt_range=dt_range)
    A, dt = layer.A_log.double().exp(), F.softplus(layer.dt_bias.double())
    assert 1 <= A.min() < 2 and 15 < A.max() < 16.1
    assert 0.99 * dt_range[0] < dt.min() < 2 * dt_range[0]
    assert 0.5 * dt_range[1] < dt.max() < 1.01 * dt_range[1]


def test_configuration_reaches_the_layer():
    config = HybridConfig(
        hidden_size=32, num_layers=2, layers=("gdn", "deltanet"), num_heads=2, head_dim=16,
        num_v_heads=4, head_v_dim=24, conv_size=3, dt_range=(1e-4, 1e-3), allow_neg_eigval=True,
        norm_eps=1e-6, state_v_first=True, backend="chunk",
    )  # fmt: skip
    gated, plain = (block.mixer for block in HybridModel(config).blocks)
    assert type(gated) is GatedDeltaNet and type(plain) is DeltaNet
    assert gated.dt_range == (1e-4, 1e-3)
    assert gated.g_proj is not None and plain.g_proj is None
    for layer in (gated, plain):
        assert layer.initial_state(3).recurrent.shape == (3, 4, 24, 16)
        assert layer.initial_state(3).q_conv.shape == (3, 2, 32)
        assert layer.allow_neg_eigval and layer.o_norm.eps == 1e-6 and layer.backend == "chunk"


def test_bad_arguments(kind):
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of num_heads, got 3 and"):
        kind(16, 2, 8, num_v_heads=3)
    with pytest.raises(ValueError, match="dt_range"):
        GatedDeltaNet(16, 2, 8, dt_range=(0.1, 0.01))
