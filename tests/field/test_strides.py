"""Field reports on strides, alignment, shapes and silent wrong results (S)."""

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


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


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_S01_S03_S06_any_view_of_any_input(fn, device, gradients_of, view):
    """Each argument in turn as a view: bitwise what the contiguous call gives, gradients too."""
    inputs = kda_inputs(
        B=2, T=9, H=2, K=16, V=24, device=device, dtype=torch.bfloat16, gate_in_kernel="softplus",
        initial_state=True,
    )  # fmt: skip

    def call(**leaves):
        # views of leaves that require grad: gradients arrive at the dense tensors
        return fn(**{n: view(x) if n == name else x for n, x in leaves.items()})

    name = None
    outputs, gradients = gradients_of(fn, inputs)
    for name in TENSORS:
        seen, seen_gradients = gradients_of(call, inputs)
        for key, x in {**outputs, **gradients}.items():
            assert torch.equal(x, {**seen, **seen_gradients}[key]), (name, key)


def test_S01_expanded_inputs_and_gradients(fn, device):
    """Stride 0 over the batch, and the gradient of a sum, which is one number expanded."""
    inputs = kda_inputs(T=70, H=1, K=16, V=8, device=device)
    wide = {
        n: x.expand(3, *x.shape[1:]) for n, x in inputs.items() if n in TENSORS and x is not None
    }
    v = wide["v"].detach().requires_grad_()
    o, _ = fn(**{**inputs, **wide, "v": v})
    ref, _ = fn(**inputs)
    assert all(torch.equal(x, ref[0]) for x in o)
    o.sum().backward()
    dense = wide["v"].detach().clone().requires_grad_()
    fn(**{**inputs, **wide, "v": dense})[0].backward(torch.ones_like(o))
    assert torch.equal(v.grad, dense.grad)


@pytest.mark.parametrize("K", [48, 60, 100])
@pytest.mark.parametrize("neighbour", [torch.nan, 1e30])
def test_S04_nothing_past_the_end_is_read(fn, device, K, neighbour):
    """Every input carved out of a buffer whose next elements would poison the result."""
    inputs = kda_inputs(
        T=3, H=1, K=K, V=20, device=device, gate_in_kernel="softplus", initial_state=True
    )
    expected, expected_state = kda_oracle(**inputs)
    for name in TENSORS:
        x = inputs[name]
        buffer = torch.full((x.numel() + 1024,), neighbour, device=device, dtype=x.dtype)
        buffer[: x.numel()] = x.flatten()
        inputs[name] = buffer[: x.numel()].view(x.shape)
    o, state = fn(**inputs)
    assert relative_error(o, expected) < 1e-4
    assert relative_error(state, expected_state) < 1e-4


def test_S05_unrepeated_heads_are_refused(fn, device):
    inputs = kda_inputs(T=8, H=16, HV=32, K=8, V=8, device=device)
    for name in ("g", "beta"):
        with pytest.raises(ValueError, match=rf"{name} must have shape .*32.*, got \[1, 8, 16"):
            fn(**{**inputs, name: inputs[name][:, :, :16]})
    with pytest.raises(ValueError, match="g must have shape"):
        fn(**{**inputs, "g": inputs["g"][..., 0]})
    with pytest.raises(ValueError, match="beta must have shape"):
        fn(**{**inputs, "beta": inputs["beta"][..., 0]})


def test_S05_head_first_tensors_are_refused_where_shapes_can_tell(fn, device):
    inputs = kda_inputs(T=8, H=64, K=8, V=8, device=device)
    inputs["q"] = inputs["q"].transpose(1, 2)
    with pytest.raises(ValueError, match="k must have shape .*64, 8, 8.*got .*8, 64, 8"):
        fn(**inputs)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_S05_gradients_of_shared_heads_are_sums(fn, device, matches, group):
    matches(fn, kda_inputs(T=20, H=2, HV=2 * group, K=16, V=8, device=device, l2norm=True))


