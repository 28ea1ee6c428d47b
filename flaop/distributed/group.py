"""The ranks that share a sequence, and the shard of one of them."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """A process group as compiled graphs see it: constants. Serves wherever a group is asked for.

    Rank i holds the i-th shard: a sequence runs through the ranks in order.
    """

    name: str  # by which functional collectives find the process group
    rank: int  # of this process in the group
    size: int


def resolve(
    group: "Group | dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | int]",
) -> Group:
    """The Group of a process group, a DeviceMesh of one dimension, or a dimension of a mesh.

    Args:
        group: a ProcessGroup, a DeviceMesh with one dimension (``mesh["cp"]``), a mesh with the
            name or the index of one of its dimensions, or a Group.

    Raises:
        ValueError: torch.distributed is not initialised, the group is gone, this process is no
            member of it, or a mesh has several dimensions and none was named.
        TypeError: `group` is something else.
    """
    if isinstance(group, Group):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group needs an initialised torch.distributed: call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        group = group[0].get_group(group[1])
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be one dimension of the mesh, got a mesh of {group.ndim} dimensions "
                f'{group.mesh_dim_names}: pass mesh["name"] or (mesh, "name")'
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must hold this process, got one of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a ProcessGroup, a DeviceMesh of one dimension or (mesh, dimension), "
            f"got {type(group).__name__}"
        )
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        raise ValueError("group is not initialised: its process group was destroyed") from None
    return Group(group.group_name, dist.get_rank(group), len(ranks))


def shard(x: Tensor, group, dim: int = 1) -> Tensor:
    """This rank's contiguous part of a tensor that every rank holds in full, a view.

    Args:
        x: any tensor; its length along `dim` must be a multiple of the size of the group.
        group: see :func:`resolve`.
        dim: of the tokens, 1 of [B, T, ...].

    Raises:
        ValueError: the size of the group does not divide the length; or as :func:`resolve`.
    """
    _, rank, size = resolve(group)
    length = x.shape[dim]
    if length % size:
        raise ValueError(
            f"the total length must be a multiple of the size of the group, {size}, got {length}: "
            "pad the tokens; those behind the last sequence of cu_seqlens cost nothing"
        )
    return x.narrow(dim, rank * (length // size), length // size)
