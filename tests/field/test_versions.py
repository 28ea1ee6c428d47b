"""Field reports on GPUs, compilers and their versions (H)."""

import ast
import pathlib

import pytest
import torch

import flaop
from flaop.testing import (
    chunk_budget_reference,
    kda_inputs,
    kda_oracle,
    relative_error,
)

ROOT = pathlib.Path(flaop.__file__).parent
BF16 = torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 100])
def test_H01_key_gradients_on_hopper(fn, matches, K):
    """dk, and from it dg and dbeta, each by itself."""
    inputs = kda_inputs(
        T=1000 if fn is flaop.chunk_kda else 200, H=1, K=K, V=64, dtype=BF16, device="cuda"
    )
    matches(fn, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [64, 128, 256])
def test_H02_the_shipped_warps_and_stages(matches, T):
    """No other configuration is ever offered: the rows are functions, not a search."""
    inputs = kda_inputs(T=T, H=2, K=64, V=64, dtype=BF16, device="cuda", gates="slow")
    matches(flaop.chunk_kda, inputs)


def test_H04_nothing_is_tuned_at_run_time():
    pytest.importorskip("triton")
    import flaop.triton_kernels

    for folder in (pathlib.Path(flaop.triton_kernels.__file__).parent, ROOT / "launch"):
        for file in folder.rglob("*.py"):
            assert "autotune" not in file.read_text(), file


@pytest.mark.gpu
def test_H05_K_192_V_384(fn, matches):
    matches(fn, kda_inputs(T=200, H=1, K=192, V=384, dtype=BF16, device="cuda"))


def test_H05_K_192_V_384_on_the_cpu(fn, matches):
    matches(fn, kda_inputs(T=66, H=1, K=192, V=384, dtype=BF16))


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_H06_a_row_for_every_architecture(arch):
    """Launches and tiles exist; tests/kernels/test_aot.py compiles them for 80, 90 and 100."""
    pytest.importorskip("triton")
    from flaop.testing.launches import Case, kda_launches

    for size in (64, 128, 256):
        for dtype in ("bf16", "fp32"):
            for _, _, constants, options in kda_launches(
                Case(arch, dtype, size, "bounded")
            ).values():
                tiles = [
                    x
                    for name, x in constants.items()
                    if name in ("BK", "BV", "BT", "BN", "BR", "BD")
                ]
                assert all(x & (x - 1) == 0 for x in tiles)
                assert options.get("num_warps", 4) in (1, 2, 4, 8, 16)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_H07_errors_in_units_of_a_plain_implementation(fn, device, gradients_of, dtype):
    """Each error below three times that of a PyTorch formula with the same roundings."""
    inputs = kda_inputs(T=80, H=1, K=64, V=64, dtype=dtype, device=device)
    results = [gradients_of(f, inputs) for f in (fn, chunk_budget_reference, kda_oracle)]
    for got, plain, exact in zip(*results):
        for name, ref in exact.items():
            floor = torch.finfo(got[name].dtype).eps
            assert relative_error(got[name], ref) < 3 * relative_error(plain[name], ref) + floor, (
                name
            )


@pytest.mark.gpu
def test_H08_no_allocator_is_needed(fn):
    """A first call on another thread, with no triton allocator set by anyone."""
    import threading

    inputs = kda_inputs(T=70, H=1, K=40, V=40, device="cuda", requires_grad=True)
    errors = []

    def call():
        try:
            fn(**inputs)[0].sum().backward()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not errors and torch.isfinite(inputs["g"].grad).all()


def test_H08_kernels_need_no_scratch():
    """Device-side descriptors would need an allocator that autograd's threads do not inherit."""
    triton = pytest.importorskip("triton")
    import flaop.triton_kernels

    assert triton
    for file in pathlib.Path(flaop.triton_kernels.__file__).parent.rglob("*.py"):
        text = file.read_text()
        assert "make_tensor_descriptor" not in text and "set_allocator" not in text, file


def test_H10_old_gpus_get_one_sentence(monkeypatch):
    pytest.importorskip("triton")
    from flaop.launch import kernel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(kernel, "_arch", {})
    with pytest.raises(RuntimeError, match="need compute capability 8.0 or newer, cuda:0 has 7.5"):
        kernel.arch(torch.device("cuda", 0))


@pytest.mark.gpu
def test_H11_wide_values_and_a_bf16_state(fn, matches):
    inputs = kda_inputs(
        B=2, T=200, H=2, K=128, V=512, dtype=BF16, device="cuda", initial_state=True
    )
    inputs["initial_state"] = inputs["initial_state"].bfloat16()
    matches(fn, inputs)


@pytest.mark.parametrize("name", ["kda", "chunk_kda", "fused_recurrent_kda"])
def test_H11_docstring_examples_run(name):
    import doctest

    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(recurse=False).find(getattr(flaop, name), name):
        assert test.examples
        assert runner.run(test).failed == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_H12_the_same_bits_every_time(fn, gradients_of, dtype):
    T = 1000 if fn is flaop.chunk_kda else 100
    inputs = kda_inputs(
        T=T, H=4, dtype=dtype, device="cuda", gate_in_kernel="softplus", initial_state=True
    )
    first = gradients_of(fn, inputs)
    for _ in range(50):
        for found, expected in zip(gradients_of(fn, inputs), first):
            for name, x in expected.items():
                assert torch.equal(found[name], x), name


@pytest.mark.parametrize("K, V", [(64, 64), (128, 128), (256, 256), (128, 64)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_H13_what_the_fused_kernel_lacks_goes_elsewhere(device, K, V, dtype):
    inputs = kda_inputs(
        T=66, H=3, K=K, V=V, dtype=dtype, device=device, gate_in_kernel="bounded", l2norm=True
    )
    explanation = flaop.explain(flaop.kda, **inputs)
    assert explanation.path == "chunk" and any("flash_kda" in s for s in explanation.passed_over)
    assert flaop.kda(**inputs)[0].shape == inputs["v"].shape


# removed from, or about to leave, triton's language
REMOVED = {"make_block_ptr", "advance", "libdevice", "next_power_of_2"}


def test_P04_no_removed_name_of_triton():
    pytest.importorskip("triton")
    import flaop.triton_kernels

    for file in pathlib.Path(flaop.triton_kernels.__file__).parent.rglob("*.py"):
        names = {
            n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)
        }
        assert not names & REMOVED, file


def test_H09_shared_memory_of_every_row_is_a_test():
    """Rows that do not fit fail the ahead-of-time tests; sm_86 and sm_89 have less."""
    pytest.importorskip("triton")
    from flaop.testing.aot import SHARED_LIMIT

    assert SHARED_LIMIT[86] == SHARED_LIMIT[89] == 99 << 10 < SHARED_LIMIT[80] < SHARED_LIMIT[90]
