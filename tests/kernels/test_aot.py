"""Every kernel compiled ahead of time for sm_80, sm_90 and sm_100, and what came out of it.

Needs the compiler, so not the process of the interpreter tests. The default run covers every
kernel on sm_90 and every family on one other architecture, and every dtype; the full product is
slow. docs/spills.md lists what spills, and `python tests/kernels/test_aot.py >docs/spills.md` makes
it anew (names of cases limit it).
"""

import itertools
import os
import pathlib
import re
import sys
import tempfile

import pytest

from flaop.testing.launches import Case, build_launch, compilers, launches

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles: not in the interpreter's process", allow_module_level=True)

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "spills.md"
PRODUCT = [
    Case(*case)
    for case in itertools.product(
        (80, 90, 100),
        ("bf16", "fp16", "fp32"),
        (64, 128, 256),
        ("softplus", "bounded", "scalar", "channel", "head"),
    )
]
DEFAULT = [
    Case(80, "bf16", 128, "bounded"),
    Case(90, "bf16", 128, "bounded"),
    Case(90, "fp32", 64, "bounded"),
    Case(90, "fp16", 128, "softplus"),
    Case(100, "bf16", 128, "softplus"),
    *(Case(90, "bf16", 128, gate) for gate in ("scalar", "channel", "head")),
    Case(80, "bf16", 128, "scalar"),
    Case(100, "bf16", 128, "channel"),
    Case(80, "bf16", 128, "head"),
    # more channels than the fused scan holds
    Case(90, "bf16", 256, "scalar"),
    Case(90, "bf16", 256, "channel"),
]
# these multiply matrices; the others sum, scan and copy
PRODUCTS = re.compile(
    r"chunk_((kda|delta)_)?(fwd|bwd)_kernel_|recompute_w_u|solve_tril_bwd"
    r"|chunk_gla_(bwd_kernel_|fwd_kernel_intra\[STORE_A)"
    r"|chunk_gdn_(fwd|bwd)_kernel_(scan|summary|values|intra|pairs\[PAIRS\])"
)
FEW = 8  # local-memory instructions that are no spill worth a row
GROWTH = 1.25  # of the spills on record that fails


def toolchain():
    """triton and ptxas: other versions spill differently."""
    import triton

    from flaop.launch import ptxas

    found = ptxas.find()
    return triton.__version__, ".".join(map(str, found[1])) if found else "12.8"


def recorded():
    """{(case, label): instructions} of the document, its cases, and the toolchain of its making."""
    text = DOCUMENT.read_text()
    rows = re.findall(
        r"^\| sm_(\d+) \| (\w+) \| (\d+) \| (\w+) \| `(\S+)` \| (\d+) \|", text, re.MULTILINE
    )
    spills = {
        (Case(int(arch), dtype, int(size), gate), label): int(count)
        for arch, dtype, size, gate, label, count in rows
    }
    listed = re.search(r"^Compiled: (.*)\.$", text, re.MULTILINE)[1]
    cases = [case for case in PRODUCT if identity(case) in listed.split(", ")]
    return spills, cases, re.search(r"triton (\S+) and ptxas ([\d.]+),", text).groups()


def identity(case):
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with compilers(str(tmp_path_factory.mktemp("triton"))) as workers:
        yield workers


def marks(case):
    return () if case in DEFAULT else pytest.mark.slow


# What triton makes of a loop that sums up a load and multiplies it.
SUMMED_AND_MULTIPLIED = """
    %one = ttg.local_alloc : () -> !ttg.memdesc<1x64x64xbf16, #shared, #smem, mutable>
    %two = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
    %place = ttg.memdesc_index %one[%c0] : !ttg.memdesc<1x64x64xbf16, #shared, #smem, mutable>
    %r:2 = scf.for %i = %c0 to %c2 step %c1 iter_args(%acc = %zero, %t = %token) -> (tensor) {
      %x = ttg.memdesc_index %one[%i] : !ttg.memdesc<1x64x64xbf16, #shared, #smem, mutable>
      %y = ttg.memdesc_trans %x {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>
      %z = ttg.memdesc_index %two[%i] : !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
      %p = ttng.warp_group_dot %z, %y, %acc {inputPrecision = 0 : i32, isAsync = true}
      %w:3 = ttng.warp_group_dot_wait %p, %z, %y {pendings = 1 : i32}
      %n = ttg.memdesc_index %two[%j] : !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
      %f = ttg.async_copy_global_to_local %pointers, %n mask %m : tensor<64x64x!tt.ptr<bf16>>
      %g = ttg.async_copy_global_to_local %others, %place mask %m : tensor<64x64x!tt.ptr<bf16>>
      scf.yield %w#0, %g : tensor, !ttg.async.token
"""


