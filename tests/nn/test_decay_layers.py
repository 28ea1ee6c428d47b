"""The recurrent layers beside KDA's: pieces, packing, decode from a cache, graphs, constants.

What the layers of the delta rules have of their own is in test_delta_layers.py.
"""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import flaop
from flaop.nn import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    HybridConfig,
    HybridModel,
    LightningAttention,
    Mamba2Mixer,
    MultiScaleRetention,
)
from flaop.testing import mamba2_oracle, relative_error
from flaop.testing.compilation import Compiled

GROUPED = {"num_v_heads": 4, "head_v_dim": 24, "conv_size": 4, "state_v_first": True}
DELTA = {**GROUPED, "allow_neg_eigval": True}
DEPTH = {"layer_idx": 1, "num_layers": 3}
LAYERS = {
    "gla": lambda: GatedLinearAttention(32, 2, 16),
    "gla grouped": lambda: GatedLinearAttention(32, 2, 16, **GROUPED),
    "retention": lambda: MultiScaleRetention(32, 2, 16),
    "retention grouped": lambda: MultiScaleRetention(32, 2, 16, **GROUPED),
    "lightning": lambda: LightningAttention(32, 2, 16, **DEPTH),
    "lightning grouped": lambda: LightningAttention(32, 2, 16, **GROUPED, **DEPTH),
    "mamba2": lambda: Mamba2Mixer(32, 4, 16, state_size=8),
    "mamba2 grouped": lambda: Mamba2Mixer(32, 4, 16, state_size=8, num_groups=2),
    "gdn": lambda: GatedDeltaNet(32, 2, 16),
    "gdn grouped": lambda: GatedDeltaNet(32, 2, 16, **DELTA, use_gate=False),
    "deltanet": lambda: DeltaNet(32, 2, 16),
    "deltanet grouped": lambda: DeltaNet(32, 2, 16, **{**DELTA, "conv_size": 0}, use_gate=True),
}
OPS = {
    "gla": "gla",
    **dict.fromkeys(("retention", "lightning", "mamba2"), "simple_gla"),
    **dict.fromkeys(("gdn", "deltanet"), "gated_delta_rule"),
}
MODES = {
    "train": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": None,
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture(params=LAYERS)
def layer(request, device):
    return LAYERS[request.param]().to(device)


def random_state(layer, batch_size):
    state = layer.initial_state(batch_size)
    return type(state)(*(torch.randn_like(s).requires_grad_() for s in state))


def gradients(outputs, inputs, cotangents):
    return torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True)


def close(got, want, limit):
    """Both empty where the layer has no convolution."""
    assert got.shape == want.shape
    assert not want.numel() or relative_error(got, want) < limit


def test_pieces_equal_one_call(layer, device):
    x = torch.randn(2, 90, 32, device=device, requires_grad=True)
    start = random_state(layer, 2)
    d_y = torch.randn_like(x)

    whole, whole_state = layer(x, start, output_state=True)
    inputs = [x, *(s for s in start if s.numel()), *layer.parameters()]
    kept = [i for i, s in enumerate(start) if s.numel()]
    d_state = [torch.randn_like(whole_state[i]) for i in kept]
    expected = gradients([whole, *(whole_state[i] for i in kept)], inputs, [d_y, *d_state])

    state, outputs = start, []
    for piece in x.split([70, 2, 1, 17], dim=1):
        y, state = layer(piece, state, output_state=True)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    assert relative_error(y, whole) < 1e-4
    for got, want in zip(state, whole_state, strict=True):
        close(got, want, 1e-4)
    got = gradients([y, *(state[i] for i in kept)], inputs, [d_y, *d_state])
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 5e-4


def test_packed_equals_each_sequence_alone(layer, device):
    bounds = [0, 66, 66, 67, 80]
    x = torch.randn(1, 80, 32, device=device)
    start = random_state(layer, 4)
    y, state = layer(x, start, torch.tensor(bounds, device=device), output_state=True)
    for n, (b, e) in enumerate(zip(bounds, bounds[1:], strict=False)):
        first = type(start)(*(s[n : n + 1] for s in start))
        alone = layer(x[:, b:e], first, output_state=True) if e > b else (x[:, :0], first)
        torch.testing.assert_close(y[:, b:e], alone[0], rtol=1e-4, atol=1e-4)
        for got, want in zip(state, alone[1], strict=True):
            torch.testing.assert_close(got[n : n + 1], want, rtol=1e-4, atol=1e-4)


