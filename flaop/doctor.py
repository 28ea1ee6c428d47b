"""``python -m flaop doctor``: what is installed and built, which path typical calls take, a test.

Every section is taken by itself: one that fails is reported in a sentence and the others still run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator

KEYS = ("CPU", "CUDA", "Autograd")
# An fp32 kernel of the self-test may be this far from the float64 token loop.
SELF_TEST_LIMIT = 1e-4
# ptxas before 13.0 miscompiles some Hopper kernels silently.
PTXAS_MINIMUM = (13, 0)


class Broken(Exception):
    """Something that should work does not; the message is the sentence to print."""


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> Iterator[str]:
    import torch

    import flaop
    from flaop._extension import BUILD

    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield f"triton {version_of('triton')}"
    yield f"flaop {flaop.__version__}, built for torch {BUILD['torch']}"


def devices() -> Iterator[str]:
    import torch

    yield f"CPU, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "no GPU that this torch can use: the ops run their CPU kernels"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / 2**30
        yield f"cuda:{index} {properties.name}, capability {capability}, {memory:.0f} GiB"
        if properties.major < 8:
            raise Broken(f"cuda:{index} has capability {capability}; the kernels need 8.0 or newer")


def built() -> Iterator[str]:
    from flaop._extension import BUILD, bindings

    yield f"ops (_C): loaded, compiler {BUILD.get('compiler', 'unknown')}"
    yield "dispatcher tables (_bindings): loaded"
    if BUILD.get("cuda_library"):
        yield f"CUDA library: built, {BUILD['cuda_library']}"
    else:
        yield f"CUDA library: not built ({BUILD.get('cuda_note') or 'no reason recorded'})"
    state = "built" if bindings.FLASH_KDA_BUILT else "not built"
    yield f"fused inference kernel (flash_kda): {state}"


def toolchain() -> Iterator[str]:
    import torch

    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    yield f"C++ compiler for torch.compile: {compiler or 'none found, torch.compile needs one'}"
    if importlib.util.find_spec("triton") is None:
        if torch.cuda.is_available():
            raise Broken("triton is not installed: CUDA ops cannot run, pip install triton")
        yield "ptxas: not needed without triton"
        return
    from flaop.launch import ptxas

    found = ptxas.find()
    if found is not None:
        path, version = found
        yield f"ptxas: {path}, version {'.'.join(map(str, version))}"
        return
    path, version = bundled_ptxas(ptxas.version)
    yield f"ptxas: Triton's own, {path}, version {'.'.join(map(str, version or ('unknown',)))}"
    if version is not None and version < PTXAS_MINIMUM:
        yield "  it miscompiles some kernels for compute capability 9.0: install CUDA 13 or"
        yield "  the package nvidia-cuda-nvcc, or set TRITON_PTXAS_PATH"


def bundled_ptxas(version: Callable) -> tuple[str, tuple | None]:
    spec = importlib.util.find_spec("triton")
    path = os.path.join(os.path.dirname(spec.origin), "backends", "nvidia", "bin", "ptxas")
    return path, version(path)


def kernels() -> Iterator[str]:
    """Which kernels were shipped as machine code, and which would be compiled at first use."""
    import torch

    from flaop._extension import bindings
    from flaop.launch import archive

    if os.environ.get("FLAOP_AOT", "1") == "0":
        yield "archive: not used, FLAOP_AOT=0; every kernel is compiled at first use"
        return
    if not archive.PATH.is_file():
        yield "archive: none, every kernel is compiled at first use; python -m flaop.aot makes one"
        return
    try:
        index, _ = archive.read_index(archive.PATH)
    except (OSError, ValueError, KeyError) as error:
        raise Broken(f"the archive {archive.PATH.name} {error}") from None
    shipped = {}
    for place, kernel in index["kernels"].items():
        for text in kernel["codes"]:
            arch = int(text.split(" ", 1)[0])
            shipped.setdefault(arch, {}).setdefault(place.split(" ")[1], []).append(text)
    size = archive.PATH.stat().st_size / 2**20
    yield f"archive: {size:.1f} MiB, made with {index['made_with']}"
    for arch, names in sorted(shipped.items()):
        yield f"sm_{arch}: {sum(map(len, names.values()))} variants of {len(names)} kernels"
    if torch.cuda.is_available():
        arch = bindings.compute_capability(torch.cuda.current_device())
        for name, codes in sorted(shipped.get(arch, {}).items()):
            yield f"  {name}: {len(codes)}"
        if arch not in shipped:
            yield f"  none for this GPU (sm_{arch}): its kernels are compiled at first use"
    yield "every other kernel, dtype, head size and set of options is compiled at first use"


def has_fake(name: str) -> bool:
    from torch._library import simple_registry

    return simple_registry.singleton.find(name).fake_impl.kernel is not None


def registered() -> dict[str, dict[str, bool]]:
    """For every op of the namespace: is it a composite, and which kernels it has."""
    import torch

    import flaop  # noqa: F401

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("flaop::"))
    return {
        name: {
            "composite": has(name, "CompositeImplicitAutograd"),
            "fake": has_fake(name),
            **{key: has(name, key) for key in KEYS},
        }
        for name in sorted(names)
    }


def ops() -> Iterator[str]:
    table = registered()
    width = max(map(len, table))
    missing = []
    for name, has in table.items():
        if has["composite"]:
            yield f"{name:{width}}  composite"
            continue
        kernels = {kind: has[kind] for kind in ("fake", *KEYS)}
        yield f"{name:{width}}  " + ", ".join(k for k, there in kernels.items() if there)
        missing += [f"{name} has no {kind} kernel" for kind, there in kernels.items() if not there]
    if missing:
        raise Broken("; ".join(missing))


def typical_calls(device: str) -> Iterator[tuple[str, dict]]:
    """Calls that differ in what decides the path, in the dtype of the device."""
    import torch

    from flaop.testing import kda_inputs

    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def inputs(T, **options):
        fused = {"gate_in_kernel": "softplus", "l2norm": True, "beta_sigmoid": True}
        sizes = {"B": 1, "T": T, "H": 1, "K": 128, "V": 128}
        return kda_inputs(**sizes, dtype=dtype, device=device, **{**fused, **options})

    bounded = {"gate_in_kernel": "bounded", "state_v_first": True}
    yield "decode, one token with a state", inputs(1, initial_state=True)
    yield "prefill of 2048 tokens, softplus gate", inputs(2048)
    yield "prefill of 2048 tokens, bounded gate, state [V, K]", inputs(2048, **bounded)
    yield "32 packed sequences of 16 tokens", inputs(0, lengths=[16] * 32)
    yield "training, 32 tokens", inputs(32, requires_grad=True)
    yield "training, 2048 tokens", inputs(2048, requires_grad=True)


def paths() -> Iterator[str]:
    import torch

    import flaop

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for title, inputs in typical_calls(device):
            path, reasons = flaop.explain(flaop.kda, **inputs)
            yield f"{device}: {title}: {path}"
            for reason in reasons:
                yield f"    {reason}"


def self_test() -> Iterator[str]:
    """Forward and gradients of both paths on small inputs against the float64 token loop."""
    import torch

    import flaop
    from flaop.testing import kda_inputs, kda_oracle

    options = {"gate_in_kernel": "softplus", "l2norm": True, "beta_sigmoid": True}
    options |= {"initial_state": True, "requires_grad": True}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        if device == "cuda":
            yield "cuda: kernels are compiled at first use, this takes a while"
        for function in (flaop.chunk_kda, flaop.fused_recurrent_kda):
            inputs = kda_inputs(1, 70, 1, 2, 32, 16, **options)
            moved = {
                name: value.detach().to(device).requires_grad_()
                if isinstance(value, torch.Tensor)
                else value
                for name, value in inputs.items()
            }
            name, error = worst_error(function(**moved), moved, kda_oracle(**inputs), inputs)
            line = f"{device}: {function.__name__}: largest relative error {error:.1e} ({name})"
            if not error < SELF_TEST_LIMIT:
                raise Broken(f"{line}, allowed {SELF_TEST_LIMIT:g}")
            yield line


def worst_error(got, inputs: dict, expected, reference_inputs: dict) -> tuple[str, float]:
    """The output or gradient that is furthest off, and its relative error."""
    import torch

    from flaop.testing import relative_error

    names = [n for n, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad]

    def everything(outputs, leaves):
        weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
        loss = sum((x * w.to(x)).sum() for x, w in zip(outputs, weights, strict=True))
        gradients = torch.autograd.grad(loss, [leaves[n] for n in names])
        labels = ["o", "final_state", *(f"gradient of {n}" for n in names)]
        return dict(zip(labels, (*outputs, *gradients), strict=True))

    a, b = everything(got, inputs), everything(expected, reference_inputs)
    errors = {name: relative_error(a[name], b[name]) for name in a}
    name = max(errors, key=errors.get)
    return name, errors[name]


SECTIONS = {
    "versions": versions,
    "devices": devices,
    "built": built,
    "toolchain": toolchain,
    "kernels": kernels,
    "ops": ops,
    "paths": paths,
    "self-test": self_test,
}


def report(title: str, section: Callable[[], Iterator[str]]) -> str | None:
    """Print one section; returns the sentence that says what is broken, if anything is."""
    print(title)
    try:
        for line in section():
            print(f"  {line}", flush=True)
    except Broken as error:
        sentence = str(error)
    # Whatever a section meets on a broken installation is reported, never a traceback.
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        sentence = f"{type(error).__name__}: {first}"
    else:
        return None
    print(f"  BROKEN: {sentence}")
    return f"{title}: {sentence}"


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 when everything works, 1 with a sentence for each thing that does not."""
    parser = argparse.ArgumentParser(
        prog="python -m flaop doctor",
        description="Say what is installed and built, which path typical calls take, and whether"
        " a small self-test passes.",
    )
    parser.parse_args(argv)
    try:
        import flaop  # noqa: F401
    except ImportError as error:
        print(f"flaop doctor: {error}", file=sys.stderr)
        return 1
    problems = [report(title, section) for title, section in SECTIONS.items()]
    problems = [sentence for sentence in problems if sentence]
    for sentence in problems:
        print(f"flaop doctor: {sentence}", file=sys.stderr)
    if not problems:
        print("everything works")
    return 1 if problems else 0
