"""The chunk table of packed sequences against a plain Python model, malformed ones included."""

import pytest
import torch

from flaop.launch.table import chunk_table, zero_outside

SHORT = [0]
for n in range(257):
    SHORT.append(SHORT[-1] + 1 + n % 3)

# name: cu_seqlens, T
BOUNDARIES = {
    "one": ([0, 256], 256),
    "one token": ([0, 1], 1),
    "edges": ([0, 63, 127, 192, 257], 257),
    "empty between": ([0, 0, 70, 70, 200, 200], 200),
    "all empty": ([0, 0, 0, 0], 200),
    "no sequence": ([0], 256),
    "ends early": ([0, 255], 256),
    "starts late": ([1, 256], 256),
    "decreasing": ([0, 100, 50, 256], 256),
    "past the end": ([0, 256, 512, 768], 256),
    "negative": ([-70, -3, 65, 256], 256),
    "all past the end": ([300, 400], 256),
    "falls to zero": ([200, 0, 0, 256], 256),
    "257 short": (SHORT, SHORT[-1]),
    "1030 short": ([min(n, 700) for n in range(1031)], 700),
    "long": ([0, 781, 2048], 2048),
}


def model(boundaries, T, chunk):
    """Bounds, chunks before each sequence, and (sequence, chunk) of each row."""
    bounds, last = [], 0
    for x in boundaries:
        last = max(last, min(max(x, 0), T))
        bounds.append(last)
    offsets, rows = [0], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        count = -(-(end - start) // chunk)
        rows += [[n, c] for c in range(count)]
        offsets.append(offsets[-1] + count)
    return bounds, offsets, rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("case", BOUNDARIES)
def test_table(case, dtype):
    boundaries, T = BOUNDARIES[case]
    N = len(boundaries) - 1
    for chunk in (64, 16):
        rows = max(-(-T // chunk) + N - 1, 0)
        table = chunk_table(torch.tensor(boundaries, dtype=dtype), T, rows, chunk)
        bounds, offsets, used = model(boundaries, T, chunk)
        assert table.bounds.dtype is torch.int64 and table.bounds.tolist() == bounds
        assert table.offsets.dtype is torch.int32 and table.offsets.tolist() == offsets
        # the bound from shapes holds whatever the boundaries are
        assert len(used) <= rows and table.rows.shape == (rows, 2)
        assert table.rows[: len(used)].tolist() == used
        assert (table.rows[len(used) :, 0] == -1).all()


def test_boundaries_may_be_a_view():
    boundaries = torch.tensor([0, -1, 70, -1, 200, -1])[::2]
    table = chunk_table(boundaries, 200, 5, 64)
    assert table.bounds.tolist() == [0, 70, 200]


def test_batched_calls_have_no_table():
    assert chunk_table(None, 100, 2, 64) is None


@pytest.mark.parametrize("case", ["one", "ends early", "starts late", "all empty", "257 short"])
@pytest.mark.parametrize("shape", [(), (2, 3), (65,)])
def test_zeros_outside_the_sequences_only(case, shape):
    boundaries, T = BOUNDARIES[case]
    table = chunk_table(torch.tensor(boundaries), T, 0, 64)
    x = torch.ones(1, T, *shape)
    zero_outside(x, table)
    expected = torch.zeros(T)
    expected[table.bounds[0] : table.bounds[-1]] = 1
    assert torch.equal(x, expected.view(1, T, *[1] * len(shape)).expand_as(x))
