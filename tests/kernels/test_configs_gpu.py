"""Every shipped configuration row of the running architecture, alone: nothing is tuned at run time.

One test per (dtype, head size, gate) runs both paths forward and backward with every option on, in
memory that reads as NaN where no kernel wrote, and compares each result with the token loop.
"""

import functools

import pytest

import flaop
from flaop.testing import kda_inputs
from flaop.testing.configurations import check_paths
from flaop.testing.expected import DeltaExpected
from flaop.testing.launches import DTYPES

PATHS = {
    "chunk": flaop.chunk_kda,
    "chunk, kept": functools.partial(flaop.chunk_kda, disable_recompute=True),
    "recurrent": flaop.fused_recurrent_kda,
}
# float32 pair kernels take long to compile: one head size in the fast run
CASES = [
    pytest.param(
        dtype, size, gate, id=f"{dtype}-{size}-{gate}",
        marks=[pytest.mark.slow] if dtype == "fp32" and size > 64 else [],
    )
    for dtype in DTYPES for size in (64, 128, 256)
    for gate in (("softplus", "bounded") if dtype == "bf16" else ("softplus",))
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_triton_where_cuda_kernels_serve(gate, monkeypatch, fresh_launches):
    """The Triton rows that the CUDA C++ kernels stand in for where they were built."""
    from flaop.launch import cuda

    monkeypatch.setattr(cuda, "enabled", False)
    test_configuration("bf16", 128, gate)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, size, gate", CASES)
def test_configuration(dtype, size, gate):
    inputs = kda_inputs(
        H=1, HV=2, K=size, V=size, lengths=[65, 0, 1, 130], dtype=DTYPES[dtype],
        gate_in_kernel=gate, l2norm=True, neg_eigval=True, initial_state=True,
        state_v_first=True,
    )  # fmt: skip
    check_paths(DeltaExpected(inputs), PATHS, "cuda")
