"""A server as one of a cluster: its shards, and how they come and go without two holders of a lock."""

from dflockd.cluster.member import Member, agree
from dflockd.cluster.node import Node, Output
from dflockd.cluster.parameters import ClusterParameters, ParametersError

__all__ = ["ClusterParameters", "Member", "Node", "Output", "ParametersError", "agree"]
