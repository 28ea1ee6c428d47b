"""Field reports on packed sequences (V)."""

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

TOKENS = ("q", "k", "v", "g", "beta")
SIZES = dict(H=1, K=16, V=8)


def test_V01_empty_sequences_pass_their_state(fn, device, matches):
    inputs = kda_inputs(lengths=[0, 70, 0, 130, 0], device=device, initial_state=True, **SIZES)
    outputs, _ = matches(fn, inputs)
    for n in (0, 2, 4):
        assert torch.equal(outputs["state"][n], inputs["initial_state"][n])


def test_V01_only_empty_sequences(fn, device, gradients_of):
    inputs = kda_inputs(lengths=[0] * 5, device=device, initial_state=True, **SIZES)
    outputs, gradients = gradients_of(fn, inputs)
    assert outputs["o"].shape == (1, 0, 1, 8)
    assert torch.equal(outputs["state"], inputs["initial_state"])
    assert gradients["q"].shape == (1, 0, 1, 16)


def test_V03_backward_of_empty_sequences(fn, device, matches):
    """The gradient of an empty sequence's state is that of its final state, exactly."""
    inputs = kda_inputs(lengths=[0, 5, 0], device=device, initial_state=True, **SIZES)
    matches(fn, inputs)
    state = inputs["initial_state"].clone().requires_grad_()
    _, final_state = fn(**{**inputs, "initial_state": state})
    cotangent = torch.randn_like(final_state)
    (gradient,) = torch.autograd.grad(final_state, state, cotangent)
    assert torch.equal(gradient[[0, 2]], cotangent[[0, 2]])


@pytest.mark.parametrize("lengths", [[781, 1267], [1] * 64], ids=["long", "one token"])
def test_V05_chunks_are_counted_per_sequence(device, matches, lengths):
    matches(flaop.chunk_kda, kda_inputs(lengths=lengths, device=device, gates="fast", **SIZES))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_V05_any_chunk_hint(device, chunk_size):
    inputs = kda_inputs(lengths=[81, 100], device=device, **SIZES)
    o, _ = flaop.chunk_kda(**inputs, chunk_size=chunk_size)
    assert relative_error(o, kda_oracle(**inputs)[0]) < 1e-4


@pytest.mark.parametrize(
    "T, K, V",
    [(1, 8, 1), (2, 16, 8), (3, 24, 16), (7, 60, 64), (8, 64, 100), (15, 100, 1), (16, 128, 8),
     (17, 192, 16), (63, 256, 8), (64, 8, 100), (65, 1, 1)],
)  # fmt: skip
def test_V06_small_and_odd_sizes(fn, device, matches, T, K, V):
    matches(fn, kda_inputs(T=T, H=1, K=K, V=V, device=device, initial_state=True))


def test_V06_too_many_channels_is_one_sentence(fn, device):
    with pytest.raises(ValueError, match="at most 256 channels.*, got K = 257"):
        fn(**kda_inputs(T=2, H=1, K=257, V=8, device=device))


