"""Bad arguments of the decode ops raise before any kernel runs, under tracing as well, and say what
came and what was expected.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flaop
from flaop.testing import STEP_FAMILIES, slot_indices, step_arguments, step_pool, step_tokens

B, T, H, HV, K, V, SLOTS = 3, 2, 2, 4, 16, 24, 6
SIZES = {"H": H, "HV": HV, "K": K, "V": V}
FORMS = ("{}_step_", "chunk_{}_pool_", "{}_verify")
SINGLE = ("chunk_{}_pool_", "{}_verify")
PACKED = {"lengths": [2, 0, 2]}


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def named(x):
    """Of a test: the arguments that a dict changes, the words of a message; never a tensor."""
    return x.__name__ if isinstance(x, type) else ", ".join(x) if isinstance(x, dict | list) else x


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def arguments(family, **changes):
    return step_arguments(family, SLOTS, B=B, T=T, **SIZES, **changes)


def fn(family, form):
    return getattr(flaop, form.format(family))


def pool(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# name, forms, changed arguments, error, words of the message
BAD = [
    (
        "pool dtype",
        FORMS,
        {"state": pool(SLOTS, HV, K, V, dtype=torch.int8)},
        TypeError,
        ["state must be", "float32", "bfloat16", "int8"],
    ),
    (
        "pool of float64",
        FORMS,
        {"state": pool(SLOTS, HV, K, V, dtype=torch.float64)},
        TypeError,
        ["state must be", "float64"],
    ),
    (
        "pool layout",
        FORMS,
        {"state": pool(SLOTS, HV, V, K)},
        ValueError,
        ["state must", "[slots, HV, K, V] = [6, 4, 16, 24]", "[6, 4, 24, 16]"],
    ),
    (
        "pool layout, V first",
        FORMS,
        {"state_v_first": True},
        ValueError,
        ["state must", "[slots, HV, V, K] = [6, 4, 24, 16]", "[6, 4, 16, 24]"],
    ),
    (
        "pool heads",
        FORMS,
        {"state": pool(SLOTS, H, K, V)},
        ValueError,
        ["state must", "[6, 4, 16, 24]", "[6, 2, 16, 24]"],
    ),
    ("pool rank", FORMS, {"state": pool(HV, K, V)}, ValueError, ["state must", "4 dimensions"]),
    (
        "pool transposed",
        FORMS,
        {"state": pool(SLOTS, HV, V, K).mT},
        ValueError,
        ["state must be contiguous", "strides [1536, 384, 1, 16]"],
    ),
    (
        "pool of heads apart",
        FORMS,
        {"state": pool(SLOTS, 2 * HV, K, V)[:, ::2]},
        ValueError,
        ["state must be contiguous", "strides"],
    ),
    (
        "pool expanded",
        FORMS,
        {"state": pool(1, HV, K, V).expand(SLOTS, -1, -1, -1)},
        ValueError,
        ["state must have slots that do not overlap", "[0, 384, 24, 1]"],
    ),
    (
        "pool device",
        FORMS,
        {"state": pool(SLOTS, HV, K, V).to("meta")},
        ValueError,
        ["state must", "cpu", "meta"],
    ),
    *(
        (
            f"indices of {dtype}",
            FORMS,
            {"state_indices": ints(B).to(dtype)},
            TypeError,
            ["state_indices must be torch.int32", str(dtype)],
        )
        for dtype in (torch.int64, torch.int16, torch.float32, torch.bool)
    ),
    (
        "indices of another length",
        FORMS,
        {"state_indices": ints(B + 1)},
        ValueError,
        ["state_indices must", "[N] = [3]", "[4]"],
    ),
    (
        "indices rank",
        FORMS,
        {"state_indices": ints(B, 1, 1)},
        ValueError,
        ["state_indices must", "[N]", "[3, 1, 1]"],
    ),
    (
        "too few slots per token",
        FORMS[:1],
        {"state_indices": ints(B, 1)},
        ValueError,
        ["state_indices", "[N, S]", "S >= T = 2", "[3, 1]"],
    ),
    (
        "slots per token",
        SINGLE,
        {"state_indices": ints(B, T)},
        ValueError,
        ["state_indices must have shape [N] = [3]", "[3, 2]"],
    ),
    (
        "write indices",
        FORMS[:2],
        {"write_indices": ints(B, T)},
        ValueError,
        ["write_indices must", "[N] = [3]", "[3, 2]"],
    ),
    (
        "write indices dtype",
        FORMS[:2],
        {"write_indices": ints(B, dtype=torch.int64)},
        TypeError,
        ["write_indices must be torch.int32", "int64"],
    ),
    (
        "write indices per token",
        FORMS[:1],
        {"state_indices": ints(B, 3), "write_indices": ints(B, 2)},
        ValueError,
        ["write_indices must", "[N, S] = [3, 3]", "[3, 2]"],
    ),
    (
        "has_initial_state dtype",
        FORMS,
        {"has_initial_state": ints(B)},
        TypeError,
        ["has_initial_state must be torch.bool", "int32"],
    ),
    (
        "has_initial_state",
        FORMS,
        {"has_initial_state": ints(B, 1).bool()},
        ValueError,
        ["has_initial_state must", "[N] = [3]", "[3, 1]"],
    ),
    (
        "accepted without a slot per token",
        FORMS[:1],
        {"num_accepted_tokens": ints(B)},
        ValueError,
        ["num_accepted_tokens needs one slot per token", "[3]"],
    ),
    (
        "accepted dtype",
        FORMS[:1],
        {"state_indices": ints(B, T), "num_accepted_tokens": ints(B, dtype=torch.int64)},
        TypeError,
        ["num_accepted_tokens must be torch.int32", "int64"],
    ),
    (
        "accepted",
        FORMS[:1],
        {"state_indices": ints(B, T), "num_accepted_tokens": ints(B + 1)},
        ValueError,
        ["num_accepted_tokens must", "[N] = [3]", "[4]"],
    ),
    ("q rank", FORMS, {"q": empty(T, H, K)}, ValueError, ["q must", "[2, 2, 16]"]),
    ("k length", FORMS, {"k": empty(B, T + 1, H, K)}, ValueError, ["k must", "[3, 3, 2, 16]"]),
    ("v dtype", FORMS, {"v": empty(B, T, HV, V).bfloat16()}, TypeError, ["v must", "bfloat16"]),
    (
        "offsets with a batch",
        FORMS,
        {"cu_seqlens": torch.tensor([0, T])},
        ValueError,
        ["cu_seqlens needs a batch of one", "[3, 2, 2, 16]"],
    ),
    (
        "offsets dtype",
        FORMS,
        {**PACKED, "cu_seqlens": torch.tensor([0.0, 2.0, 2.0, 4.0])},
        TypeError,
        ["cu_seqlens must be", "float32"],
    ),
    (
        "checkpoints without indices",
        FORMS[1:2],
        {"checkpoint_interval": 64},
        ValueError,
        ["checkpoint_interval and checkpoint_indices go together", "64"],
    ),
    (
        "indices without an interval",
        FORMS[1:2],
        {"checkpoint_indices": ints(B, 2)},
        ValueError,
        ["checkpoint_interval and checkpoint_indices go together"],
    ),
    (
        "checkpoint interval",
        FORMS[1:2],
        {"checkpoint_interval": 32, "checkpoint_indices": ints(B, 2)},
        ValueError,
        ["checkpoint_interval must", "multiple of 64", "32"],
    ),
    (
        "checkpoint indices",
        FORMS[1:2],
        {"checkpoint_interval": 64, "checkpoint_indices": ints(B)},
        ValueError,
        ["checkpoint_indices must", "[N, M]", "[3]"],
    ),
    (
        "checkpoint indices dtype",
        FORMS[1:2],
        {"checkpoint_interval": 64, "checkpoint_indices": ints(B, 2, dtype=torch.int64)},
        TypeError,
        ["checkpoint_indices must be torch.int32", "int64"],
    ),
    (
        "chunk size",
        FORMS[1:2],
        {"chunk_size": 48},
        ValueError,
        ["chunk_size must be one of", "48"],
    ),
]
CASES = [
    pytest.param(form, *case[2:], id=f"{case[0]}-{form.format('F')}")
    for case in BAD
    for form in case[1]
]


def assert_says(error, words):
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("family", STEP_FAMILIES)
@pytest.mark.parametrize("form, changes, kind, words", CASES)
def test_bad_arguments(family, form, changes, kind, words):
    with pytest.raises(kind) as error:
        fn(family, form)(**arguments(family, **changes))
    assert_says(error, words)


@pytest.mark.parametrize("form, changes, kind, words", CASES)
def test_fakes_refuse_the_same(form, changes, kind, words):
    inputs = arguments("kda", **changes)
    with FakeTensorMode() as mode:
        inputs = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in inputs.items()}
        with pytest.raises(kind) as error:
            fn("kda", form)(**inputs)
    assert_says(error, words)


@pytest.mark.parametrize("form", ["{}_step_", "{}_verify"])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_more_than_eight_tokens(family, form):
    op = fn(family, form)
    pool, _ = step_pool(SLOTS, HV, K, V)
    for shape, words in (
        ({"B": B, "T": 9}, ["q may have at most 8 tokens", "T = 9", "chunk pool"]),
        ({"lengths": [9, 8, 8]}, ["q may have at most 8 tokens", "T = 25", "N = 3"]),
    ):
        inputs = step_tokens(family, **shape, **SIZES)
        with pytest.raises(ValueError) as error:
            op(**inputs, state=pool, state_indices=slot_indices([0, 1, 2]))
        assert_says(error, words)


def test_checkpoints_of_all_tokens():
    inputs = step_tokens("kda", B=B, T=200, **SIZES)
    pool, _ = step_pool(SLOTS, HV, K, V)
    with pytest.raises(ValueError) as error:
        flaop.chunk_kda_pool_(
            **inputs, state=pool, state_indices=slot_indices([0, 1, 2]), checkpoint_interval=64,
            checkpoint_indices=ints(B, 2),
        )  # fmt: skip
    assert_says(error, ["checkpoint_indices must have a column", "T // 64 = 3", "[3, 2]"])


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"k": empty(B, T, H, K).bfloat16()}, TypeError, ["k must be torch.float32", "bfloat16"]),
        ({"u": empty(B, T, 3, V)}, ValueError, ["u must", "multiple of k's heads", "HV = 3"]),
        ({"u": empty(B, T + 1, HV, V)}, ValueError, ["u must", "[3, 3, 4, 24]"]),
        ({"g": empty(B, T, HV, V)}, ValueError, ["g must", "[3, 2, 4, 16]", "[3, 2, 4, 24]"]),
        ({"g": empty(B, T, H)}, ValueError, ["g must", "[3, 2, 4]", "[3, 2, 2]"]),
        ({"num_accepted_tokens": ints(B).long()}, TypeError, ["num_accepted_tokens", "int64"]),
        ({"num_accepted_tokens": ints(B + 1)}, ValueError, ["num_accepted_tokens", "[4]"]),
        ({"state_indices": ints(B, T)}, ValueError, ["state_indices must", "[N] = [3]", "[3, 2]"]),
        ({"state_indices": ints(B).long()}, TypeError, ["state_indices must", "int64"]),
        ({"has_initial_state": ints(B)}, TypeError, ["has_initial_state must", "int32"]),
        ({"state": pool(SLOTS, HV, V, K)}, ValueError, ["state must", "[6, 4, 24, 16]"]),
        ({"state": pool(SLOTS, HV, K, V).double()}, TypeError, ["state must", "float64"]),
        ({"cu_seqlens": torch.tensor([0, 2])}, ValueError, ["cu_seqlens", "batch of one", "k of"]),
        (
            {"k": empty(B, 9, H, K), "u": empty(B, 9, HV, V), "g": empty(0)},
            ValueError,
            ["k may have at most 8 tokens", "T = 9"],
        ),
    ],
    ids=named,
)
def test_bad_arguments_of_commit(changes, kind, words):
    inputs = {
        "state": pool(SLOTS, HV, K, V), "state_indices": ints(B), "num_accepted_tokens": ints(B),
        "k": empty(B, T, H, K), "u": empty(B, T, HV, V), "g": empty(B, T, HV, K),
    }  # fmt: skip
    for family in STEP_FAMILIES:
        with pytest.raises(kind) as error:
            fn(family, "{}_commit_")(**{**inputs, **changes})
        assert_says(error, words)


def test_gates_of_the_families():
    """Arguments of a family are those of its other ops: its own checks name them."""
    for family, changes, words in (
        ("kda", {"A_log": None}, ["A_log is needed"]),
        ("kda", {"lower_bound": 1.0}, ["lower_bound must", "1.0"]),
        ("gated_delta_rule", {"g": empty(B, T, HV, K)}, ["one gate per head"]),
        ("gated_delta_rule", {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
         ["allow_neg_eigval"]),
        ("simple_gla", {"g_gamma": empty(H)}, ["g_gamma must", "[4]", "[2]"]),
        ("gla", {"g": empty(B, T, HV)}, ["one gate per key channel"]),
    ):  # fmt: skip
        for form in FORMS:
            with pytest.raises(ValueError) as error:
                fn(family, form)(**arguments(family, **changes))
            assert_says(error, words)
