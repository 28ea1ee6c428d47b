"""``python -m flaop.aot``: compiles the kernels of common calls into the archive that is shipped.

Needs triton and a ptxas of 13.0 or newer, no GPU. What stands in the archive already, made from the
same sources by the same compilers, is kept.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from flaop.launch import archive
from flaop.validation import gated_delta_rule, kda, steps

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("kda", "gated_delta_rule", "step")
STEP_FAMILIES = ("kda", "gated_delta_rule", "simple_gla", "gla")
SIZES = (64, 128)  # K = V
# what is shipped: (architecture, dtype)
SHIPPED = tuple(itertools.product((80, 90, 100), DTYPES))


class Group(NamedTuple):
    """Calls whose launches are recorded together."""

    kind: str  # the chunk path of a family, or the step ops of all
    arch: int
    dtype: str
    size: int


def groups(targets=SHIPPED, sizes=SIZES) -> list[Group]:
    """All of the families, for (architecture, dtype) pairs and head sizes."""
    every = itertools.product(KINDS, targets, sizes)
    return [
        Group(kind, *target, size)
        for kind, target, size in every
        # few decode in fp16
        if target[1] == "bf16" or kind != "step"
    ]


def _makers(group: Group) -> tuple[Callable, Callable]:
    """Functions that make meta tensors of the group's dtype, or another, and in fp32."""

    def meta(*shape, dtype=DTYPES[group.dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    return meta, functools.partial(meta, dtype=torch.float32)


def _chunk_calls(group: Group) -> Iterator:
    """Checked calls on meta tensors: training batches without a state and packed sequences with
    one, by the gates that the layers of the field use."""
    B, T, H, N, size = 2, 130, 2, 2, group.size
    meta, wide = _makers(group)
    for packed in (False, True):
        batch = 1 if packed else B
        q, k, v, beta = *(meta(batch, T, H, size) for _ in range(3)), meta(batch, T, H)
        state = wide(N, H, size, size) if packed else None
        cu_seqlens = meta(N + 1, dtype=torch.int64) if packed else None
        shared = (None, state, True, cu_seqlens)
        if group.kind == "kda":
            g = meta(batch, T, H, size)
            # few train in fp16, and bounded gates are not factored there
            for bound in (None, -5.0) if group.dtype == "bf16" else (None,):
                yield kda.check(
                    *(q, k, v, g, beta, *shared, wide(H), wide(H, size)),
                    *(True, True, True, False, bound is not None, bound, False),
                )
        else:
            yield gated_delta_rule.check(
                *(q, k, v, meta(batch, T, H), beta, *shared, wide(H), wide(H)),
                *(True, True, True, False, False),
            )


def _launch_chunks(group: Group) -> None:
    """Forward without a gradient, forward and backward."""
    from flaop.launch.delta import chunk, gdn

    launcher = chunk if group.kind == "kda" else gdn
    residuals = 6 if group.kind == "kda" else 2
    for call in _chunk_calls(group):
        d_state = None
        if call.initial_state is not None:
            d_state = torch.empty(call.state_shape, dtype=torch.float32, device="meta")
        launcher.forward(call)
        A, A_qk = launcher.forward_residuals(call)[2:4]
        empty = [torch.empty(0, device="meta")] * residuals
        launcher.backward(call, call.v, d_state, (A, A_qk, *empty), (True,) * 8)


def _launch_steps(group: Group) -> None:
    """One token for each row of a pool in fp32 or bf16, both layouts."""
    from flaop.launch import decode

    N, H, size = 2, 2, group.size
    meta, wide = _makers(group)
    x, head = meta(N, 1, H, size), meta(N, 1, H)
    slots = meta(N, dtype=torch.int32)
    fused = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    inputs = {
        "kda": {"g": x, "beta": head, "A_log": wide(H), "dt_bias": wide(H, size), **fused},
        "gated_delta_rule": {"g": head, "beta": head, "A_log": wide(H), "dt_bias": wide(H)} | fused,
        "simple_gla": {"g": head},
        "gla": {"g": x},
    }
    options = itertools.product(STEP_FAMILIES, (torch.float32, torch.bfloat16), (False, True))
    for family, dtype, v_first in options:
        shared = {"q": x, "k": x, "v": x, "state_indices": slots, "state_v_first": v_first}
        state = meta(N, H, size, size, dtype=dtype)
        for bound in ({}, {"lower_bound": -5.0}) if family == "kda" else ({},):
            call = steps.check_step(family, **shared, state=state, **inputs[family], **bound)
            decode.step(call, remember=False)


@functools.cache
def records(group: Group) -> dict[archive.Variant, tuple]:
    """The launches of a group's calls."""
    from flaop.launch.kernel import recording

    with recording(group.arch) as launches:
        (_launch_steps if group.kind == "step" else _launch_chunks)(group)
    found = {}
    for function, args, constants, options in launches:
        module = function.fn.__module__.removeprefix("flaop.triton_kernels.")
        label = archive.label(args, constants, options)
        item = archive.Variant(module, function.fn.__name__, group.arch, label)
        found.setdefault(item, (function, args, constants, options))
    return found


@contextlib.contextmanager
def _compilers(jobs: int):
    """Processes of their own: fork would copy the threads of torch and LLVM."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield pool


def build(group: Group, item: archive.Variant) -> archive.Code:
    """Compiles one variant."""
    from flaop.launch.compile import code

    function, args, constants, options = records(group)[item]
    return code(function, args, constants, options, item.arch)


def scan(codes: dict[archive.Variant, archive.Code]) -> None:
    """Raises RuntimeError for code with the mark of a wrong one, which is one of Hopper's code."""
    from flaop.testing.aot import disassemble_all, unwritten_uniform_reads

    hopper = {item: code.image for item, code in codes.items() if item.arch == 90}
    for item, found in zip(hopper, disassemble_all(hopper.values(), 90), strict=True):
        if unwritten_uniform_reads(found):
            raise RuntimeError(f"{item.name} for sm_90 reads a register that nothing wrote")


def _compilers_used() -> str:
    """Versions that decide what machine code comes out; RuntimeError without a usable ptxas."""
    import triton

    from flaop.launch import ptxas

    ptxas.use()
    version = ptxas.version(triton.knobs.nvidia.ptxas.path)
    if version is None or version < ptxas.MINIMUM:
        raise RuntimeError(
            "shipped code is assembled by ptxas 13.0 or newer, and none was found: install CUDA 13 "
            "or the package nvidia-cuda-nvcc, or set TRITON_PTXAS_PATH"
        )
    return f"triton {triton.__version__}, ptxas {'.'.join(map(str, version))}"


def _fingerprint(record: tuple, compilers: str) -> str:
    """Of all that a variant is made from but its label: sources and compilers."""
    return hashlib.sha256(f"{record[0].cache_key} {compilers}".encode()).hexdigest()[:16]


def make(path: Path, wanted: list[Group], jobs: int) -> str:
    """Brings an archive up to date; returns a sentence on what was done."""
    start = time.monotonic()
    compilers = _compilers_used()
    origins, marks, arguments = {}, {}, {}
    for group in wanted:
        for item, record in records(group).items():
            origins.setdefault(item, group)
            marks[item] = _fingerprint(record, compilers)
            arguments[item[:2]] = record[0].arg_names
    try:
        old = archive.read(path)
    except (OSError, ValueError, KeyError):
        old = {}
    codes = {item: old[item, mark] for item, mark in marks.items() if (item, mark) in old}
    kept = set(codes)
    with _compilers(jobs) as pool:
        pending = {
            pool.submit(build, group, item): item
            for item, group in origins.items()
            if item not in codes
        }
        for done in concurrent.futures.as_completed(pending):
            codes[pending[done]] = done.result()
    scan({item: code for item, code in codes.items() if item not in kept})
    archive.write(path, codes, marks, arguments, compilers)
    size, seconds = path.stat().st_size / 2**20, time.monotonic() - start
    return (
        f"{path.name}: {len(codes)} kernels, {size:.1f} MiB, {compilers}; "
        f"{len(codes) - len(kept)} compiled in {seconds:.0f} s"
    )


def _target(text: str) -> tuple[int, str]:
    arch, _, dtype = text.partition(":")
    if not arch.isdigit() or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text}: such as 90:bf16, dtypes {', '.join(DTYPES)}")
    return int(arch), dtype


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flaop.aot", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--target",
        nargs="+",
        type=_target,
        default=SHIPPED,
        metavar="ARCH:DTYPE",
        help="such as 90:bf16; default: " + " ".join(f"{a}:{d}" for a, d in SHIPPED),
    )
    parser.add_argument("--size", type=int, nargs="+", default=SIZES, help="of heads: K = V")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers side by side")
    parser.add_argument("--output", type=Path, default=archive.PATH)
    args = parser.parse_args(argv)
    try:
        print(make(args.output, groups(args.target, args.size), args.jobs))
    except RuntimeError as error:
        print(f"flaop.aot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