def test_buffers_filled_under_a_product_are_seen():
    from flaop.testing.aot import overwritten_operands

    assert overwritten_operands(SUMMED_AND_MULTIPLIED) == ["%one"]
    assert not overwritten_operands(SUMMED_AND_MULTIPLIED.replace("pendings = 1", "pendings = 0"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [pytest.param(c, id=identity(c), marks=marks(c)) for c in PRODUCT])
def test_every_launch(case, pool):
    from flaop.testing.aot import SHARED_LIMIT, TENSOR_MEMORY_LIMIT

    found = {label: pool.submit(build_launch, case, label) for label in launches(case)}
    spills, cases, made_with = recorded()
    comparable = case in cases and made_with == toolchain()
    wrong = []
    for label, future in found.items():
        build = future.result()
        if isinstance(build, str):
            wrong.append(f"{label}: {build}")
            continue
        if build.shared > SHARED_LIMIT[case.arch]:
            wrong.append(f"{label}: {build.shared} bytes of shared memory")
        if build.tensor_memory > TENSOR_MEMORY_LIMIT:
            wrong.append(f"{label}: {build.tensor_memory} columns of tensor memory")
        if PRODUCTS.match(label) and not build.tensor_core:
            wrong.append(f"{label}: no tensor-core instruction")
        if case.arch == 90 and build.unwritten:
            wrong.append(f"{label}: reads registers that nothing wrote: {build.unwritten}")
        if build.overwritten:
            wrong.append(f"{label}: fills buffers under a product: {build.overwritten}")
        allowed = max(FEW, GROWTH * spills.get((case, label), 0))
        if comparable and build.spills > allowed:
            wrong.append(f"{label}: {build.spills} spills, {allowed:.0f} allowed")
    assert not wrong, "\n".join(wrong)


def test_the_default_covers_what_it_should():
    """Every architecture, dtype and head size, and every launch of the product by its label."""
    for field in ("arch", "dtype", "size", "gate"):
        assert {getattr(c, field) for c in DEFAULT} == {getattr(c, field) for c in PRODUCT}
    labels = [
        {label for case in cases for label in launches(case)} for cases in (DEFAULT, PRODUCT)
    ]
    assert labels[0] == labels[1]


def test_spills_are_on_record_for_rows_that_exist():
    spills, cases, _ = recorded()
    assert set(DEFAULT) <= set(cases)
    for case, label in spills:
        assert case in cases and label in launches(case), (case, label)


HEADER = """# Kernels that spill registers

Local-memory instructions in the machine code of each launch (K = V, every option on, packed), where
there are more than {few}. Made with triton {triton} and ptxas {ptxas}, by
`python tests/kernels/test_aot.py`. Loads and stores of spilled registers mostly hit the L1 cache.
What they cost is not measured. float32 products are three TF32 products of operands split in
registers: most rows are theirs. A build that spills {growth:.0%} more than its row says fails the
ahead-of-time tests.

Compiled: {cases}.

| arch | dtype | K = V | gate | launch | instructions |
|---|---|---|---|---|---|"""


def main(names):
    """Prints the document for the named cases; what could not be built goes to the error stream."""
    cases = [case for case in PRODUCT if not names or identity(case) in names]
    triton, ptxas = toolchain()
    listed = ", ".join(map(identity, cases))
    print(HEADER.format(few=FEW, triton=triton, ptxas=ptxas, growth=GROWTH - 1, cases=listed))
    with tempfile.TemporaryDirectory() as cache, compilers(cache) as pool:
        work = [(case, label) for case in cases for label in launches(case)]
        futures = [pool.submit(build_launch, case, label) for case, label in work]
        for (case, label), future in zip(work, futures):
            build = future.result()
            if isinstance(build, str):
                print(*case, label, build, file=sys.stderr)
            elif build.spills > FEW:
                arch, dtype, size, gate = case
                row = f"| sm_{arch} | {dtype} | {size} | {gate} | `{label}` | {build.spills} |"
                print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
