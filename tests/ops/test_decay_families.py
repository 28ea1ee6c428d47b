"""What is built on simple_gla and gla: families with constant gates or none, Mamba-2, and runs in
pieces that hand their state on.
"""

import pytest
import torch

import flaop
from flaop.testing import (
    gla_oracle,
    linear_attn_oracle,
    mamba2_oracle,
    relative_error,
    simple_gla_oracle,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")

LIMIT = 1e-4
H, HV, K, V = 2, 4, 64, 64
LAYER = {"layer_idx": 2, "num_layers": 6}


def retention_oracle(q, k, v, **options):
    head = torch.arange(v.shape[2], dtype=torch.float64)
    return simple_gla_oracle(q, k, v, g_gamma=torch.log1p(-(2.0 ** (-5 - head))), **options)


def lightning_attn_oracle(q, k, v, layer_idx, num_layers, **options):
    head = torch.arange(v.shape[2], dtype=torch.float64)
    slope = 8 / v.shape[2] * (1 - layer_idx / num_layers)
    return simple_gla_oracle(q, k, v, g_gamma=-slope * head, **options)


# name: (family, oracle, gates, other arguments)
FAMILIES = {
    "simple_gla": ("simple_gla", simple_gla_oracle, ("g", "g_gamma"), {}),
    "gla": ("gla", gla_oracle, ("gk",), {}),
    "gla with gv": ("gla", gla_oracle, ("gk", "gv"), {}),
    "retention": ("retention", retention_oracle, (), {}),
    "lightning_attn": ("lightning_attn", lightning_attn_oracle, (), LAYER),
    "linear_attn": ("linear_attn", linear_attn_oracle, (), {}),
    "linear_attn normalised": (
        "linear_attn", linear_attn_oracle, (), {"normalize": True, "state_v_first": True}
    ),
}  # fmt: skip
PATHS = ("", "chunk_", "fused_recurrent_")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Without the variants of the other tests."""
    return request.param


def make(name, T, gates, options, device):
    """Tokens ``[1, T, ...]`` and the rest of the arguments, all float leaves on the device."""
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(1, T, H, K), dim=-1) for _ in range(2))
    tokens = {"q": q, "k": k, "v": normal(1, T, HV, V)}
    if options.get("normalize"):  # positive features: the denominator stays away from zero
        tokens["q"], tokens["k"] = q.abs(), k.abs()
    sizes = {"g": (), "gk": (K,), "gv": (V,)}
    for gate in gates:
        if gate in sizes:
            rate = torch.rand(1, T, HV, *sizes[gate], generator=generator)
            tokens["g" if gate == "gk" else gate] = -0.1 * rate
    columns = V + 1 if options.get("normalize") else V
    state = normal(1, HV, K, columns)
    if options.get("normalize"):
        state[..., -1] = state[..., -1].abs()
    rest = {"initial_state": state.mT.contiguous() if options.get("state_v_first") else state}
    if "g_gamma" in gates:
        rest["g_gamma"] = -0.1 * torch.rand(HV, generator=generator)

    def leaves(tensors):
        return {n: x.to(device).requires_grad_() for n, x in tensors.items()}

    return leaves(tokens), leaves(rest)


def in_pieces(fn, lengths, tokens, initial_state, options):
    outputs, state, start = [], initial_state, 0
    for length in lengths:
        piece = {n: x[:, start : start + length] for n, x in tokens.items()}
        o, state = fn(**piece, initial_state=state, output_final_state=True, **options)
        outputs.append(o)
        start += length
    return torch.cat(outputs, dim=1), state


def compare(name, got, want):
    assert got.isfinite().all(), name
    error = relative_error(got, want)
    assert error < LIMIT, f"{name}: error {error:.3e}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lengths", [[197], [1, 2, 3, 63, 64, 64]], ids=["one", "pieces"])
def test_pieces_make_one_run(device, name, path, lengths):
    """Outputs, the last state, and gradients through all pieces."""
    family, oracle, gates, options = FAMILIES[name]
    if path == "chunk_" and "gv" in gates:
        pytest.skip("a gate per value channel is served token by token only")
    tokens, rest = make(name, sum(lengths), gates, options, device)
    initial_state, others = rest["initial_state"], {n: rest[n] for n in rest if n == "g_gamma"}
    o, state = in_pieces(
        getattr(flaop, path + family), lengths, tokens, initial_state, {**options, **others}
    )
    want_o, want_state = oracle(**tokens, **rest, **options)
    compare("o", o, want_o)
    compare("final_state", state, want_state)

    leaves = {**tokens, **rest}
    generator = torch.Generator().manual_seed(0)
    d = [torch.randn(x.shape, generator=generator) for x in (o, state)]
    got = torch.autograd.grad((o, state), leaves.values(), [x.to(device) for x in d])
    want = torch.autograd.grad((want_o, want_state), leaves.values(), [x.double() for x in d])
    for leaf, x, y in zip(leaves, got, want, strict=True):
        compare(f"gradient of {leaf}", x, y)


@pytest.mark.parametrize("path", PATHS)
def test_packed_normalised_linear_attention(device, path):
    tokens, _ = make("packed", 130, (), {"normalize": True}, device)
    cu_seqlens = torch.tensor([0, 0, 65, 66, 130], device=device)
    options = {"cu_seqlens": cu_seqlens, "normalize": True}
    o, state = getattr(flaop, f"{path}linear_attn")(**tokens, output_final_state=True, **options)
    want_o, want_state = linear_attn_oracle(**tokens, **options)
    compare("o", o, want_o)
    compare("final_state", state, want_state)
    d_o = torch.randn(o.shape)
    got = torch.autograd.grad(o, tokens.values(), d_o.to(device))
    want = torch.autograd.grad(want_o, tokens.values(), d_o.double())
    for name, x, y in zip(tokens, got, want, strict=True):
        compare(f"gradient of {name}", x, y)


def mamba2_arguments(groups, T, batch, states, device):
    generator = torch.Generator().manual_seed(groups)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    heads, headdim, dstate = 8, 64, 64
    tensors = {
        "x": normal(batch, T, heads, headdim),
        "dt": normal(batch, T, heads),
        "A": -normal(heads).exp(),
        "B": normal(batch, T, groups, dstate) / 8,
        "C": normal(batch, T, groups, dstate) / 8,
    }
    extra = {
        "D": normal(heads),
        "z": normal(batch, T, heads, headdim),
        "dt_bias": normal(heads) - 2,
        "initial_states": normal(states, heads, headdim, dstate),
    }
    return [
        {n: x.to(device).requires_grad_() for n, x in part.items()} for part in (tensors, extra)
    ]


MAMBA2 = {
    "everything": ({"D", "z", "dt_bias", "initial_states"}, {"dt_softplus": True}),
    "packed": ({"dt_bias", "initial_states"}, {"dt_softplus": True, "lengths": [0, 1, 100, 0, 29]}),
    "limits": ({"D", "dt_bias"}, {"dt_softplus": True, "dt_limit": (0.05, 0.3)}),
    "plain": (set(), {}),
}


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("T", [20, 130])
@pytest.mark.parametrize("name", MAMBA2)
def test_mamba2(device, name, T, groups):
    present, options = MAMBA2[name]
    options = dict(options)
    lengths = options.pop("lengths", None)
    if lengths is not None:
        T = sum(lengths)
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(device)
    batch, states = (2, 2) if lengths is None else (1, len(lengths))
    tensors, extra = mamba2_arguments(groups, T, batch, states, device)
    if not options:  # steps as they are: positive
        tensors["dt"] = tensors["dt"].detach().abs().mul(0.2).requires_grad_()
    extra = {n: x for n, x in extra.items() if n in present}
    args = tuple(tensors.values())
    y, final = flaop.mamba2_ssd(*args, **extra, **options, return_final_states=True)
    want_y, want_final = mamba2_oracle(*args, **extra, **options)
    compare("y", y, want_y)
    compare("final states", final, want_final)

    leaves = {**tensors, **extra}
    generator = torch.Generator().manual_seed(0)
    d = [torch.randn(x.shape, generator=generator) for x in (y, final)]
    got = torch.autograd.grad((y, final), leaves.values(), [x.to(device) for x in d])
    want = torch.autograd.grad((want_y, want_final), leaves.values(), [x.double() for x in d])
    for leaf, x, z in zip(leaves, got, want, strict=True):
        compare(f"gradient of {leaf}", x, z)


def test_mamba2_without_final_states():
    tensors, _ = mamba2_arguments(1, 20, 2, 2, "cpu")
    y, final = flaop.mamba2_ssd(*tensors.values(), dt_softplus=True)
    assert final is None
    compare("y", y, mamba2_oracle(*tensors.values(), dt_softplus=True)[0])
