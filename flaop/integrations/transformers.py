"""Hugging Face transformers: the delta layers of its models, computed by flaop.

Such a layer does its projections, its convolution and its gates itself and hands q, k, v, g and
beta to one of two functions: in chunks for training and prompts, token by token for decoding.
`use_flaop` puts flaop's dispatcher in the place of both. Up to transformers 5.14 a layer holds the
two functions as attributes; later its forward reads them from the globals of its module.
"""

import functools
import types

from torch import Tensor, nn

from flaop.functional import kda
from flaop.functional_gated_delta_rule import gated_delta_rule

# First and last minor version that the tests were run with.
OLDEST, NEWEST = (5, 5), (5, 24)
# The layers that can be replaced, by the kind of model.
LAYERS = {
    "Qwen3NextGatedDeltaNet": "Qwen3-Next",
    "Qwen3_5GatedDeltaNet": "Qwen3.5",
    "Qwen3_5MoeGatedDeltaNet": "Qwen3.5-MoE",
    "Qwen4ExpTextGatedDeltaNet": "Qwen4Exp",
    "OlmoHybridGatedDeltaNet": "OLMo-Hybrid",
    "LaraMiniGatedDeltaNet": "LaraMini",
    "KimiLinearDeltaAttention": "Kimi-Linear",
    "BailingHybridDeltaAttention": "Bailing-Hybrid",
    "Glm5NextTextLinearAttention": "GLM-5-Next",
}


def use_flaop(model: nn.Module) -> nn.Module:
    """Makes the gated-delta and Kimi-delta layers of a transformers model compute with flaop.

    The chunk and the recurrent function of each such layer are replaced by `flaop.gated_delta_rule`
    or `flaop.kda`, which choose the path themselves. Only the layers of this model change, in
    place; parameters, state dict, cache layout and padding stay as they are. Calling it again
    changes nothing. Copies and pickles of the model keep flaop; a model that is made or loaded anew
    does not have it.

    Args:
        model: a model of transformers, or a module that holds one: Qwen3-Next, Qwen3.5, Kimi-Linear
            and the others of `LAYERS`. In any dtype that flaop takes, on any device.

    Returns:
        the same model.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: the installed version is not one that this was tested with.
        TypeError: model is not a module.
        ValueError: no layer of the model can be replaced, or one runs a forward of its own.

    Cost: none but the walk over the modules; the first call for a class makes one subclass.

    References: Gated Delta Networks, arXiv:2412.06464; Kimi Linear, arXiv:2510.26692.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from flaop.integrations.transformers import use_flaop
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-Next-80B-A3B-Instruct")
        >>> model = use_flaop(model)
    """
    _check_version()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = [module for module in model.modules() if _is_replaceable(module)]
    if not layers:
        kinds = ", ".join(LAYERS.values())
        raise ValueError(
            f"model ({type(model).__name__}) has no layer that flaop can compute: those are the "
            f"gated-delta and Kimi-delta layers of transformers' models {kinds}"
        )
    # All of them first: an error leaves the model as it was.
    for layer in layers:
        _check_forward(layer)
    for layer in layers:
        _replace(layer)
    return model


