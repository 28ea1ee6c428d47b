"""What the chunk, recurrent and decode ops launch on an architecture: recorded on meta tensors,
compiled elsewhere.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# constants that tell apart launches of one kernel
_VARIANTS = (
    "BOUNDED", "PAIRS", "OUTPUT", "STORE_A", "STORE_H", "STORE_U", "DECAYED", "CUMULATIVE",
    "VERIFY",
)  # fmt: skip


class Case(NamedTuple):
    """One set of configuration rows."""

    arch: int
    dtype: str
    size: int  # K = V
    # of KDA "softplus" or "bounded", of the decay families "scalar" or "channel", of the gated
    # delta rule "head"
    gate: str


def launches(case: Case) -> dict[str, tuple]:
    """Each launch of a family's paths, forward and backward, packed, every option on, by label."""
    from flaop.testing.decay_launches import decay_records
    from flaop.testing.gdn_launches import gdn_records
    from flaop.testing.step_launches import step_records

    steps = _labelled(step_records(case))
    if case.gate in ("softplus", "bounded"):
        return kda_launches(case) | steps
    if case.gate == "head":
        return _labelled(gdn_records(case)) | steps
    return _labelled(decay_records(case)) | steps


def _labelled(records: list[tuple]) -> dict[str, tuple]:
    distinct = {}
    for function, args, constants, options in records:
        types = [x.dtype if isinstance(x, torch.Tensor) else type(x) for x in args]
        key = function.fn.__name__, str(types), str(constants), str(options)
        distinct.setdefault(key, (function, args, constants, options))
    labelled = {}
    for record in distinct.values():
        flags = ",".join(name for name in _VARIANTS if record[2].get(name))
        label = record[0].fn.__name__ + (f"[{flags}]" if flags else "")
        while label in labelled:  # another dtype of an argument
            label += "'"
        labelled[label] = record
    return labelled


def kda_launches(case: Case) -> dict[str, tuple]:
    """The same of KDA."""
    from flaop.launch.delta import chunk, recurrent
    from flaop.launch.kernel import recording
    from flaop.validation.kda import check

    T, H, HV, N, size = 130, 1, 2, 2, case.size

    def meta(*shape, dtype=DTYPES[case.dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    def wide(*shape):
        return meta(*shape, dtype=torch.float32)

    bounded = case.gate == "bounded"
    call = check(
        *(meta(1, T, H, size), meta(1, T, H, size), meta(1, T, HV, size), meta(1, T, HV, size)),
        *(meta(1, T, HV), None, wide(N, HV, size, size), True),
        *(meta(N + 1, dtype=torch.int64), wide(HV), wide(HV, size)),
        *(True, True, True, True, bounded, -5.0 if bounded else None, True),
    )
    d_o, d_final_state, mask = meta(*call.v.shape), wide(*call.state_shape), (True,) * 8
    with recording(case.arch) as records:
        chunk.forward(call)
        kept = chunk.forward_residuals(call._replace(disable_recompute=True))
        chunk.backward(call, d_o, d_final_state, (*kept[2:4], *[meta(0)] * 6), mask)
        chunk.summary(call)
        chunk.summary_forward(call)
        chunk.summary_backward(call, *kept[2:4])
        recurrent.forward(call)
        u = recurrent.forward_residuals(call)[2]
        recurrent.backward(call, d_o, d_final_state, u, mask)
    return _labelled(records)


def build_launch(case: Case, label: str):
    """The Build of one launch without its machine code, or the compiler's error: for a worker."""
    from flaop.testing.aot import build

    try:
        return build(launches(case)[label], case.arch)._replace(cubin=b"")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def compilers(cache: str, workers: int = 2) -> Iterator[concurrent.futures.Executor]:
    """Processes that compile into a cache folder of their own: a crash is not the caller's."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = cache
    # fork would copy the threads of torch and LLVM
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            yield pool
    finally:
        del os.environ["TRITON_CACHE_DIR"]
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
