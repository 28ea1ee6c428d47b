"""Field reports on strides, shapes, states, schemas and requests (S, I, C, M, R) for the decay
families and, where a probe asks the same of it, the gated delta rule.
"""

import doctest
import inspect

import pytest
import torch

import flaop
import flaop.nn
from flaop.testing import (
    gla_inputs,
    gla_oracle,
    mamba2_oracle,
    relative_error,
    simple_gla_inputs,
    simple_gla_oracle,
)

OPS = torch.ops.flaop
SMALL = dict(H=1, K=16, V=8)
TENSORS = ("q", "k", "v", "g", "g_gamma", "beta", "A_log", "dt_bias", "initial_state")
GATES = {"simple_gla": {"gate": "both"}, "gla": {}, "gated_delta_rule": {"gate": "softplus"}}
PATHS = ("", "chunk_", "fused_recurrent_")
FAMILIES = ("simple_gla", "gla", "retention", "lightning_attn", "linear_attn")
FUNCTIONS = tuple(path + family for family in FAMILIES for path in PATHS)


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def slice_of_packed(x):
    return torch.cat([x, x + 1, x], -1)[..., : x.shape[-1]]


def every_second(x):
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def offset_by_one(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def padded_rows(x):
    return torch.nn.functional.pad(x, (0, 8), value=torch.nan)[..., : x.shape[-1]]


VIEWS = [transposed, slice_of_packed, every_second, offset_by_one, padded_rows]


@pytest.fixture
def everything(path, device):
    """Inputs of a path with every tensor that it takes."""
    options = {"device": device, "initial_state": True, **GATES[path.family]}
    return lambda **sizes: path.inputs(**options, **sizes)


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_S01_S03_S06_any_view_of_any_input(path, everything, device, gradients_of, view):
    """Each argument in turn as a view: bitwise what the contiguous call gives, gradients too."""
    inputs = everything(B=2, T=9, H=2, K=16, V=24, dtype=torch.bfloat16)

    def call(**leaves):
        # views of leaves that require grad: gradients arrive at the dense tensors
        return path.fn(**{n: view(x) if n == name else x for n, x in leaves.items()})

    name = None
    outputs, gradients = gradients_of(path.fn, inputs)
    for name in gradients:
        seen, seen_gradients = gradients_of(call, inputs)
        for key, x in {**outputs, **gradients}.items():
            found = {**seen, **seen_gradients}[key]
            if (name, device) == ("g", "cpu") and "A_log" in gradients:
                # PyTorch's softplus rounds strided rows by another routine
                assert relative_error(found, x) < 1e-3, key
            else:
                assert torch.equal(x, found), (name, key)


def test_S01_C13_expanded_inputs_and_gradients(path, device):
    """Stride 0 over the batch, and the gradient of a sum; outputs are contiguous all the same."""
    inputs = path.inputs(T=70, device=device, **SMALL)
    wide = {n: inputs[n].expand(3, *inputs[n].shape[1:]) for n in path.tokens}
    v = wide["v"].detach().requires_grad_()
    o, state = path.fn(**{**inputs, **wide, "v": v})
    ref, _ = path.fn(**inputs)
    assert all(torch.equal(x, ref[0]) for x in o)
    assert o.is_contiguous() and state.is_contiguous()
    o.sum().backward()
    dense = wide["v"].detach().clone().requires_grad_()
    path.fn(**{**inputs, **wide, "v": dense})[0].backward(torch.ones_like(o))
    assert torch.equal(v.grad, dense.grad)


@pytest.mark.parametrize("K", [48, 60, 100])
@pytest.mark.parametrize("neighbour", [torch.nan, 1e30])
def test_S04_nothing_past_the_end_is_read(path, everything, device, K, neighbour):
    inputs = everything(T=3, H=1, K=K, V=20)
    expected, expected_state = path.oracle(**inputs)
    for name in TENSORS:
        x = inputs.get(name)
        if x is not None:
            buffer = torch.full((x.numel() + 1024,), neighbour, device=device, dtype=x.dtype)
            buffer[: x.numel()] = x.flatten()
            inputs[name] = buffer[: x.numel()].view(x.shape)
    o, state = path.fn(**inputs)
    assert relative_error(o, expected) < 1e-4 and relative_error(state, expected_state) < 1e-4


def test_S05_unrepeated_heads_and_gates_of_the_other_family(decay, device):
    inputs = decay.inputs(T=8, H=16, HV=32, K=8, V=8, device=device)
    with pytest.raises(ValueError, match=r"g must have shape .*32.*, got \[1, 8, 16"):
        decay.fn(**{**inputs, "g": inputs["g"][:, :, :16]})
    other = inputs["g"][..., 0] if inputs["g"].dim() == 4 else inputs["g"].unsqueeze(-1)
    with pytest.raises(ValueError, match="gla.*simple_gla|simple_gla.*gla"):
        decay.fn(**{**inputs, "g": other})
    headed = {**inputs, "q": inputs["q"].transpose(1, 2)}
    with pytest.raises(ValueError, match="k must have shape .*16, 8, 8.*got .*8, 16, 8"):
        decay.fn(**headed)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_S05_gradients_of_shared_heads_are_sums(path, device, matches, group):
    inputs = path.inputs(T=20, H=2, HV=2 * group, K=16, V=8, device=device)
    matches(path.fn, inputs, oracle=path.oracle)


@pytest.mark.parametrize("T", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("family", ["simple_gla", "gla"])
def test_S09_S10_R01_automatic_choice_serves_what_any_path_serves(device, family, T):
    make, oracle, fn = {
        "simple_gla": (simple_gla_inputs, simple_gla_oracle, flaop.simple_gla),
        "gla": (gla_inputs, gla_oracle, flaop.gla),
    }[family]
    for K, V, HV, dtype in ((16, 8, 1, torch.float16), (260, 24, 2, torch.float32)):
        inputs = make(T=T, H=1, HV=HV, K=K, V=V, dtype=dtype, device=device, initial_state=True)
        limit = 1e-2 if dtype is torch.float16 else 1e-4
        path = flaop.explain(fn, **inputs).path
        assert path == ("chunk" if T > 64 else "fused_recurrent")
        for backend in (None, "chunk", "fused_recurrent"):
            assert relative_error(fn(**inputs, backend=backend)[0], oracle(**inputs)[0]) < limit
        assert not flaop.supports("flash_kda", fn, **inputs)
        with pytest.raises((ValueError, NotImplementedError), match="flash_kda"):
            fn(**inputs, backend="flash_kda")


def test_S11_the_initial_state_is_used_or_refused(path, device):
    inputs = path.inputs(T=3, H=1, K=8, V=8, device=device, initial_state=True)
    without, _ = path.fn(**{**inputs, "initial_state": None})
    assert relative_error(path.fn(**inputs)[0], without) > 0.1
    for shape in ((2, 1, 8, 8), (1, 2, 8, 8)):
        with pytest.raises(ValueError, match="initial_state must have shape"):
            path.fn(**{**inputs, "initial_state": torch.zeros(shape, device=device)})
    with pytest.raises(ValueError, match="initial_state must be on the device of q"):
        path.fn(**{**inputs, "initial_state": torch.zeros(1, 1, 8, 8, device="meta")})


def constants(name, HV):
    """g_gamma of the families whose gate is a constant, and the arguments they take beside it."""
    head = torch.arange(HV, dtype=torch.float64)
    if name.endswith("retention"):
        return {}, {"g_gamma": torch.log1p(-(2.0 ** (-5 - head)))}
    if name.endswith("lightning_attn"):
        return {"layer_idx": 1, "num_layers": 4}, {"g_gamma": -8 / HV * 0.75 * head}
    return {}, {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_S13_smoke_call_of_every_public_function(device, name):
    make, oracle = (simple_gla_inputs, simple_gla_oracle)
    gates = ()
    if name.removeprefix("chunk_").removeprefix("fused_recurrent_") == "gla":
        make, oracle, gates = gla_inputs, gla_oracle, ("g",)
    elif name.endswith("simple_gla"):
        gates = ("g", "g_gamma")
    fn = getattr(flaop, name)
    arguments, known = constants(name, 2)
    options = {} if make is gla_inputs else {"gate": "both"}

    def values(**sizes):
        inputs = make(H=1, HV=2, K=8, V=8, device=device, **options, **sizes)
        return {n: x for n, x in inputs.items() if n in gates or n not in ("g", "g_gamma")}

    required = {n: x for n, x in values(T=5).items() if n in ("q", "k", "v", "g")}
    required = {n: x for n, x in required.items() if n in ("q", "k", "v") or make is gla_inputs}
    o, state = fn(**required, **arguments)
    assert state is None and relative_error(o, oracle(**required, **known)[0]) < 1e-4
    every = {**values(lengths=[5, 3], initial_state=True, state_v_first=True), "scale": 0.7}
    o, state = fn(**every, chunk_size=32, split_size=64, **arguments)
    expected = oracle(**every, **known)
    assert relative_error(o, expected[0]) < 1e-4 and relative_error(state, expected[1]) < 1e-4


@pytest.mark.parametrize("name", [*FUNCTIONS, "mamba2_ssd"])
def test_H11_R07_docstring_examples_run_and_use_real_layouts(name):
    finder = doctest.DocTestFinder(recurse=False)
    for test in finder.find(getattr(flaop, name), name):
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0
    layout = "[batch, T, heads, headdim]" if name == "mamba2_ssd" else "[B, T, H, K]"
    assert layout in inspect.getdoc(getattr(flaop, name))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_I01_axes_of_the_initial_state(path, device, state_v_first):
    """A state with one entry, S[0, 1]: q[0] reads it into o[1]."""
    inputs = path.inputs(
        T=3, H=1, K=16, V=16, device=device, initial_state=True, state_v_first=state_v_first
    )
    inputs["initial_state"].zero_()
    inputs["initial_state"][(0, 0, 1, 0) if state_v_first else (0, 0, 0, 1)] = 1
    inputs["k"].zero_()
    o, _ = path.fn(**{**inputs, "scale": 1.0})
    g = inputs["g"] if inputs["g"].dim() == 3 else inputs["g"][..., 0]
    expected = torch.zeros_like(o)
    expected[..., 1] = inputs["q"][..., 0] * g.cumsum(1).exp()
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("V", [32, 64])
def test_I02_prefill_then_decode(path, device, state_v_first, V):
    """70 tokens by one path, 5 by the recurrent one, in one layout: 75 in one call."""
    inputs = path.inputs(T=75, H=1, K=32, V=V, device=device, state_v_first=state_v_first)
    step = path.recurrent
    _, state = path.fn(**{**inputs, **{name: inputs[name][:, :70] for name in path.tokens}})
    outputs = []
    for t in range(70, 75):
        token = {name: inputs[name][:, t : t + 1] for name in path.tokens}
        o, state = step(**{**inputs, **token, "initial_state": state})
        outputs.append(o)
    expected, expected_state = path.oracle(**inputs)
    assert relative_error(torch.cat(outputs, 1), expected[:, 70:]) < 1e-4
    assert relative_error(state, expected_state) < 1e-4
    if V != 32:
        with pytest.raises(ValueError, match="initial_state must have shape"):
            step(**{**inputs, "initial_state": state.mT.contiguous()})


@pytest.mark.parametrize("T", [1, 64, 65])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_I03_always_the_same_pair(device, T, name):
    make = gla_inputs if name in ("gla", "chunk_gla", "fused_recurrent_gla") else simple_gla_inputs
    arguments, _ = constants(name, 1)
    for requires_grad in (False, True):
        inputs = make(
            T=T, H=1, K=8, V=8, dtype=torch.bfloat16, device=device, requires_grad=requires_grad
        )
        tensors = [inputs[n] for n in "qkv"] + [inputs["g"]] * name.endswith("gla")
        for wanted in (False, True):
            result = getattr(flaop, name)(*tensors, output_final_state=wanted, **arguments)
            assert type(result) is tuple and len(result) == 2
            o, state = result
            assert o.dtype is torch.bfloat16 and o.shape == (1, T, 1, 8)
            if wanted:
                assert state.dtype is torch.float32 and state.shape == (1, 1, 8, 8)
            else:
                assert state is None


def test_I05_no_state_and_a_zero_state(path, device, gradients_of):
    inputs = path.inputs(T=70, device=device, **SMALL)
    zeros = {**inputs, "initial_state": torch.zeros(1, 1, 16, 8, device=device)}
    results = gradients_of(path.fn, inputs), gradients_of(path.fn, zeros)
    for without, with_zeros, limit in zip(*results, (1e-6, 1e-5)):
        for name, x in without.items():
            assert relative_error(x, with_zeros[name]) < limit, name
    assert results[1][1]["initial_state"].any()


def tokens_by_hand(device):
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], device=device).view(1, 3, 1, 2)
    q = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], device=device).view(1, 3, 1, 2)
    v = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], device=device).view(1, 3, 1, 3)
    return {"q": q, "k": k, "v": v, "scale": 1.0, "output_final_state": True}