def test_tokens_outside_the_sequences_give_zeros(layer, device):
    x = torch.randn(1, 12, 32, device=device)
    y, _ = layer(x, None, torch.tensor([2, 5, 9], device=device))
    assert not y[:, :2].any() and not y[:, 9:].any() and y[:, 2:9].any()


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
            close(got, want, 1e-4)
        cache.reset()
    assert addresses == [b.data_ptr() for b in cache.buffers()]
    assert not any(b.any() for b in cache.buffers())


def test_states_pass_through_a_compiled_call(layer, device):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 70, 32, device=device)
    start = random_state(layer, 2)
    got, want = (call(x, start, output_state=True) for call in (compiled, layer))
    assert type(got[1]) is type(start)
    for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
        close(a, b, 1e-4)
    carried = [s for s in start if s.numel()]
    totals = [[y.sum() + sum(s.sum() for s in state)] for y, state in (got, want)]
    first, second = (gradients(total, carried, None) for total in totals)
    for a, b in zip(first, second, strict=True):
        assert relative_error(a, b) < 5e-4


def test_every_parameter_learns(layer, device):
    y, _ = layer(torch.randn(2, 70, 32, device=device))
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


# Every layer and every mode; the rest of the product is slow.
_FIRST = {
    ("gla", "train"),
    ("retention", "no_grad"),
    ("lightning", "autocast"),
    ("mamba2", "inference_mode"),
    ("gdn", "autocast"),
    ("deltanet", "train"),
}


@pytest.mark.parametrize(
    "name, mode",
    [
        pytest.param(name, mode, marks=[] if (name, mode) in _FIRST else pytest.mark.slow)
        for name in OPS
        for mode in MODES
    ],
)
def test_one_graph_in_every_mode(device, name, mode):
    layer, op = LAYERS[name]().to(device), f"chunk_{OPS[name]}"
    compiled = Compiled(layer, dynamic=True)
    context = torch.autocast(device, torch.bfloat16) if mode == "autocast" else MODES[mode]()
    with context:
        compiled.call(torch.randn(3, 100, 32, device=device))
        x = torch.randn(2, 80, 32, device=device)
        got, want = compiled.call(x)[0], layer(x)[0]
    assert relative_error(got.float(), want.float()) < (2e-2 if mode == "autocast" else 1e-4)
    if mode in ("no_grad", "inference_mode"):
        assert compiled.graphs == [[op]]
        return
    parameters = list(layer.parameters())
    first, second = (torch.autograd.grad(y.float().square().sum(), parameters) for y in (got, want))
    assert compiled.graphs == [[f"{op}_fwd"], [f"{op}_bwd"]]
    for (parameter, _), a, b in zip(layer.named_parameters(), first, second, strict=True):
        assert relative_error(a, b) < (6e-2 if mode == "autocast" else 5e-4), parameter


@pytest.mark.parametrize("name", OPS)
def test_decode_step_in_a_model_compiles_once(device, name):
    config = HybridConfig(
        vocab_size=32, hidden_size=32, num_layers=1, layers=(name,), num_heads=2, head_dim=16,
        num_v_heads=4,
    )  # fmt: skip
    model = HybridModel(config).to(device)
    step = Compiled(model.extend, dynamic=None)
    x = torch.randint(32, (2, 73), device=device)
    cache = model.make_cache(2, max_length=73)
    outputs = [model.extend(x[:, :70], cache)]
    outputs += [step.call(x[:, t : t + 1], cache) for t in range(70, 73)]
    with torch.no_grad():
        assert relative_error(torch.cat(outputs, dim=1), model(x)[0]) < 1e-4
    assert step.graphs == [[f"{OPS[name]}_step_"]]


