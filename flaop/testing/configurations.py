"""Configuration rows of the kernels, each met alone, whatever memory held before."""

import contextlib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from flaop.testing.cases import pairwise
from flaop.testing.comparison import LIMIT_FP32, Expected, on_device
from flaop.testing.launches import DTYPES
from flaop.testing.tolerances import assert_within_budget, relative_error, worst_error

# By the tile that fits them: head sizes that fill it, and such that are no powers of two.
K_SIZES = {256: (256, 200), 128: (128, 100), 64: (64, 60), 32: (32, 20), 16: (16, 12)}
V_SIZES = {64: (64, 72), 32: (32, 24), 16: (16, 8)}
# dtype, tile of K, tile of V
TILES = list(itertools.product(DTYPES, K_SIZES, V_SIZES))
# Arguments of the inputs functions that compile nothing: regimes, lengths, and groups of heads.
PACKED = (
    {"gates": "mixed", "lengths": [65, 0, 1, 130], "H": 1, "HV": 2},
    {"gates": "slow", "lengths": [0, 33, 64, 0, 70], "H": 1, "HV": 2},
    {"gates": "fast", "lengths": [129, 0, 2], "H": 1, "HV": 3},
)
BATCHED = (
    {"gates": "mixed", "B": 2, "T": 130, "H": 2, "HV": 2},
    {"gates": "slow", "B": 3, "T": 63, "H": 1, "HV": 1},
    {"gates": "fast", "T": 65, "H": 2, "HV": 2},
)