def gate(device, *rows):
    return torch.tensor(rows, device=device).log().unsqueeze(0).unsqueeze(2)


# K = 2, V = 3, worked out on paper: decay first, then the write, then the read.
HALF = ([[1, 2, 3], [4.5, 6, 7.5], [9.25, 11, 12.75]], [[7.25, 8.5, 9.75], [2, 2.5, 3]])
HAND = {
    # S1 = [1 2 3; 0 0 0], S2 = [.5 1 1.5; 4 5 6], S3 = [.25 .5 .75; 2 2.5 3] + [7 8 9; 0 0 0]
    "scalar": HALF,
    "fixed decay": HALF,
    # S1 = [1 2 3; 0 0 0], S2 = [.5 1 1.5; 4 5 6], S3 = [.25 .5 .75; 1 1.25 1.5] + [7 8 9; 0 0 0]
    "channel": (
        [[1, 2, 3], [4.5, 6, 7.5], [8.25, 9.75, 11.25]],
        [[7.25, 8.5, 9.75], [1, 1.25, 1.5]],
    ),
    # S2 = [1 1 0.75; 4 5 6], S3 = [1 .5 .1875; 4 2.5 1.5] + [7 8 9; 0 0 0]
    "value": ([[1, 2, 3], [5, 6, 6.75], [12, 11, 10.6875]], [[8, 8.5, 9.1875], [4, 2.5, 1.5]]),
    # S2 = [1 2 3; 4 5 6], S3 = [8 10 12; 4 5 6]
    "none": ([[1, 2, 3], [5, 7, 9], [12, 15, 18]], [[8, 10, 12], [4, 5, 6]]),
}


