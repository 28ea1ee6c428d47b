"""The clocks on a GPU: small shapes, all columns taken."""

import pytest
import torch

from flaop.bench.case import Case, parse_shape
from flaop.bench.families import POOL_OPS, family_name
from flaop.bench.runner import Settings, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("op", "mode", "shape"),
    [
        ("chunk_kda", "fwd", "B1T256H4D128"),
        ("chunk_kda", "fwdbwd", "B1T256H4D128"),
        ("fused_recurrent_kda", "step", "B2T1H4D128"),
        ("chunk_simple_gla", "fwdbwd", "B1T256H4D128"),
        ("chunk_gla", "fwdbwd", "B1T256H4D128"),
        ("chunk_retention", "fwd", "B1T256H4D256"),
        ("fused_recurrent_gla", "step", "B2T1H4D128"),
        ("chunk_gated_delta_rule", "fwdbwd", "B1T256H2HV4D128"),
        ("chunk_delta_rule", "fwdbwd", "B1T256H4D128"),
        ("fused_recurrent_gated_delta_rule", "step", "B2T1H2HV4D128"),
        ("kda_step_", "step", "B2T1H4D128"),
        ("gla_step_", "step", "B2T1H4D128"),
    ],
)
def test_every_column(op, mode, shape):
    kind = "bounded" if family_name(op) == "kda" else "precomputed"
    pool = "fp32" if op in POOL_OPS else None
    case = Case(op, mode, parse_shape(shape), "bf16", "mixed", kind, "cuda", pool=pool)
    record = run_case(case, "flaop", Settings(quick=True))
    assert record["status"] == "ok", record["note"]
    for name in ("eager_ms", "graph_ms", "graph_warm_ms", "host_us", "peak_mib", "rel_err"):
        assert record[name] > 0, name
    assert "input sets rotated" in record["note"]
    # Outputs count as extra memory; the inputs do not.
    s = case.shape
    assert record["peak_mib"] * 2**20 >= 2 * s.B * s.T * s.HV * s.V
    # Nothing is faster than its floor.
    assert record["graph_ms"] > record["floor_ms"]