def test_decay_of_retention_and_lightning(device):
    """The buffers hold what the functions compute; the layer at one head is the function."""
    retention = MultiScaleRetention(16, 2, 8, num_v_heads=24)
    heads = torch.arange(24, dtype=torch.float64)
    expected = torch.log1p(-(2.0 ** (-5 - heads)))
    torch.testing.assert_close(retention.g_gamma.double(), expected, rtol=1e-6, atol=0)
    assert retention.g_gamma.all() and "g_gamma" not in retention.state_dict()
    for i in range(3):
        layer = LightningAttention(16, 2, 8, num_v_heads=4, layer_idx=i, num_layers=3).to(device)
        assert torch.allclose(layer.g_gamma.cpu(), -2 * (1 - i / 3) * torch.arange(4.0))
        q, k, v = (torch.randn(1, 5, n, 8, device=device) for n in (2, 2, 4))
        o, _ = flaop.lightning_attn(q, k, v, i, 3)
        assert relative_error(flaop.simple_gla(q, k, v, g_gamma=layer.g_gamma)[0], o) < 1e-6


def test_mamba2_against_the_recurrence(device):
    """The whole layer, its convolution and projections written out."""
    dtype, limit = (torch.float64, 1e-10) if device == "cpu" else (torch.float32, 1e-5)
    layer = Mamba2Mixer(32, 4, 8, state_size=16, num_groups=2).to(device, dtype)
    torch.nn.init.normal_(layer.conv1d.bias)
    torch.nn.init.normal_(layer.norm.weight)
    x = torch.randn(2, 70, 32, dtype=dtype, device=device)
    y, state = layer(x, output_state=True)
    layer, x = layer.to("cpu", torch.float64), x.to("cpu", torch.float64)
    z, mixed, dt = layer.in_proj(x).split([32, 32 + 64, 4], dim=-1)
    conv = layer.conv1d
    mixed = F.conv1d(F.pad(mixed.mT, (3, 0)), conv.weight, conv.bias, groups=conv.hidden_size).mT
    values, B, C = F.silu(mixed).split([32, 32, 32], dim=-1)
    o, states = mamba2_oracle(
        values.unflatten(-1, (4, 8)), dt, -layer.A_log.exp(), B.unflatten(-1, (2, 16)),
        C.unflatten(-1, (2, 16)), D=layer.D, z=z.unflatten(-1, (4, 8)), dt_bias=layer.dt_bias,
        dt_softplus=True,
    )  # fmt: skip
    expected = layer.out_proj(F.rms_norm(o.flatten(2), (32,), layer.norm.weight, 1e-5))
    assert relative_error(y, expected) < limit
    assert relative_error(state.recurrent, states) < limit


def test_gate_of_gla_starts_with_a_long_memory():
    layer = GatedLinearAttention(64, 2, 32, gate_logit_normalizer=64.0)
    g = layer._log_decay(torch.randn(1, 50, 64).bfloat16().float())
    assert g.max() <= 0 and -0.05 < g.mean() < -0.005


def test_forced_backend(device):
    x = torch.randn(1, 80, 16, device=device)
    for kind in (GatedLinearAttention, MultiScaleRetention, GatedDeltaNet, DeltaNet):
        layer = kind(16, 1, 16).to(device)
        with torch.no_grad():
            layer.backend = "fused_recurrent"
            recurrent = layer(x)[0]
            layer.backend = "chunk"
            assert relative_error(layer(x)[0], recurrent) < 1e-4
        layer.backend = "flash_kda"
        with pytest.raises(ValueError, match="flash_kda"):
            layer(x)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of num_heads, got 3 and"):
        GatedLinearAttention(16, 2, 8, num_v_heads=3)
    with pytest.raises(ValueError, match="gate_logit_normalizer must be positive, got 0"):
        GatedLinearAttention(16, 2, 8, gate_logit_normalizer=0)
    with pytest.raises(ValueError, match=r"layer_idx must be in \[0, num_layers\), got 3 of 3"):
        LightningAttention(16, 2, 8, layer_idx=3, num_layers=3)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_groups, got 4 and 3"):
        Mamba2Mixer(16, 4, 8, num_groups=3)
    with pytest.raises(ValueError, match="dt_range"):
        Mamba2Mixer(16, 4, 8, dt_range=(0.1, 0.01))
