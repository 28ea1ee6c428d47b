"""What must be equal to the last bit: prefixes, neighbours in a pack, repeated calls."""

import pytest
import torch

import flaop
from flaop.testing.bitwise import gradients, per_token, with_other_tokens

# Family of options, and the functions that serve it.
SERVED = {
    "simple": ("chunk_simple_gla", "fused_recurrent_simple_gla"),
    "channel": ("chunk_gla", "fused_recurrent_gla"),
}
CASES = [(family, path) for family, paths in SERVED.items() for path in paths]

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")


@pytest.mark.parametrize("family, path", CASES)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_prefix_does_not_know_what_follows(decay_device, family, path, grad, arguments):
    inputs = arguments(f"{family} main", T=200, device=decay_device, requires_grad=grad)
    fn = getattr(flaop, path)
    o, _ = fn(**inputs)
    for length in (1, 15, 16, 63, 64, 70, 128, 199):
        other, _ = fn(**with_other_tokens(inputs, length, 200))
        assert torch.equal(o[:, :length], other[:, :length]), length
        assert not torch.equal(o[:, length:], other[:, length:]), length


@pytest.mark.parametrize("family, path", CASES)
def test_a_prefix_of_a_packed_sequence(decay_device, family, path, arguments):
    inputs = arguments(f"{family} packed", lengths=[70, 90], device=decay_device)
    fn = getattr(flaop, path)
    o, _ = fn(**inputs)
    for length in (1, 64, 69, 71, 75, 134, 159):
        other, _ = fn(**with_other_tokens(inputs, length, 160))
        assert torch.equal(o[:, :length], other[:, :length]), length


@pytest.mark.parametrize("family, path", CASES)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_packed_sequences_do_not_know_their_neighbours(
    decay_device, family, path, changed, arguments
):
    bounds = (0, 70, 71, 150)
    inputs = arguments(
        f"{family} packed", lengths=[70, 1, 79], device=decay_device, requires_grad=True
    )
    others = with_other_tokens(inputs, bounds[changed], bounds[changed + 1])
    fn = getattr(flaop, path)
    (o, state), found = gradients(fn, inputs)
    (other_o, other_state), other_found = gradients(fn, others)
    for n in {0, 1, 2} - {changed}:
        tokens = slice(bounds[n], bounds[n + 1])
        assert torch.equal(o[:, tokens], other_o[:, tokens])
        assert torch.equal(state[n], other_state[n])
        assert torch.equal(found["initial_state"][n], other_found["initial_state"][n])
        for name in per_token(inputs):
            assert torch.equal(found[name][:, tokens], other_found[name][:, tokens]), name


@pytest.mark.parametrize("split_size", [0, 128])
@pytest.mark.parametrize("family, path", [*CASES, ("channel and value", "fused_recurrent_gla")])
@pytest.mark.parametrize("layout", ["main", "packed"])
def test_two_calls_are_equal(decay_device, family, path, layout, split_size, arguments):
    if split_size and path.startswith("fused_recurrent"):
        pytest.skip("the recurrent path keeps no chunk states")
    if family == "channel and value":
        if layout == "packed":
            pytest.skip("one layout is enough")
        inputs = arguments(family, T=70, device=decay_device, requires_grad=True)
    elif layout == "packed":
        inputs = arguments(
            f"{family} packed", lengths=[300, 0, 1, 99], device=decay_device, requires_grad=True
        )
    else:
        inputs = arguments(f"{family} main", B=2, T=200, device=decay_device, requires_grad=True)
    inputs["split_size"] = split_size
    outputs, found = gradients(getattr(flaop, path), inputs)
    for _ in range(3):
        again, found_again = gradients(getattr(flaop, path), inputs)
        for x, y in zip(outputs, again, strict=True):
            assert torch.equal(x, y)
        for name, x in found.items():
            assert torch.equal(x, found_again[name]), name