@pytest.mark.parametrize("shape", [dict(B=0, T=3), dict(T=0), dict(lengths=[])], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_V07_nothing_to_do(fn, device, gradients_of, shape, compiled):
    inputs = kda_inputs(**{**shape, **SIZES}, device=device, initial_state=True)
    call = (
        torch.compile(lambda **x: fn(**x), backend="aot_eager", fullgraph=True) if compiled else fn
    )
    torch._dynamo.reset()
    outputs, gradients = gradients_of(call, inputs)
    assert outputs["o"].shape == inputs["v"].shape
    assert torch.equal(outputs["state"], inputs["initial_state"])
    for name, gradient in gradients.items():
        assert gradient.shape == inputs[name].shape


@pytest.mark.parametrize("bounds", [[0, 256, 512, 768], [0, 100, 50, 256], [1, 256], [0, 255]])
def test_V08_content_of_cu_seqlens_cannot_lead_outside(fn, device, matches, bounds):
    """Malformed boundaries are made monotone and clamped: nothing outside is read."""
    inputs = kda_inputs(lengths=[256], device=device, gates="fast", **SIZES)
    inputs["cu_seqlens"] = torch.tensor(bounds, device=device)
    outputs, gradients = matches(fn, inputs)
    covered = inputs["cu_seqlens"].clamp(0, 256).cummax(0).values.tolist()
    for x in (outputs["o"], gradients["q"], gradients["g"], gradients["beta"]):
        assert not x[:, : covered[0]].any() and not x[:, covered[-1] :].any()


@pytest.mark.parametrize(
    "bounds, error",
    [
        (torch.zeros(1, 2), TypeError),
        (torch.tensor([[0, 256]]), ValueError),
        (torch.zeros(0), TypeError),
    ],
)
def test_V08_layout_of_cu_seqlens_always_raises(fn, device, bounds, error):
    inputs = kda_inputs(lengths=[256], device=device, **SIZES)
    with pytest.raises((error, ValueError), match="cu_seqlens"):
        fn(**{**inputs, "cu_seqlens": bounds.to(device)})


def test_V08_batch_and_packing_exclude_each_other(fn, device):
    inputs = kda_inputs(B=2, T=8, device=device, **SIZES)
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of one"):
        fn(**inputs | {"cu_seqlens": torch.tensor([0, 8], device=device)})


@pytest.mark.gpu
def test_V08_cu_seqlens_on_another_device(fn):
    inputs = kda_inputs(lengths=[8], device="cuda", **SIZES)
    with pytest.raises(ValueError, match="cu_seqlens must be on the device of q"):
        fn(**inputs | {"cu_seqlens": inputs["cu_seqlens"].cpu()})


@pytest.mark.parametrize("bounds", [[0, 100, 50, 256], [0, 256, 512], [-1, 256]])
def test_V08_checked_mode_refuses_the_content(bounds):
    from flaop.validation.kda import check, check_values

    inputs = kda_inputs(lengths=[256], **SIZES)
    inputs["cu_seqlens"] = torch.tensor(bounds)
    with pytest.raises(ValueError, match="cu_seqlens must not decrease and stay in"):
        check_values(check(**inputs))


def test_V09_misspelt_keywords_are_errors(fn, device):
    inputs = kda_inputs(lengths=[3, 5], device=device, **SIZES)
    inputs["cu_seqlen"] = inputs.pop("cu_seqlens")
    with pytest.raises(TypeError, match="cu_seqlen"):
        fn(**inputs)


def test_V09_packed_sequences_do_not_see_each_other(fn, device, gradients_of):
    inputs = kda_inputs(lengths=[70, 90], device=device, **SIZES)
    before, before_gradients = gradients_of(fn, inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name].clone()
    inputs["v"][:, :70] = 1e4
    inputs["g"][:, :70] = -3
    inputs["q"][:, :70] *= -1
    after, after_gradients = gradients_of(fn, inputs)
    assert torch.equal(before["o"][:, 70:], after["o"][:, 70:])
    assert torch.equal(before["state"][1], after["state"][1])
    for name in TOKENS:
        assert torch.equal(before_gradients[name][:, 70:], after_gradients[name][:, 70:]), name


@pytest.mark.parametrize("pieces", [[1, 2, 3, 63, 64, 64], [1] * 40], ids=["pieces", "tokens"])
def test_V10_pieces_with_carried_state(fn, device, pieces, pieces_make_one_run):
    """Outputs, final state and all gradients, through every piece, are those of one call."""
    inputs = kda_inputs(
        T=sum(pieces), device=device, initial_state=True, requires_grad=True, **SIZES
    )
    pieces_make_one_run(fn, inputs, TOKENS, pieces)


def test_V11_many_short_sequences(fn, device, matches):
    lengths = [1 + n % 3 for n in range(257)]
    matches(fn, kda_inputs(lengths=lengths, device=device, H=1, K=8, V=8, initial_state=True))
