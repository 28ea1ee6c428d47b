"""Schemas are frozen: returns never change, arguments are only appended, with defaults."""

import pathlib

import pytest
import torch

import flaop  # noqa: F401

SNAPSHOT = pathlib.Path(__file__).with_name("schemas.txt")


def registered() -> dict[str, torch._C.FunctionSchema]:
    return {
        schema.name: schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("flaop::")
    }


def overload(name: str):
    return getattr(torch.ops.flaop, name.removeprefix("flaop::")).default


def test_schemas_are_those_of_the_snapshot():
    lines = sorted(str(schema) for schema in registered().values())
    assert lines == SNAPSHOT.read_text().splitlines()


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_op_can_be_compiled_and_called_positionally(name):
    op = overload(name)
    assert torch.Tag.pt2_compliant_tag in op.tags
    assert not any(argument.kwarg_only for argument in op._schema.arguments)


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_op_is_complete(name):
    """A composite decomposes into the others; each of those has kernels, a fake and autograd."""

    def has(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    if has("CompositeImplicitAutograd"):
        return
    for key in ("CPU", "CUDA", "Autograd"):
        assert has(key), key
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None
