"""Context parallelism: sequences cut into shards over the ranks of a process group."""

from flaop.distributed.functional import gated_delta_rule, gla, kda, simple_gla
from flaop.distributed.group import Group, resolve, shard

__all__ = ["Group", "gated_delta_rule", "gla", "kda", "resolve", "shard", "simple_gla"]
