"""Live traffic, channels and gates in virtual time: the real code over a modelled store, with every fault that can happen.

    python -m deltawire.testing.release_simulation --seeds 10000

One seed is one run. In every run these rules must hold: no interaction is trained on twice in one line of history, or without consent; its
reward is what an independent join gives; acknowledged feedback is in the store; channels have one history; followers serve only what was on
their channel; a gate promotes no bad canary, and has evidence for its moves. When the faults end, everything comes to rest.

scenario       makes a run from a seed: processes, network, faults
many_seeds     runs many seeds, also in several processes
live_world     all parts of one run
users          ask gateways, and give feedback
gateway_model  a gateway without HTTP
live_trainer   a trainer around the real coordinator and joiner
operators      promoters, gates and followers of channels
live_chain     the chain, with real records
live_oracle    judges what must hold
blocking       runs code that blocks in virtual time
virtual_loop   runs asyncio in virtual time
virtual_time   the clock that gateways see

Kernel, network and store are those of `deltawire.testing.fleet_simulation`.
"""

from .scenario import Outcome, simulate

__all__ = ["Outcome", "simulate"]
