"""Field reports on speed, devices, determinism and requests (F, M, R)."""

import inspect
import pathlib
import time

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

TOKENS = ("q", "k", "v", "g", "beta")
SMALL = dict(H=1, K=16, V=8)


@pytest.mark.gpu
def test_F03_nothing_compiles_after_a_warm_up():
    """One warm-up per dtype, option set and head size serves every length and batch."""
    from flaop.launch.delta import recurrent, stages
    from flaop.launch.kernel import Kernel

    kernels = [x for m in (stages, recurrent) for x in vars(m).values() if isinstance(x, Kernel)]
    for state in (False, True):
        for T in (64, 65):
            flaop.warmup(
                flaop.kda, **kda_inputs(T=T, H=2, K=48, V=48, device="cuda", initial_state=state)
            )
    before = sum(len(kernel.variants) for kernel in kernels)
    for B in (1, 2, 17, 64):
        for T in (1, 2, 64, 65, 4096 // B):
            for state in (False, True):
                inputs = kda_inputs(B=B, T=T, H=2, K=48, V=48, device="cuda", initial_state=state)
                flaop.kda(**inputs)
    assert sum(len(kernel.variants) for kernel in kernels) == before


@pytest.mark.parametrize("lengths", [[256], [60, 0, 196]], ids=str)
def test_F06_weak_decay_is_exact_however_work_is_split(fn, device, lengths):
    inputs = kda_inputs(lengths=lengths, H=1, K=16, V=8, device=device, initial_state=True)
    inputs["g"].fill_(-1e-4)
    o, state = fn(**inputs)
    expected = kda_oracle(**inputs)
    assert relative_error(o, expected[0]) < 1e-5 and relative_error(state, expected[1]) < 1e-5


def test_F07_calls_are_cheap_on_the_host():
    """Validation and dispatch of a fake call: no kernel, no value, well under a millisecond."""
    inputs = kda_inputs(T=70, device="cpu", **SMALL)
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    times = []
    for _ in range(50):
        start = time.perf_counter()
        flaop.kda(**meta)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


def test_M01_mixed_devices_are_named(fn, device):
    inputs = kda_inputs(T=3, device=device, **SMALL)
    for name in TOKENS[1:]:
        with pytest.raises((ValueError, NotImplementedError), match=f"{name}|meta"):
            fn(**{**inputs, name: inputs[name].to("meta")})


def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
def test_M01_M02_tensors_on_another_device_than_the_current(fn, matches):
    two_gpus()
    matches(fn, kda_inputs(T=70, device="cuda:1", initial_state=True, **SMALL))
    assert torch.cuda.current_device() == 0
    inputs = kda_inputs(T=3, device="cuda:0", **SMALL)
    with pytest.raises(ValueError, match="k must be on the device of q, cuda:0, got cuda:1"):
        fn(**{**inputs, "k": inputs["k"].to("cuda:1")})


@pytest.mark.gpu
def test_M02_the_current_stream_is_used(fn):
    inputs = kda_inputs(T=70, device="cuda", **SMALL)
    expected, _ = fn(**inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        v = inputs["v"] * 1
        o, _ = fn(**{**inputs, "v": v})
        v.zero_()
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.gpu
def test_M03_capture_on_the_second_gpu(fn):
    two_gpus()
    with torch.cuda.device(1):
        inputs = kda_inputs(T=1, device="cuda:1", **SMALL)
        flaop.warmup(fn, **inputs)
        before = torch.cuda.memory_stats(0).get("allocation.all.allocated", 0)
        graph = torch.cuda.CUDAGraph()
        # not torch.cuda.graph: the stream of its first use in a process serves all later ones
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            o, _ = fn(**inputs)
            graph.capture_end()
        graph.replay()
    assert torch.cuda.memory_stats(0).get("allocation.all.allocated", 0) == before
    assert relative_error(o, kda_oracle(**inputs)[0]) < 1e-4


def test_M05_the_docs_say_that_ops_know_nothing_of_ranks(fn, device):
    """Half a sequence without the other half's state is another result: hand it over."""
    inputs = kda_inputs(T=20, device=device, gates="slow", **SMALL)
    half = {**inputs, **{name: inputs[name][:, 10:] for name in TOKENS}}
    first = {**inputs, **{name: inputs[name][:, :10] for name in TOKENS}}
    whole = fn(**inputs)[0][:, 10:]
    assert relative_error(fn(**half)[0], whole) > 0.01
    assert relative_error(fn(**{**half, "initial_state": fn(**first)[1]})[0], whole) < 1e-5


def test_M06_equal_calls_give_equal_bits(fn, device, gradients_of):
    inputs = kda_inputs(
        T=130, H=2, HV=4, K=32, V=24, device=device, dtype=torch.bfloat16,
        gate_in_kernel="softplus", l2norm=True, initial_state=True,
    )  # fmt: skip
    first = gradients_of(fn, inputs)
    for _ in range(2 if device == "cpu" else 29):
        for found, expected in zip(gradients_of(fn, inputs), first):
            for name, x in expected.items():
                assert torch.equal(found[name], x), name


@pytest.mark.gpu
def test_M06_equal_bits_on_a_busy_gpu(fn, gradients_of):
    inputs = kda_inputs(T=700, H=4, K=64, V=64, device="cuda", dtype=torch.bfloat16)
    first = gradients_of(fn, inputs)
    noise, stream = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            for _ in range(10):
                noise @ noise
        for found, expected in zip(gradients_of(fn, inputs), first):
            for name, x in expected.items():
                assert torch.equal(found[name], x), name


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_M08_autocast_joins_mixed_inputs(fn, device, low):
    """q and k promoted to float32 beside a 16-bit v: refused by name, joined under autocast."""
    inputs = kda_inputs(T=6, device=device, **SMALL)
    mixed = {**inputs, "v": inputs["v"].to(low)}
    with pytest.raises(TypeError, match="v must have the dtype of q"):
        fn(**mixed)
    leaves = {n: mixed[n].clone().requires_grad_() for n in TOKENS}
    with torch.autocast(device, dtype=low):
        o, state = fn(**{**mixed, **leaves})
    assert o.dtype is low and state.dtype is torch.float32
    (o.float().sum() + state.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype is mixed[name].dtype and torch.isfinite(leaf.grad).all(), name


def test_R01_support_is_one_table(device):
    """What supports() says runs, and the rest raises."""
    for K, T in ((16, 3), (257, 3)):
        inputs = kda_inputs(T=T, H=1, K=K, V=8, device=device)
        for path in ("chunk", "fused_recurrent", "flash_kda"):
            if K <= 256 and flaop.supports(path, flaop.kda, **inputs):
                assert flaop.kda(**inputs, backend=path)[0].shape == inputs["v"].shape
            else:
                with pytest.raises((ValueError, NotImplementedError)):
                    flaop.kda(**inputs, backend=path)


def test_R04_schemas_hold_tensors_and_plain_numbers():
    for name in ("kda", "chunk_kda", "chunk_kda_fwd", "chunk_kda_bwd", "fused_recurrent_kda"):
        schema = getattr(torch.ops.flaop, name).default._schema
        for argument in schema.arguments:
            kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
            assert kind in ("Tensor", "float", "int", "bool", "str", "List[bool"), argument
            assert argument.alias_info is None, argument
        # no length is ever an argument: those are shapes
        assert not {"max_seqlen", "T", "N"} & {argument.name for argument in schema.arguments}


def test_R05_states_at_chosen_tokens(fn, device):
    """States after 64, 128 and 190 of 200 tokens, by three shorter packed sequences."""
    inputs = kda_inputs(T=200, device=device, **SMALL)
    pieces = {n: torch.cat([inputs[n][:, :end] for end in (64, 128, 190)], 1) for n in TOKENS}
    bounds = torch.tensor([0, 64, 192, 382], device=device)
    _, states = fn(**{**inputs, **pieces, "cu_seqlens": bounds})
    for n, end in enumerate((64, 128, 190)):
        _, state = kda_oracle(**{**inputs, **{name: inputs[name][:, :end] for name in TOKENS}})
        assert relative_error(states[n], state[0]) < 1e-5


def test_R07_examples_of_the_functions_use_real_layouts():
    """Every example in a docstring names the layout [B, T, H, K] and runs (test_H11)."""
    for name in ("kda", "chunk_kda", "fused_recurrent_kda"):
        doc = inspect.getdoc(getattr(flaop, name))
        assert ">>> " in doc and "[B, T, H, K]" in doc


def test_F05_no_general_claim_of_speed():
    """Where the op beats attention depends on length and GPU: measured numbers, or nothing."""
    readme = pathlib.Path(flaop.__file__).parents[1] / "README.md"
    if not readme.exists():
        pytest.skip("an installed wheel has no README")
    assert "faster than attention" not in readme.read_text().lower()
