"""Kernels and fakes of the gated_delta_rule ops.

Schemas, autograd and autocast are in csrc/ops/gated_delta_rule.cpp.
"""

import torch

from flaop.validation.gated_delta_rule import check, check_values

from . import delta
from .common import implement


def _reference():
    from flaop.reference import gated_delta_rule

    return gated_delta_rule


def _launchers():
    from flaop.launch.delta import gdn, recurrent

    return gdn, recurrent


_FAMILY = delta.Family(
    name="gated_delta_rule",
    check=check,
    check_values=check_values,
    reference=_reference,
    launchers=_launchers,
    new_kept=delta.new_states,
    residuals=4,
)

for name, kernel, fake in delta.ops(_FAMILY):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel, remembered=name == "chunk_gated_delta_rule")
