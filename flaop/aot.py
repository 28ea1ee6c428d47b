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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from flaop.launch import archive
from flaop.validation import gated_delta_rule, kda

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FAMILIES = ("kda", "gated_delta_rule")
SIZES = (64, 128)  # K = V
# what is shipped: (architecture, dtype)
SHIPPED = ((80, "bf16"), (90, "bf16"), (90, "fp16"), (100, "bf16"))


class Group(NamedTuple):
    """Calls whose launches are recorded together."""

    family: str
    arch: int
    dtype: str
    size: int


def groups(targets=SHIPPED, sizes=SIZES) -> list[Group]:
    """All of the families, for (architecture, dtype) pairs and head sizes."""
    return [Group(f, *t, size) for f, t, size in itertools.product(FAMILIES, targets, sizes)]


def _calls(group: Group) -> Iterator:
    """Checked calls on meta tensors: training batches without a state and packed sequences with
    one, by the gates that the layers of the field use."""
    B, T, H, N, size = 2, 130, 2, 2, group.size

    def meta(*shape, dtype=DTYPES[group.dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    def wide(*shape):
        return meta(*shape, dtype=torch.float32)

    for packed in (False, True):
        batch = 1 if packed else B
        q, k, v, beta = *(meta(batch, T, H, size) for _ in range(3)), meta(batch, T, H)
        state = wide(N, H, size, size) if packed else None
        cu_seqlens = meta(N + 1, dtype=torch.int64) if packed else None
        shared = (None, state, True, cu_seqlens)
        if group.family == "kda":
            g = meta(batch, T, H, size)
            for bound in (None, -5.0):
                yield kda.check(
                    *(q, k, v, g, beta, *shared, wide(H), wide(H, size)),
                    *(True, True, True, False, bound is not None, bound, False),
                )
        else:
            yield gated_delta_rule.check(
                *(q, k, v, meta(batch, T, H), beta, *shared, wide(H), wide(H)),
                *(True, True, True, False, False),
            )


@functools.cache
def records(group: Group) -> dict[archive.Variant, tuple]:
    """The launches of a group's calls: forward without a gradient, forward and backward."""
    from flaop.launch.delta import chunk, gdn
    from flaop.launch.kernel import recording

    launcher = chunk if group.family == "kda" else gdn
    residuals = 6 if group.family == "kda" else 2
    with recording(group.arch) as launches:
        for call in _calls(group):
            d_state = None
            if call.initial_state is not None:
                d_state = torch.empty(call.state_shape, dtype=torch.float32, device="meta")
            launcher.forward(call)
            kept = launcher.forward_residuals(call)
            A, A_qk = kept[2:4]
            empty = [torch.empty(0, device="meta")] * residuals
            launcher.backward(call, call.v, d_state, (A, A_qk, *empty), (True,) * 8)
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
    """Compiles one variant, and refuses code with the marks of a wrong one."""
    from flaop.launch.compile import code
    from flaop.testing.aot import disassemble, unwritten_uniform_reads

    function, args, constants, options = records(group)[item]
    made = code(function, args, constants, options, item.arch)
    instructions, _ = disassemble(made.image)
    if unwritten_uniform_reads(instructions):
        raise RuntimeError(f"{item.name} for sm_{item.arch} reads a register that nothing wrote")
    return made


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
    kept = len(codes)
    with _compilers(jobs) as pool:
        pending = {
            pool.submit(build, group, item): item
            for item, group in origins.items()
            if item not in codes
        }
        for done in concurrent.futures.as_completed(pending):
            codes[pending[done]] = done.result()
    archive.write(path, codes, marks, arguments, compilers)
    size, seconds = path.stat().st_size / 2**20, time.monotonic() - start
    return (
        f"{path.name}: {len(codes)} kernels, {size:.1f} MiB, {compilers}; "
        f"{len(codes) - kept} compiled in {seconds:.0f} s"
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