# Read as 16-bit numbers it is large, too.
HUGE = 1e30
_ROWS = ("o", "q", "k", "v")
_STATES = ("final_state", "initial_state")
# Of the worst slice, small ones measured against a tenth of their head's size: a row that nearly
# cancels has the rounding of larger ones.
_WORST = {torch.float32: 1e-3, torch.float16: 0.04, torch.bfloat16: 0.3}
_FLOOR = 0.1
# Gradients that sum one over tokens: a share of the sums of magnitudes.
_SUMS = {torch.float32: LIMIT_FP32, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def head_sizes(K_tile: int, V_tile: int, odd: bool = False) -> tuple[int, int]:
    """K and V that these tiles fit; several tiles of V where K is larger."""
    K, V = K_SIZES[K_tile][odd], V_SIZES[V_tile][odd]
    return K, max(K, V) if V_tile == max(V_SIZES) else V


def with_heads(variant: dict, K: int, V: int) -> dict:
    """More heads where they are small: of few numbers a few roundings decide the error."""
    times = min(max(2**15 // (K * V), 1), 8)
    return variant | {name: times * variant[name] for name in ("H", "HV")}


def rows(
    functions: Iterable[Callable[..., dict | None]], arch: int, dtype: str, K: int, V: int
) -> set[tuple]:
    """What configuration functions give for head sizes, as comparable rows."""
    found = set()
    for function in functions:
        config = function(arch, K, V, dtype)
        if config is not None:
            found.add((function.__module__, function.__name__, dtype, *sorted(config.items())))
    return found


def assert_rows_are_met(rows_of: Callable[..., set[tuple]], arch: int) -> None:
    """No head size up to 256 has a row that those of TILES lack."""
    known = set().union(*(rows_of(arch, x, *head_sizes(*tiles)) for x, *tiles in TILES))
    sizes = [size + more for size in (8, 16, 32, 64, 128, 255) for more in (0, 1)]
    for dtype, K, V in itertools.product(DTYPES, sizes, (*sizes, 1000)):
        assert rows_of(arch, dtype, K, V) <= known, (dtype, K, V)


def in_turn(
    options: Sequence[str], common: Container[tuple] = ()
) -> Iterator[tuple[tuple, str, bool]]:
    """All of TILES with all options; last, whether the pair is one for the fast run.

    That is so of all options with ``common`` tiles. The first two of them take turns with tiles of
    which any two values of dtype, tile of K and tile of V meet.
    """
    cases = pairwise(dtype=list(DTYPES), K=list(K_SIZES), V=list(V_SIZES))
    pairs = [tuple(case.values()) for case in cases]
    for tiles, (i, name) in itertools.product(TILES, enumerate(options)):
        turn = tiles in pairs and pairs.index(tiles) % min(2, len(options)) == i
        yield tiles, name, tiles in common or turn


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """Within, memory that nothing wrote reads as NaN, workspaces included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def leave_huge_numbers(device: str) -> None:
    """What is allocated next on a GPU finds them: small blocks, and large ones."""
    if torch.device(device).type != "cuda":
        return
    torch.cuda.empty_cache()
    sizes = [1 << 18] * 16 + [1 << 23] * 4
    blocks = [torch.full((size,), HUGE, dtype=torch.float32, device=device) for size in sizes]
    del blocks


def check_paths(
    expected: Expected, paths: dict[str, Callable[..., tuple[Tensor, Tensor]]], device: str
) -> None:
    """Outputs of each path without a gradient and with one, and every gradient through both.

    Whole tensors are held to their budget, slices of them to a limit. Once more, over huge numbers
    instead of NaN, they must be the same bit for bit.
    """
    names = ["o", "final_state", "o", "final_state", *expected.names]
    for path, fn in paths.items():
        with nan_memory():
            got = _results(expected, fn, device)
        leave_huge_numbers(device)
        again = _results(expected, fn, device)
        for name, x, y in zip(names, got, again, strict=True):
            _compare(expected, name, x, path)
            assert torch.equal(x, y), f"{path}, {name}: depends on memory that nothing wrote"


def _results(expected: Expected, fn: Callable, device: str) -> list[Tensor]:
    """o, final state, the same of a call with gradients, and these."""
    with torch.no_grad():
        outputs = fn(**on_device(expected.inputs, device))
    inputs = on_device(expected.inputs, device, expected.names)
    o, state = fn(**inputs)
    leaves = [inputs[name] for name in expected.names]
    d_outputs = (expected.d_o.to(device), expected.d_state.to(device))
    gradients = torch.autograd.grad((o, state), leaves, d_outputs)
    return [*outputs, o.detach(), state.detach(), *gradients]


def _compare(expected: Expected, name: str, got: Tensor, path: str) -> None:
    got, dtype, label = got.cpu(), expected.dtype, f"{path}, {name}"
    others = None
    if name in expected.names:
        kind = "gradient"
        oracle, budget = (expected.gradient(i, name, "both") for i in (0, 1))
        others = expected.others(name, "both")
        assert got.dtype == expected.inputs[name].dtype, label
    else:
        kind = "output"
        oracle, budget = (values[name] for values in expected.values)
    assert got.shape == oracle.shape and got.isfinite().all(), label
    terms = expected.terms(name, "both") if kind == "gradient" else None
    if terms is not None:
        size = terms.abs().sum((0, 1)).norm()
        assert (got - oracle).norm() <= _SUMS[dtype] * size, label
        return
    if dtype == torch.float32:
        assert relative_error(got, oracle) < LIMIT_FP32, label
    else:
        least = expected.least
        assert_within_budget(label, got, oracle, budget, dtype, kind, least=least, others=others)
    assert _worst(name, got, oracle) < _WORST[dtype], label


def _worst(name: str, got: Tensor, oracle: Tensor) -> float:
    """Of the rows of each head, of heads of states, of gates' and beta's heads (and channels)."""
    if name in _ROWS:
        heads = zip(got.unbind(2), oracle.unbind(2), strict=True)
        return max(worst_error(x, y, (0, 1), floor=_FLOOR) for x, y in heads)
    dims = (0, 1) if name in _STATES else tuple(range(2, got.ndim))
    return worst_error(got, oracle, dims, floor=_FLOOR)
