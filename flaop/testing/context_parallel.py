"""Checks of context parallelism that every rank runs: functions for testing.ranks."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import flaop
import flaop.distributed as context_parallel
from flaop.distributed import Group, resolve, shard
from flaop.testing.summaries import SUMMARY_FAMILIES
from flaop.testing.tolerances import assert_within_budget, relative_error
from flaop.validation import checks

# Inputs with a dimension of tokens; the others are the same on every rank.
TOKENS = ("q", "k", "v", "g", "beta")
_HINTS = ("chunk_size", "split_size", "disable_recompute")
# A relative error that is always allowed, by dtype: of sums that cancel.
_LEAST = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 5e-3}


@functools.cache
def first_ranks(size: int) -> Group | None:
    """The group of the first ranks, on its members. Every rank must call it."""
    if size == dist.get_world_size():
        return resolve(dist.group.WORLD)
    group = dist.new_group(list(range(size)))
    return resolve(group) if dist.get_rank() < size else None


def make_inputs(family: str, T: int = 192, **options) -> dict:
    """Keyword arguments of flaop.<family>, packed sequences padded to T tokens."""
    maker, full, _ = SUMMARY_FAMILIES[family]
    sizes = {"B": 2, "H": 1, "HV": 2, "K": 16, "V": 24, "initial_state": True}
    inputs = maker(**(sizes | full | {"T": T} | options))
    for name in TOKENS:
        x = inputs.get(name)
        if x is not None and x.shape[1] < T:
            rest = x[:, :1].expand(-1, T - x.shape[1], *x.shape[2:])
            inputs[name] = torch.cat((x, rest), dim=1)
    return inputs


def on_rank(inputs: dict, group: Group, grad: bool = True) -> dict:
    """The inputs of one rank: shards of what has tokens, leaves of their own."""
    found = {}
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            x = shard(x, group) if name in TOKENS else x
            x = x.detach().clone().requires_grad_(grad and x.is_floating_point())
        found[name] = x
    return found


def leaves(inputs: dict) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


def cotangents(inputs: dict) -> tuple[Tensor, Tensor]:
    """Gradients of o and of the final state, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    N = inputs["q"].shape[0] if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1
    K, (HV, V) = inputs["q"].shape[3], inputs["v"].shape[2:]
    state = (N, HV, V, K) if inputs["state_v_first"] else (N, HV, K, V)
    wide = torch.promote_types(inputs["q"].dtype, torch.float32)
    d_o = torch.randn(inputs["v"].shape, generator=generator, dtype=wide)
    d_state = torch.randn(state, generator=generator, dtype=wide)
    return d_o.to(inputs["v"]), d_state.to(inputs["v"].device)