def run_gated_delta_rule(
    query: Tensor,  # [B, T, H, K]
    key: Tensor,  # [B, T, H, K]
    value: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV], log decay
    beta: Tensor,  # [B, T, HV]
    *,
    initial_state: Tensor | None = None,  # [N, HV, K, V]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
    seq_idx: Tensor | None = None,  # [1, T]
    **_,
) -> tuple[Tensor, Tensor | None]:
    """What a gated-delta layer calls: o [B, T, HV, V] and the final state [N, HV, K, V] or None.

    A layer hands on all keyword arguments of the model's forward; those not named are for others.
    """
    _check_packing(cu_seqlens, seq_idx)
    return gated_delta_rule(
        *(query, key, value, g, beta),
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


def run_kda(
    query: Tensor,  # [B, T, H, K]
    key: Tensor,  # [B, T, H, K]
    value: Tensor,  # [B, T, H, V]
    g: Tensor,  # [B, T, H, K], log decay
    beta: Tensor,  # [B, T, H]
    *,
    initial_state: Tensor | None = None,  # [N, H, K, V]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seq_lens_q: Tensor | None = None,  # [N + 1]
    seq_idx: Tensor | None = None,  # [1, T]
    **_,
) -> tuple[Tensor, Tensor | None]:
    """What a Kimi-delta layer calls; as run_gated_delta_rule, but the layer renames no argument."""
    _check_packing(cu_seq_lens_q, seq_idx)
    return kda(
        *(query, key, value, g, beta),
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seq_lens_q,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


# What replaces which attribute of a layer, up to transformers 5.14 ...
_ATTRIBUTES = {
    "chunk_gated_delta_rule": run_gated_delta_rule,
    "recurrent_gated_delta_rule": run_gated_delta_rule,
}
# ... and which global that its forward reads, from 5.15.
_GLOBALS = {
    "torch_chunk_gated_delta_rule": run_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": run_gated_delta_rule,
    "chunk_kimi_delta_attention": run_kda,
    "recurrent_kimi_delta_attention": run_kda,
}


class _FlaopLayer:
    """Marks the subclasses made by _subclass, and makes their instances copy and pickle."""

    def __reduce_ex__(self, protocol):
        # The subclass is made at run time, so a pickle names the class of transformers instead.
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return _new_layer, (self.original_class,), *state


def _new_layer(original_class: type) -> nn.Module:
    subclass = _subclass(original_class)
    return subclass.__new__(subclass)


@functools.cache
def _subclass(cls: type) -> type:
    """The class of a layer with a forward that calls flaop."""
    forward = _redirected(cls.forward)
    if forward is None:
        raise ValueError(
            f"the forward of {cls.__name__} does not itself call transformers' chunk and recurrent "
            "functions, so flaop cannot take their place"
        )
    members = {
        **{"__module__": cls.__module__, "__doc__": cls.__doc__},
        **{"original_class": cls, "forward": forward},
    }
    return type(f"Flaop{cls.__name__}", (_FlaopLayer, cls), members)


def _redirected(function: types.FunctionType) -> types.FunctionType | None:
    """A copy of a forward, its decorators included, that calls flaop; None if it calls neither.

    Only names in its code change. The globals stay those of its module, where flaop's functions are
    added under names of their own: torch.compile looks globals up there, and so do patches.
    """
    code, closure = function.__code__, list(function.__closure__ or ())
    found = _GLOBALS.keys() & set(code.co_names)
    for name in found:
        function.__globals__[f"_flaop_{name}"] = _GLOBALS[name]
    names = [f"_flaop_{name}" if name in found else name for name in code.co_names]
    changed = bool(found)
    # A decorator holds the function that it wraps in a cell.
    for i, cell in enumerate(closure):
        inner = cell.cell_contents
        redirected = _redirected(inner) if isinstance(inner, types.FunctionType) else None
        if redirected is not None:
            changed, closure[i] = True, types.CellType(redirected)
    if not changed:
        return None
    copy = types.FunctionType(
        code.replace(co_names=tuple(names)),
        *(function.__globals__, function.__name__, function.__defaults__, tuple(closure)),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__, copy.__qualname__ = function.__doc__, function.__qualname__
    return copy


def _is_replaceable(module: nn.Module) -> bool:
    return any(
        cls.__name__ in LAYERS and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def _has_attributes(layer: nn.Module) -> bool:
    return all(hasattr(layer, name) for name in _ATTRIBUTES)


def _check_forward(layer: nn.Module) -> None:
    if isinstance(layer, _FlaopLayer) or _has_attributes(layer):
        return
    if "forward" in vars(layer) and "_old_forward" not in vars(layer):
        raise ValueError(
            f"a {type(layer).__name__} of the model has a forward of its own, which flaop cannot "
            "change; call use_flaop before whatever replaces it"
        )
    _subclass(type(layer))


def _replace(layer: nn.Module) -> None:
    if isinstance(layer, _FlaopLayer):
        return
    if _has_attributes(layer):
        for name, function in _ATTRIBUTES.items():
            setattr(layer, name, function)
        return
    layer.__class__ = _subclass(type(layer))
    if "_old_forward" in vars(layer):
        # accelerate's hooks keep the forward that they wrap here.
        layer._old_forward = types.MethodType(type(layer).forward, layer)


def _check_packing(cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> None:
    if cu_seqlens is not None and seq_idx is None:
        raise ValueError(
            "packed sequences (cu_seq_lens_q) need seq_idx as well, by which the convolution "
            "keeps them apart, and transformers 5.15 or later, which hands it on"
        )


def _check_version() -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            'flaop.integrations.transformers needs transformers: pip install "flaop[transformers]"'
        ) from error
    version = transformers.__version__
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        raise RuntimeError(
            f"flaop is tested with transformers {_dotted(OLDEST)} to {_dotted(NEWEST)}, and "
            f'{version} is installed: pip install "flaop[transformers]" takes one of those'
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
