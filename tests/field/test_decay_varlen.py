"""Field reports on packed sequences (V, G09, R05) for the decay families and, where a probe asks
the same of it, the gated delta rule.
"""

import pytest
import torch

from flaop.testing import relative_error

TOKENS = ("q", "k", "v", "g")
SIZES = dict(H=1, K=16, V=8)


def test_V01_V03_empty_sequences_pass_their_state(path, device, matches):
    """And the gradient of their state is that of their final state, exactly."""
    inputs = path.inputs(lengths=[0, 70, 0, 130, 0], device=device, initial_state=True, **SIZES)
    outputs, _ = matches(path.fn, inputs, oracle=path.oracle)
    empty = [0, 2, 4]
    assert torch.equal(outputs["state"][empty], inputs["initial_state"][empty])
    state = inputs["initial_state"].clone().requires_grad_()
    _, final_state = path.fn(**{**inputs, "initial_state": state})
    cotangent = torch.randn_like(final_state)
    (gradient,) = torch.autograd.grad(final_state, state, cotangent)
    assert torch.equal(gradient[empty], cotangent[empty])


@pytest.mark.parametrize("lengths", [[781, 1267], [1] * 64], ids=["long", "one token"])
def test_V05_chunks_are_counted_per_sequence(path, device, matches, lengths):
    if not path.chunk:
        pytest.skip("no chunks")
    inputs = path.inputs(lengths=lengths, device=device, gates="fast", **SIZES)
    matches(path.fn, inputs, oracle=path.oracle)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_V05_any_chunk_hint(decay, device, chunk_size):
    inputs = decay.inputs(lengths=[81, 100], device=device, **SIZES)
    o, _ = decay.fn(**inputs, chunk_size=chunk_size, split_size=64)
    assert relative_error(o, decay.oracle(**inputs)[0]) < 1e-4


@pytest.mark.parametrize(
    "T, K, V",
    [(1, 8, 1), (7, 60, 64), (15, 100, 1), (17, 192, 16), (65, 1, 1), (20, 300, 8),
     *[pytest.param(*shape, marks=pytest.mark.slow_on_gpu)
       for shape in ((2, 16, 8), (3, 24, 16), (8, 64, 100),
                     (16, 128, 8), (63, 256, 8), (64, 8, 100))]],
)  # fmt: skip
def test_V06_S14_small_and_odd_sizes(decay, device, matches, T, K, V):
    inputs = decay.inputs(T=T, H=1, K=K, V=V, device=device, initial_state=True)
    matches(decay.fn, inputs, oracle=decay.oracle)


@pytest.mark.parametrize("shape", [dict(B=0, T=3), dict(T=0), dict(lengths=[])], ids=str)
def test_V07_nothing_to_do(path, device, gradients_of, shape):
    inputs = path.inputs(**{**shape, **SIZES}, device=device, initial_state=True)
    outputs, gradients = gradients_of(path.fn, inputs)
    assert outputs["o"].shape == inputs["v"].shape
    assert torch.equal(outputs["state"], inputs["initial_state"])
    for name, gradient in gradients.items():
        assert gradient.shape == inputs[name].shape


@pytest.mark.parametrize("bounds", [[0, 256, 512, 768], [0, 100, 50, 256], [1, 256], [0, 255]])
def test_V08_content_of_cu_seqlens_cannot_lead_outside(path, device, matches, bounds):
    inputs = path.inputs(lengths=[256], device=device, gates="fast", **SIZES)
    inputs["cu_seqlens"] = torch.tensor(bounds, device=device)
    outputs, gradients = matches(path.fn, inputs, oracle=path.oracle)
    covered = inputs["cu_seqlens"].clamp(0, 256).cummax(0).values.tolist()
    for x in (outputs["o"], *(gradients[name] for name in path.tokens)):
        assert not x[:, : covered[0]].any() and not x[:, covered[-1] :].any()


@pytest.mark.parametrize("bounds", [torch.zeros(1, 2), torch.tensor([[0, 256]]), torch.zeros(0)])
def test_V08_layout_of_cu_seqlens_always_raises(path, device, bounds):
    inputs = path.inputs(lengths=[256], device=device, **SIZES)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
        path.fn(**{**inputs, "cu_seqlens": bounds.to(device)})
    batch = path.inputs(B=2, T=8, device=device, **SIZES)
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of one"):
        path.fn(**batch | {"cu_seqlens": torch.tensor([0, 8], device=device)})


def test_V09_misspelt_keywords_are_errors(path, device):
    inputs = path.inputs(lengths=[3, 5], device=device, **SIZES)
    inputs["cu_seqlen"] = inputs.pop("cu_seqlens")
    with pytest.raises(TypeError, match="cu_seqlen"):
        path.fn(**inputs)


def test_V09_packed_sequences_do_not_see_each_other(decay, device, gradients_of):
    inputs = decay.inputs(lengths=[70, 90], device=device, **SIZES)
    before, before_gradients = gradients_of(decay.fn, inputs)
    for name in TOKENS:
        inputs[name] = inputs[name].clone()
    inputs["v"][:, :70] = 1e4
    inputs["g"][:, :70] = -3
    inputs["q"][:, :70] *= -1
    after, after_gradients = gradients_of(decay.fn, inputs)
    assert torch.equal(before["o"][:, 70:], after["o"][:, 70:])
    assert torch.equal(before["state"][1], after["state"][1])
    for name in TOKENS:
        assert torch.equal(before_gradients[name][:, 70:], after_gradients[name][:, 70:]), name


def test_V11_many_short_sequences(path, device, matches):
    lengths = [1 + n % 3 for n in range(257)]
    inputs = path.inputs(lengths=lengths, device=device, H=1, K=8, V=8, initial_state=True)
    matches(path.fn, inputs, oracle=path.oracle)


@pytest.mark.parametrize("end", [300, 0])
def test_G09_buffers_larger_than_their_tokens(path, device, gradients_of, end):
    """A buffer of 512 rows with 300 in use: padding gives zeros, whatever it holds."""
    inputs = path.inputs(lengths=[512], device=device, **SIZES)
    inputs["cu_seqlens"] = torch.tensor([0, end], device=device)
    used = {**inputs, **{name: inputs[name][:, :end].clone() for name in path.tokens}}
    for name in path.tokens:
        inputs[name] = inputs[name].clone()
        inputs[name][:, end:] = torch.nan
    outputs, gradients = gradients_of(path.fn, inputs)
    assert torch.equal(outputs["o"][:, :end], path.fn(**used)[0])
    assert not outputs["o"][:, end:].any()
    for name in path.tokens:
        assert torch.isfinite(gradients[name]).all() and not gradients[name][:, end:].any(), name


def test_R05_states_at_chosen_tokens(path, device):
    """States after 64, 128 and 190 of 200 tokens, by three shorter packed sequences."""
    inputs = path.inputs(T=200, device=device, **SIZES)
    pieces = {n: torch.cat([inputs[n][:, :end] for end in (64, 128, 190)], 1) for n in path.tokens}
    bounds = torch.tensor([0, 64, 192, 382], device=device)
    _, states = path.fn(**{**inputs, **pieces, "cu_seqlens": bounds})
    for n, end in enumerate((64, 128, 190)):
        first = {name: inputs[name][:, :end] for name in path.tokens}
        _, state = path.oracle(**{**inputs, **first})
        assert relative_error(states[n], state[0]) < 1e-5
