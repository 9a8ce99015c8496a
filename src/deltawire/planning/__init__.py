"""Computes what a run costs before it exists: bytes, seconds, idle members and dollars for each training step. Does not import torch.

quantities      text with units, such as 8B, 20.3GiB and 1Gbit/80ms, to numbers
workload        bytes of a full checkpoint and of a delta, from recorded densities
link_model      how long objects take over a link with a rate and a round-trip time
network         regions, and the time from the end of training until all members have a version
store_limits    what stores and the trainer allow, and how much of it a run uses
fleet_shape     members, staleness and prices, and how long members wait for versions
fleet_model     a small fleet in virtual time, with the scheduler of the real one
running_chain   the workload of a run that exists, from its commits
plan            puts these together, for full weights, XOR + zstd-1 and deltawire
plot            a plan as an SVG picture
"""

from __future__ import annotations

from .fleet_shape import FleetShape, Prices
from .link_model import CALIBRATED, Link, LinkModel, transfer_seconds
from .network import Network, Region
from .plan import MethodPlan, PlanReport, plan
from .workload import Workload

__all__ = [
    "CALIBRATED",
    "FleetShape",
    "Link",
    "LinkModel",
    "MethodPlan",
    "Network",
    "PlanReport",
    "Prices",
    "Region",
    "Workload",
    "plan",
    "transfer_seconds",
]