def sum_over(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, as an optimiser would see it."""
    x = x.detach().clone()
    dist.all_reduce(x, group=dist.distributed_c10d._resolve_process_group(group.name))
    return x


def run_and_differentiate(fn, inputs: dict, d_o: Tensor, d_state: Tensor, loss: str) -> dict:
    """Outputs, and gradients of all leaves through o, the final state or both."""
    with_state = inputs["output_final_state"]
    o, state = fn(**inputs)
    outputs = {"o": o} | ({"final_state": state} if with_state else {})
    chosen = [name for name in outputs if loss in (name, "both")]
    given = {"o": d_o, "final_state": d_state}
    wanted = leaves(inputs)
    gradients = torch.autograd.grad(
        [outputs[name] for name in chosen], list(wanted.values()), [given[n] for n in chosen],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return outputs | {f"d{name}": x for name, x in zip(wanted, gradients, strict=True)}


def check_op(family: str, size: int, loss: str = "both", compiled: str = "", **options) -> None:
    """Outputs and every gradient against the same op in one process: `size` ranks hold shards.

    Errors are to float64, and may be twice those of the one process.
    """
    group = first_ranks(size)
    if group is None:
        return
    hints = {n: options.pop(n) for n in _HINTS if n in options}
    inputs = make_inputs(family, **options) | hints
    dtype = inputs["q"].dtype
    d_o, d_state = cotangents(inputs)
    whole = on_rank(inputs, Group("", 0, 1))
    plain = getattr(flaop, f"chunk_{family}")
    budget = run_and_differentiate(plain, whole, d_o, d_state, loss)
    wide = {
        name: x.detach().cpu().double().requires_grad_() if x.requires_grad else x.cpu()
        for name, x in whole.items() if isinstance(x, Tensor)
    }  # fmt: skip
    cotangents64 = d_o.cpu().double(), d_state.cpu().double()
    exact = run_and_differentiate(plain, whole | wide, *cotangents64, loss)

    fn = functools.partial(getattr(context_parallel, family), group=group)
    if compiled:
        torch._dynamo.reset()
        fn = torch.compile(fn, fullgraph=True, backend=compiled)
    got = run_and_differentiate(fn, on_rank(inputs, group), shard(d_o, group), d_state, loss)
    for name, x in got.items():
        references = exact[name], budget[name]
        if name == "o" or name[1:] in TOKENS:
            references = [shard(y, group) for y in references]
        else:  # a state's row is there on one rank, a parameter's gradient in parts
            x = sum_over(x, group)
        kind = "output" if name in ("o", "final_state") else "gradient"
        x, *references = (y.cpu() for y in (x, *references))
        label = f"{name} on rank {group.rank}"
        assert_within_budget(label, x, *references, dtype, kind, least=_LEAST[dtype])


def check_surroundings(family: str) -> None:
    """Autocast and a checkpoint give what they give the plain op; a second derivative raises."""
    group = first_ranks(2)
    if group is None:
        return
    inputs = on_rank(make_inputs(family), group)
    fn = functools.partial(getattr(context_parallel, family), group=group)
    d_o, d_state = cotangents(inputs)

    def checkpointed(**inputs):
        return checkpoint(fn, **inputs, use_reentrant=False)

    expected = run_and_differentiate(fn, inputs, d_o, d_state, "both")
    for name, x in run_and_differentiate(checkpointed, inputs, d_o, d_state, "both").items():
        assert torch.equal(x, expected[name]), name
    with torch.autocast("cpu", torch.bfloat16):
        o, state = fn(**inputs)
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert relative_error(o, expected["o"]) < 2e-2
    o, _ = fn(**inputs)
    try:
        torch.autograd.grad(o.square().sum(), inputs["q"], create_graph=True)
    except NotImplementedError:
        return
    raise AssertionError("a second derivative was accepted")


def check_capture(family: str) -> None:
    """Forward and backward in one CUDA graph, replayed with other values."""
    group = resolve(dist.group.WORLD)
    inputs = on_rank(make_inputs(family, device="cuda", lengths=[50, 0, 100, 42]), group)
    d_o, d_state = cotangents(inputs)
    fn = functools.partial(getattr(context_parallel, family), group=group)

    def call():
        return run_and_differentiate(fn, inputs, d_o, d_state, "both")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        inputs["v"].mul_(0.5)
        if inputs["cu_seqlens"] is not None:
            inputs["cu_seqlens"].copy_(torch.tensor([0, 10, 10, 150, 192]))
    graph.replay()
    for name, x in call().items():
        assert relative_error(captured[name], x) < 1e-5, name


def call_with(size: int, family: str, changes: dict[int, dict], debug: bool = False) -> str | None:
    """The error that each rank raises where some are called with other arguments, by rank."""
    group = first_ranks(size)
    if group is None:
        return None
    inputs = on_rank(make_inputs(family), group, grad=False)
    fn = getattr(context_parallel, family)
    before, checks.DEBUG = checks.DEBUG, debug
    try:
        fn(**{**inputs, **changes.get(group.rank, {})}, group=group)
        return None
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checks.DEBUG = before


def call_on_a_group_that_is_gone() -> str:
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.destroy_process_group(group)
    return _sentence(group)


def call_on_a_whole_mesh() -> str:
    return _sentence(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))


def call_on_a_group_of_others() -> str:
    return _sentence(dist.new_group([dist.get_world_size() - 1]))


def _sentence(group) -> str:
    inputs = make_inputs("gla", T=16)
    try:
        context_parallel.gla(**inputs, group=group)
    except ValueError as error:
        return str(error)
    return ""


def check_lengths(family: str, size: int, lengths: list[int]) -> int | None:
    """Values of one compiled function over lengths of shards; how often it was compiled."""
    group = first_ranks(size)
    if group is None:
        return None
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fn = functools.partial(getattr(context_parallel, family), group=group)
    compiled = torch.compile(fn, fullgraph=True, backend=counter, dynamic=True)
    for T in lengths:
        inputs = make_inputs(family, T=T * group.size)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                outputs = [f(**on_rank(inputs, group, grad)) for f in (compiled, fn)]
            for got, ref in zip(*outputs, strict=True):
                assert relative_error(got, ref) < 1e-6
    return counter.frame_count


def run_demo(*options: str) -> float:
    """The last loss of the demo's training, in bits per byte."""
    from flaop.demo.context_parallel import make_parser, train

    return train(make_parser().parse_args(["--device", "cpu", *options]), on_cuda=False)


def run_bench(op: str, mode: str) -> dict:
    """A record of ``bench --cp``."""
    from flaop.bench.case import Case, parse_shape
    from flaop.bench.context_parallel import measure
    from flaop.bench.families import family
    from flaop.bench.timing import Budget

    kind = family(op).gate_kinds[0]
    case = Case(op, mode, parse_shape("B1T256H2K16V16"), "fp32", "mixed", kind, "cpu")
    return measure(case, resolve(dist.group.WORLD), Budget(quick=True))