def test_S09_a_forced_path_serves_or_raises(device):
    """No fallback behind the caller's back, and the reason is in the message."""
    inputs = kda_inputs(T=66, H=1, K=256, V=128, device=device)
    for path in ("chunk", "fused_recurrent"):
        with flaop.backend(path):
            assert flaop.explain(flaop.kda, **inputs).path == path
            assert relative_error(flaop.kda(**inputs)[0], kda_oracle(**inputs)[0]) < 1e-4
    with pytest.raises((ValueError, NotImplementedError), match="flash_kda"):
        flaop.kda(**inputs, backend="flash_kda")


@pytest.mark.parametrize("T", [1, 2, 5, 64, 65])
@pytest.mark.parametrize(
    "options", [{}, {"gate_in_kernel": "bounded"}, {"state_v_first": True}], ids=str
)
def test_S10_automatic_choice_serves_what_any_path_serves(device, T, options):
    for K, V, HV, dtype in ((16, 8, 1, torch.float16), (60, 24, 2, torch.float32)):
        inputs = kda_inputs(
            T=T, H=1, HV=HV, K=K, V=V, dtype=dtype, device=device, initial_state=True, **options
        )
        path = flaop.explain(flaop.kda, **inputs).path
        assert flaop.supports(path, flaop.kda, **inputs)
        limit = 1e-2 if dtype is torch.float16 else 1e-4
        assert relative_error(flaop.kda(**inputs)[0], kda_oracle(**inputs)[0]) < limit


def test_S11_the_initial_state_is_used_or_refused(fn, device):
    inputs = kda_inputs(T=3, H=1, K=8, V=8, device=device, initial_state=True)
    with_state, _ = fn(**inputs)
    without, _ = fn(**{**inputs, "initial_state": None})
    assert relative_error(with_state, without) > 0.1
    for shape in ((2, 1, 8, 8), (1, 2, 8, 8)):
        with pytest.raises(ValueError, match="initial_state must have shape"):
            fn(**{**inputs, "initial_state": torch.zeros(shape, device=device)})
    elsewhere = torch.zeros(1, 1, 8, 8, device="meta")
    with pytest.raises(ValueError, match="initial_state must be on the device of q"):
        fn(**{**inputs, "initial_state": elsewhere})


def test_S12_values_are_checked_where_nothing_was_written(fn, device, poison, matches):
    inputs = kda_inputs(T=65, H=2, K=60, V=24, device=device, initial_state=True)
    poison(device, torch.float32, (1, 65, 2, 24), (1, 65, 2, 60), (1, 2, 60, 24), (1, 65, 2, 64))
    matches(fn, inputs)


@pytest.mark.parametrize("name", ["kda", "chunk_kda", "fused_recurrent_kda"])
def test_S13_smoke_call_of_every_public_function(device, name):
    inputs = kda_inputs(T=5, H=1, K=8, V=8, device=device)
    required = {n: inputs[n] for n in ("q", "k", "v", "g", "beta")}
    o, state = getattr(flaop, name)(**required)
    assert state is None and relative_error(o, kda_oracle(**required)[0]) < 1e-4
    every = kda_inputs(
        H=1, K=8, V=8, lengths=[5, 3], device=device, gate_in_kernel="bounded", l2norm=True,
        neg_eigval=True, initial_state=True, state_v_first=True,
    )  # fmt: skip
    every["scale"] = 0.7
    o, state = getattr(flaop, name)(**every)
    expected = kda_oracle(**every)
    assert relative_error(o, expected[0]) < 1e-4 and relative_error(state, expected[1]) < 1e-4


@pytest.mark.parametrize("K, V", [(60, 132), (100, 60), (132, 100)])
def test_S14_sizes_that_are_no_multiple_of_8(fn, device, matches, K, V):
    matches(fn, kda_inputs(T=20, H=1, K=K, V=V, device=device))
