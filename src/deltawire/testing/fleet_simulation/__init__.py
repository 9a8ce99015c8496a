"""A fleet in virtual time: the real steps of trainer and members over a modelled store, with every fault that can happen.

    python -m deltawire.testing.fleet_simulation --seeds 10000
    python -m deltawire.testing.fleet_simulation --seeds 10000 --regions

One seed is one run. After every event of every run these rules must hold: no result is trained on twice in one line of history, no
acknowledged result that is still valid is lost, and no stale, abandoned or foreign result is accepted. When the faults end, the run
reaches its last step.

scenario       makes a run from a seed: members, network, faults
faults         faults of store, network and trainers
world          all parts of one run
kernel         virtual time, processes and their threads
trainer_model  a trainer around the real coordinator
engine_model   the engine of a member
chain_model    the chain
store_model    the store and the network
wan_link       the link of a region
region_model   relays, and the engines of members in regions
region_faults  regions from the seed, their faults, and what must hold for them
misbehaviour   members that break the rules
oracle         judges what must hold
profile        attributes the time of members
many_seeds     runs many seeds, also in several processes
parse_cache    caches parsed records while a run lasts
"""

from .scenario import Outcome, simulate

__all__ = ["Outcome", "simulate"]
