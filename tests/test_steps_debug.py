"""What the decode ops say of values under FLAOP_DEBUG=1, and that they read none without it."""

import pytest
import torch

import flaop
from flaop.testing import STEP_FAMILIES, slot_indices, step_arguments, step_pool, step_tokens
from flaop.validation import checks, step_values

HV, K, V, SLOTS = 4, 16, 24, 6
SIZES = {"H": 2, "HV": HV, "K": K, "V": V}
FORMS = ("{}_step_", "chunk_{}_pool_", "{}_verify")


def arguments(family, **changes):
    return step_arguments(family, SLOTS, B=3, T=2, **SIZES, **changes)


def fn(family, form):
    return getattr(flaop, form.format(family))


@pytest.mark.parametrize(
    "form, changes, words",
    [
        (FORMS[0], {"state_indices": slot_indices([2, -1, 2])}, ["state_indices", "once", "[2]"]),
        (FORMS[1], {"state_indices": slot_indices([2, -1, 2])}, ["state_indices", "once", "[2]"]),
        (FORMS[0], {"write_indices": slot_indices([1, 5, 1])}, ["write_indices", "once", "[1]"]),
        (FORMS[0], {"state_indices": slot_indices([0, 6, 1])}, ["state_indices", "6 slots", "6"]),
        (FORMS[2], {"state_indices": slot_indices([0, 7, 1])}, ["state_indices", "6 slots", "7"]),
        (FORMS[0], {"write_indices": slot_indices([0, 9, 1])}, ["write_indices", "got 9"]),
        (
            FORMS[0],
            {"state_indices": slot_indices([[0, 1], [2, 3], [4, 1]])},
            ["state_indices", "once", "[1]"],
        ),
        (
            FORMS[0],
            {"lengths": [4, 0, 0], "cu_seqlens": torch.tensor([0, 3, 2, 4])},
            ["cu_seqlens must not decrease"],
        ),
        (FORMS[0], {"lengths": [9, 0, 1]}, ["cu_seqlens", "at most 8 tokens", "9"]),
        (FORMS[2], {"lengths": [9, 0, 1]}, ["cu_seqlens", "at most 8 tokens", "9"]),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict | list) else x,
)
def test_values_under_debug(monkeypatch, form, changes, words):
    for family in STEP_FAMILIES:
        inputs = arguments(family, **{"lengths": None, **changes})
        fn(family, form)(**{n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()})
        monkeypatch.setattr(checks, "DEBUG", True)
        before = inputs["state"].clone()
        with pytest.raises(ValueError, match="FLAOP_DEBUG=1") as error:
            fn(family, form)(**inputs)
        assert all(word in str(error.value) for word in words), error.value
        assert torch.equal(inputs["state"], before)
        monkeypatch.setattr(checks, "DEBUG", False)


@pytest.mark.parametrize("family", ["gated_delta_rule given", "simple_gla", "gla", "kda given"])
def test_positive_gates_under_debug(monkeypatch, family):
    monkeypatch.setattr(checks, "DEBUG", True)
    for form in FORMS:
        inputs = arguments(family)
        inputs["g"][0, 0, 0] = 0.5
        with pytest.raises(ValueError, match="g must be at most 0, got 0.5"):
            fn(family.split()[0], form)(**inputs)


def test_what_is_right_under_debug(monkeypatch):
    """Padding may repeat, a slot may be read twice, and the last checkpoint may be the end."""
    monkeypatch.setattr(checks, "DEBUG", True)
    for family in STEP_FAMILIES:
        flags = {
            "state_indices": slot_indices([-1, -1, 3]),
            "write_indices": slot_indices([3, 3, 3]),
        }
        fn(family, FORMS[0])(**arguments(family, **flags))
        flags = {
            "state_indices": slot_indices([3, 3, 3]),
            "write_indices": slot_indices([3, 1, -1]),
        }
        fn(family, FORMS[0])(**arguments(family, **flags))
        o, *written = fn(family, FORMS[2])(
            **arguments(family, state_indices=slot_indices([3, 3, 3]))
        )
        state, _ = step_pool(SLOTS, HV, K, V)
        commit = fn(family, "{}_commit_")
        commit(state, slot_indices([3, 1, -1]), slot_indices([1, 2, 2]), *written)
        with pytest.raises(ValueError, match=r"state_indices must write each slot once, got \[3\]"):
            commit(state, slot_indices([3, 3, -1]), slot_indices([1, 2, 2]), *written)
        inputs = step_tokens(family, B=2, T=128, **SIZES) | {
            "state": state, "state_indices": slot_indices([0, 1]), "checkpoint_interval": 64,
        }  # fmt: skip
        prefill = fn(family, FORMS[1])
        prefill(**inputs, checkpoint_indices=slot_indices([[2, 0], [3, -1]]))
        with pytest.raises(
            ValueError, match=r"checkpoint_indices must write each slot once.*\[2\]"
        ):
            prefill(**inputs, checkpoint_indices=slot_indices([[2, 0], [2, -1]]))


def test_no_value_is_read_without_debug(monkeypatch):
    for name in ("check_step", "check_pool", "check_verify", "check_commit"):
        monkeypatch.setattr(step_values, name, None)
    for form in FORMS:
        flaop_fn = fn("kda", form)
        flaop_fn(**arguments("kda"))
