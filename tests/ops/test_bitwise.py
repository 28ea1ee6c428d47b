"""What must be equal to the last bit: prefixes, neighbours in a pack, repeated calls."""

import pytest
import torch

import flaop
from flaop.testing import assert_within_budget, chunk_budget_reference, kda_oracle
from flaop.testing.bitwise import gradients, per_token, with_other_tokens

PATHS = {"chunk": flaop.chunk_kda, "fused_recurrent": flaop.fused_recurrent_kda}

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_prefix_does_not_know_what_follows(device, path, grad, arguments):
    inputs = arguments("main", T=200, device=device, requires_grad=grad)
    o, _ = PATHS[path](**inputs)
    for length in (1, 15, 16, 63, 64, 70, 128, 199):
        other, _ = PATHS[path](**with_other_tokens(inputs, length, 200))
        assert torch.equal(o[:, :length], other[:, :length]), length
        assert not torch.equal(o[:, length:], other[:, length:]), length


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("path", PATHS)
def test_a_prefix_of_a_packed_sequence(device, path, arguments):
    inputs = arguments("packed", lengths=[70, 90], device=device)
    o, _ = PATHS[path](**inputs)
    for length in (1, 64, 69, 71, 75, 134, 159):
        other, _ = PATHS[path](**with_other_tokens(inputs, length, 160))
        assert torch.equal(o[:, :length], other[:, :length]), length


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_packed_sequences_do_not_know_their_neighbours(device, path, changed, arguments):
    bounds = (0, 70, 71, 150)
    inputs = arguments("packed", lengths=[70, 1, 79], device=device, requires_grad=True)
    others = with_other_tokens(inputs, bounds[changed], bounds[changed + 1])
    (o, state), found = gradients(PATHS[path], inputs)
    (other_o, other_state), other_found = gradients(PATHS[path], others)
    for n in {0, 1, 2} - {changed}:
        tokens = slice(bounds[n], bounds[n + 1])
        assert torch.equal(o[:, tokens], other_o[:, tokens])
        assert torch.equal(state[n], other_state[n])
        assert torch.equal(found["initial_state"][n], other_found["initial_state"][n])
        for name in per_token(inputs):
            assert torch.equal(found[name][:, tokens], other_found[name][:, tokens]), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["main", "packed", "softplus"])
def test_two_calls_are_equal(device, path, family, arguments):
    if family == "packed":
        inputs = arguments(family, lengths=[300, 0, 1, 99], device=device, requires_grad=True)
    else:
        inputs = arguments(family, B=2, T=200, device=device, requires_grad=True)
    outputs, found = gradients(PATHS[path], inputs)
    for _ in range(3):
        again, found_again = gradients(PATHS[path], inputs)
        for x, y in zip(outputs, again, strict=True):
            assert torch.equal(x, y)
        for name, x in found.items():
            assert torch.equal(x, found_again[name]), name


@pytest.mark.parametrize("family", ["main", "packed"])
def test_kept_intermediate_results_change_nothing(device, family, arguments):
    """disable_recompute trades memory for time; the products are the same ones."""
    inputs = arguments(family, device=device, requires_grad=True)
    (o, state), recomputed = gradients(flaop.chunk_kda, inputs)
    kept_inputs = {**inputs, "disable_recompute": True}
    (kept_o, kept_state), kept = gradients(flaop.chunk_kda, kept_inputs)
    assert torch.equal(o, kept_o) and torch.equal(state, kept_state)

    on_cpu = {
        name: x.detach().cpu().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x
        for name, x in inputs.items()
    }
    _, oracle = gradients(kda_oracle, on_cpu)
    _, budget = gradients(chunk_budget_reference, on_cpu)
    for name in (*per_token(inputs), "initial_state"):
        for found in (recomputed, kept):
            assert_within_budget(
                name, found[name].cpu(), oracle[name], budget[name], inputs["q"].dtype, "gradient"
            )