@pytest.mark.parametrize("path", ["chunk_", "fused_recurrent_"])
@pytest.mark.parametrize("kind", HAND)
def test_I06_three_tokens_by_hand(device, path, kind):
    inputs = tokens_by_hand(device)
    if kind == "value" and path == "chunk_":
        pytest.skip("a gate per value channel is served token by token only")
    name = "simple_gla"
    if kind == "scalar":
        inputs["g"] = torch.full((1, 3, 1), 0.5, device=device).log()
    if kind == "fixed decay":
        inputs["g_gamma"] = torch.tensor([0.5], device=device).log()
    if kind in ("channel", "value"):
        name = "gla"
        inputs["g"] = gate(device, [0.5, 0.5], [0.5, 0.25], [0.5, 0.25])
    if kind == "value":
        inputs["g"] = torch.zeros_like(inputs["g"])
        inputs["gv"] = gate(device, *[[1.0, 0.5, 0.25]] * 3)
    o, state = getattr(flaop, path + name)(**inputs)
    expected, rows = (torch.tensor(x, dtype=torch.float32) for x in HAND[kind])
    torch.testing.assert_close(o.view(3, 3).cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.view(2, 3).cpu(), rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", GATES)
@pytest.mark.parametrize("kind", ["chunk_", "fused_recurrent_"])
def test_C08_R04_gradients_are_those_of_the_schema(kind, family):
    """A gradient per differentiable tensor; arguments are tensors and plain numbers, no lengths."""
    forward = getattr(OPS, f"{kind}{family}_fwd").default._schema
    backward = getattr(OPS, f"{kind}{family}_bwd").default._schema
    differentiable = [
        a for a in forward.arguments if "Tensor" in str(a.type) and a.name != "cu_seqlens"
    ]
    assert len(backward.returns) == len(differentiable)
    for argument in (*forward.arguments, *backward.arguments):
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        assert kind in ("Tensor", "float", "int", "bool", "List[bool"), argument
        assert argument.alias_info is None
        assert argument.name not in ("max_seqlen", "T", "N", "layer_idx")


@pytest.mark.parametrize("loss", ["o", "state", "both"])
def test_C15_C16_no_gradient_is_lost(path, everything, matches, loss):
    inputs = everything(T=66, **SMALL)
    _, gradients = matches(path.fn, inputs, loss=loss, oracle=path.oracle)
    assert gradients["q"].any() == (loss != "state")


def test_C19_function_transforms_raise_a_message(path, device):
    inputs = path.inputs(T=3, device=device, **SMALL)
    with pytest.raises(RuntimeError, match="functorch transforms|vmap|torch.func"):
        torch.func.grad(lambda q: path.fn(**{**inputs, "q": q})[0].sum())(inputs["q"])


def test_M01_mixed_devices_are_named(path, everything):
    inputs = everything(T=3, **SMALL)
    for name in TENSORS[1:]:
        if inputs.get(name) is not None:
            with pytest.raises((ValueError, NotImplementedError), match=f"{name}|meta"):
                path.fn(**{**inputs, name: inputs[name].to("meta")})


def test_M05_half_a_sequence_needs_the_state_of_the_other_half(path, device):
    inputs = path.inputs(T=20, device=device, gates="slow", **SMALL)
    first, half = (
        {**inputs, **{name: inputs[name][:, part] for name in path.tokens}}
        for part in (slice(10), slice(10, None))
    )
    whole = path.fn(**inputs)[0][:, 10:]
    assert relative_error(path.fn(**half)[0], whole) > 0.01
    state = path.fn(**first)[1]
    assert relative_error(path.fn(**{**half, "initial_state": state})[0], whole) < 1e-5


def test_R02_published_slopes_of_lightning_attention(device):
    """(8 / HV) (1 - i / layers) h for head h of layer i; in the layer a buffer."""
    H, layers = 8, 12
    x = torch.ones(1, 2, H, 1, device=device)
    slopes = []
    for i in (0, layers - 1):
        # the second token reads exp(-slope) of the first
        o, _ = flaop.lightning_attn(x, x, x, i, layers, scale=1.0)
        slopes.append(-(o[0, 1, :, 0] - 1).log().double().cpu())
        layer = flaop.nn.LightningAttention(16, H, 2, layer_idx=i, num_layers=layers)
        torch.testing.assert_close(-layer.g_gamma.double(), slopes[-1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(slopes[0], torch.arange(8.0).double(), rtol=1e-4, atol=1e-6)
    assert (slopes[1] <= slopes[0] / layers + 1e-6).all()


def test_N19_step_sizes_of_mamba2_are_what_they_say(device):
    """softplus only where asked for, the limits after it."""
    x, dt = torch.randn(1, 9, 2, 4, device=device), torch.randn(1, 9, 2, device=device)
    B, C = torch.randn(2, 1, 9, 1, 8, device=device)
    A = torch.tensor([-1.0, -2.0], device=device)
    for options in ({}, {"dt_softplus": True}, {"dt_limit": (0.2, 0.5)}):
        y, _ = flaop.mamba2_ssd(x, dt, A, B, C, **options)
        assert relative_error(y, mamba2_oracle(x, dt, A, B, C, **options)[0]) < 1e-4
