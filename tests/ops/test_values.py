"""KDA against the float64 token loop: outputs, states and each gradient, within budget."""

import functools
import itertools

import pytest

import flaop
from flaop.testing.comparison import check_all, check_alone
from flaop.testing.expected import DeltaExpected

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")

PATHS = {"chunk": flaop.chunk_kda, "fused_recurrent": flaop.fused_recurrent_kda}
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

FACTORS = {
    "T": (1, 63, 64, 65, 130, 1000),
    "K": (60, 64, 100, 128, 256),
    "V": (24, 128),
    "dtype": ("float32", "bfloat16", "float16"),
    "gates": ("fast", "slow", "mixed"),
    "gate_in_kernel": (None, "softplus", "bounded"),
    "heads": ((2, 2), (1, 2), (2, 4)),
    "packed": (False, True),
    "initial_state": (False, True),
    "state_v_first": (False, True),
    "l2norm": (False, True),
    "beta": ("plain", "sigmoid", "negative"),
}


def covering_set(factors):
    """Rows in which every value of every factor meets every value of every other one."""
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    order = [pair for a, b in itertools.combinations(names, 2)
             for pair in itertools.product(((a, x) for x in factors[a]),
                                           ((b, y) for y in factors[b]))]  # fmt: skip
    rows = []
    for seed in order:
        if seed not in missing:
            continue
        row = dict(seed)
        for name in names:
            if name not in row:
                row[name] = max(
                    factors[name], key=lambda x: len(_pairs(row | {name: x}, names) & missing)
                )
        missing -= _pairs(row, names)
        rows.append(tuple(row[name] for name in names))
    return rows


def _pairs(row, names):
    items = [(name, row[name]) for name in names if name in row]
    return set(itertools.combinations(items, 2))


def packed_lengths(T):
    """Empty sequences, one of one token, and two that share the rest."""
    lengths = [0, 1, 0, (T - 1) // 3, T - 1 - (T - 1) // 3]
    return lengths if T > 1 else [0, 1, 0]


def options_of(row):
    """The arguments of kda_inputs for a row of the covering set."""
    options = dict(zip(FACTORS, row, strict=True))
    H, HV = options.pop("heads")
    if options["T"] == 1000:  # the token loop keeps a state for each token
        H, HV = 1, HV // H
    beta = options.pop("beta")
    options |= {"H": H, "HV": HV, "beta_sigmoid": beta != "plain", "neg_eigval": beta == "negative"}
    if options.pop("packed"):
        options["lengths"] = packed_lengths(options["T"])
    elif options["T"] < 1000:
        options["B"] = 2
    return options


ROWS = covering_set(FACTORS)
# On CUDA: lengths and regimes within the options that are compiled together.
FAMILY_CASES = [
    *[("main", {"T": T, "gates": gates})
      for T, gates in ((1, "mixed"), (63, "slow"), (64, "fast"), (65, "mixed"), (1000, "mixed"))],
    ("main", {"B": 2, "T": 130, "gates": "slow"}),
    ("packed", {"lengths": [0, 1, 40, 0, 89], "gates": "mixed"}),
    ("packed", {"lengths": [64, 1, 935, 0], "gates": "slow"}),
    ("packed", {"lengths": [0, 1, 0], "gates": "fast"}),
    ("softplus", {"B": 2, "T": 130, "gates": "mixed"}),
    ("softplus", {"T": 1000, "gates": "fast"}),
    ("plain", {"gates": "mixed"}),
    ("plain", {"lengths": [300, 0, 1, 65], "gates": "slow"}),
    ("wide", {"T": 130, "gates": "mixed"}),
    ("wide", {"B": 2, "T": 64, "gates": "slow"}),
    ("odd", {"gates": "slow"}),
    ("odd", {"lengths": [65, 0, 130], "gates": "mixed"}),
]  # fmt: skip
# The reference results of a case are made once, in one process of a parallel run.
FAMILY_INDICES = [
    pytest.param(i, marks=pytest.mark.xdist_group(f"family {i}")) for i in range(len(FAMILY_CASES))
]


def test_the_covering_set_is_one():
    names = list(FACTORS)
    for (i, a), (j, b) in itertools.combinations(enumerate(names), 2):
        met = {(row[i], row[j]) for row in ROWS}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b]))
    assert len(ROWS) < 50


@functools.cache
def covering_case(row, make):
    return DeltaExpected(make(None, **options_of(row)))


@functools.cache
def family_case(index, make):
    family, changes = FAMILY_CASES[index]
    return DeltaExpected(make(family, **changes))


# The covering set has options of its own in each row: on CUDA that takes long to compile.
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)).replace(" ", ""))
@pytest.mark.parametrize(
    "where", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])]
)
def test_covering_set(where, row, path, arguments):
    check_all(covering_case(row, arguments), PATHS[path], where)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("index", FAMILY_INDICES)
def test_families(index, path, arguments, compiled_families):
    check_all(family_case(index, arguments), PATHS[path], "cuda")


@pytest.mark.parametrize("T", [20, 64, 65, 130])
def test_dispatcher(device, T, arguments):
    """Both sides of the threshold."""
    expected = DeltaExpected(arguments("main", T=T))
    check_all(expected, flaop.kda, device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["main", "packed"])
def test_each_gradient_asked_for_alone(device, family, path, arguments):
    check_alone(DeltaExpected(arguments(family)), PATHS[path], device)
