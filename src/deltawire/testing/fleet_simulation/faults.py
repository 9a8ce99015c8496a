"""Faults of the store, the network and the trainers, which all kinds of simulated runs have."""

from __future__ import annotations

from .world import World


def degrade_network(world: World) -> None:
    """Let requests, answers and overwritten objects get lost or late for a while."""
    network, draw = world.network, world.random.random
    network.lost, network.unanswered, network.landing_late = 0.2 * draw(), 0.2 * draw(), 0.1 * draw()
    network.stale_hints = 0.5 * draw()
    world.log("", f"the network degrades: {network}")
    world.kernel.later(60 * draw(), network.clear)


def store_down(world: World) -> None:
    """Let every request fail for a while."""
    world.log("", "the store is down")
    world.network.down = True
    world.kernel.later(60 * world.random.random(), setattr, world.network, "down", False)


def kill_trainer(world: World) -> None:
    """Kill the trainer, and start another one after a while."""
    world.kill_trainer(30 * world.random.random())


def kill_trainer_soon(world: World) -> None:
    """Kill the trainer right after one of its next requests."""
    if world.trainers:
        world.kill_after(world.trainers[-1].process, world.random.randrange(60))


def freeze_trainer(world: World) -> None:
    """Freeze the trainer. Often another trainer takes over before it wakes up."""
    if not world.trainers:
        return
    process = world.trainers[-1].process
    world.log(process.name, "freezes")
    process.freeze()
    asleep = 120 * world.random.random()
    world.kernel.later(asleep, process.wake)
    if world.random.random() < 0.7:
        world.kernel.later(asleep * world.random.random(), start_second_trainer, world)


def disconnect_trainer(world: World) -> None:
    """Cut the trainer off for a while."""
    if world.trainers:
        process = world.trainers[-1].process
        world.log(process.name, "is disconnected")
        process.cut_off = True
        world.kernel.later(60 * world.random.random(), setattr, process, "cut_off", False)


def start_second_trainer(world: World) -> None:
    """Start a second trainer while the first one still runs."""
    if not world.is_trained:
        world.start_trainer()
