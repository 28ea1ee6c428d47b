"""simple_gla and gla against the float64 token loop: outputs, states and each gradient, within
budget.
"""

import functools

import pytest
import torch

import flaop
from flaop.testing import pairwise
from flaop.testing.comparison import check_all, check_alone
from flaop.testing.expected import DecayExpected

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")

INPUTS = ("q", "k", "v", "g", "g_gamma", "gv", "initial_state")
KINDS = ("chunk", "fused_recurrent")
FACTORS = {
    "T": (1, 63, 64, 65, 130, 1000),
    "K": (16, 60, 64, 100, 128, 256, 300),
    "gate": ("g", "g_gamma", "both", None, "channel", "channel and value"),
    "V": (24, 128),
    "dtype": ("float32", "bfloat16", "float16"),
    "gates": ("fast", "slow", "mixed"),
    "heads": ((2, 2), (1, 2), (2, 4)),
    "packed": (False, True),
    "initial_state": (False, True),
    "state_v_first": (False, True),
}
CASES = pairwise(**FACTORS)
# On CUDA: lengths and regimes within the options that are compiled together.
FAMILY_CASES = [
    *[("simple main", {"T": T, "gates": gates})
      for T, gates in ((1, "mixed"), (63, "slow"), (64, "fast"), (65, "mixed"), (1000, "mixed"))],
    ("simple main", {"B": 2, "T": 130, "gates": "slow"}),
    ("simple packed", {"lengths": [0, 1, 40, 0, 89], "gates": "mixed"}),
    ("simple packed", {"lengths": [64, 1, 935, 0], "gates": "slow"}),
    ("simple packed", {"lengths": [0, 1, 0], "gates": "fast"}),
    ("simple constant", {"T": 1000, "gates": "slow"}),
    ("simple constant", {"B": 2, "T": 130, "gates": "mixed"}),
    ("simple without gate", {"B": 2, "T": 130}),
    ("simple without gate", {"T": 1000}),
    ("simple odd", {"gates": "mixed"}),
    ("simple odd", {"lengths": [300, 0, 1, 65], "gates": "slow"}),
    ("simple wide", {"T": 130, "gates": "mixed"}),
    *[("channel main", {"T": T, "gates": gates})
      for T, gates in ((1, "mixed"), (63, "slow"), (64, "fast"), (65, "mixed"), (1000, "mixed"))],
    ("channel main", {"B": 2, "T": 130, "gates": "slow"}),
    ("channel packed", {"lengths": [0, 1, 40, 0, 89], "gates": "mixed"}),
    ("channel packed", {"lengths": [64, 1, 335, 0], "gates": "slow"}),
    ("channel odd", {"gates": "slow"}),
    ("channel odd", {"lengths": [65, 0, 130], "gates": "mixed"}),
    ("channel 256", {"T": 130, "gates": "mixed"}),
    ("channel wide", {"T": 130, "gates": "mixed"}),
    ("channel wide", {"B": 2, "T": 64, "gates": "slow"}),
    ("channel small", {"T": 130, "gates": "fast"}),
    ("channel and value", {"T": 130, "gates": "mixed"}),
    ("channel and value", {"lengths": [65, 0, 1, 70], "gates": "slow"}),
]  # fmt: skip
# The reference results of a case are made once, in one process of a parallel run.
FAMILY_INDICES = [
    pytest.param(i, marks=pytest.mark.xdist_group(f"family {i}")) for i in range(len(FAMILY_CASES))
]


def op(kind, inputs):
    """The public function of a path for the family of these inputs."""
    return getattr(flaop, f"{kind}_simple_gla" if "g_gamma" in inputs else f"{kind}_gla")


def options_of(case):
    """The options of a case of the covering set."""
    options = dict(case)
    H, HV = options.pop("heads")
    T = options["T"]
    if T == 1000:  # the token loop keeps a state for each token
        H, HV = 1, HV // H
    if options.pop("packed"):
        # empty sequences, one of one token, and two that share the rest
        options["lengths"] = [0, 1, 0, (T - 1) // 3, T - 1 - (T - 1) // 3]
    elif T < 1000:
        options["B"] = 2
    return options | {"H": H, "HV": HV}


@functools.cache
def covering_case(index, make):
    return DecayExpected(make(None, **options_of(CASES[index])))


@functools.cache
def family_case(index, make):
    family, changes = FAMILY_CASES[index]
    return DecayExpected(make(family, **changes))


def served(kind, inputs):
    if kind == "chunk" and inputs.get("gv") is not None:
        pytest.skip("a gate per value channel is served token by token only")
    return op(kind, inputs)


def id_of(index):
    return "-".join(str(x).replace(" ", "") for x in CASES[index].values())


# The covering set has options of its own in each case: on CUDA that takes long to compile.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(CASES)), ids=id_of)
@pytest.mark.parametrize(
    "where", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])]
)
def test_covering_set(where, index, kind, arguments):
    expected = covering_case(index, arguments)
    check_all(expected, served(kind, expected.inputs), where)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", FAMILY_INDICES)
def test_families(index, kind, arguments, compiled_families):
    expected = family_case(index, arguments)
    check_all(expected, served(kind, expected.inputs), "cuda")


@pytest.mark.parametrize("T", [20, 64, 65, 130])
@pytest.mark.parametrize("family", ["simple main", "channel main"])
def test_dispatcher(decay_device, family, T, arguments):
    """Both sides of the threshold."""
    expected = DecayExpected(arguments(family, T=T))
    check_all(expected, flaop.simple_gla if family == "simple main" else flaop.gla, decay_device)


@pytest.mark.parametrize("T", [20, 130])
def test_dispatcher_with_a_gate_per_value_channel(decay_device, T, arguments):
    check_all(DecayExpected(arguments("channel and value", T=T)), flaop.gla, decay_device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family",
    ["simple main", "simple packed", "simple without gate", "channel main", "channel and value"],
)
def test_each_gradient_asked_for_alone(decay_device, family, kind, arguments):
    expected = DecayExpected(arguments(family))
    check_alone(expected, served(kind, expected.inputs), decay_device)


@pytest.mark.parametrize("split_size", [64, 128])
@pytest.mark.parametrize(
    "family, changes",
    [
        ("simple main", {"T": 1000}),
        ("simple main", {"B": 2, "T": 300, "gates": "slow"}),
        ("simple packed", {"lengths": [300, 0, 1, 64, 129], "gates": "slow"}),
        ("channel main", {"T": 1000}),
        ("channel packed", {"lengths": [300, 0, 1, 64, 129], "gates": "slow"}),
    ],
)
def test_states_kept_at_the_boundaries_of_splits(
    decay_device, family, changes, split_size, arguments
):
    expected = DecayExpected(arguments(family, **changes))
    fn = functools.partial(op("chunk", expected.inputs), split_size=split_size)
    check_all(expected, fn, decay_device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["simple main", "channel main"])
def test_infinite_gates_empty_the_state(decay_device, kind, family, arguments):
    inputs = arguments(family, T=200, gates="slow")
    inputs["g"][:, 70] = -torch.inf
    inputs["g"][:, 100:, 1:] = -torch.inf
    inputs["g"][:, 130:, :1] = -1000
    expected = DecayExpected(inputs)
    check_all(expected, op(kind, inputs), decay_device)
