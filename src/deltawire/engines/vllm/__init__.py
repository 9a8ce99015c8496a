"""vLLM: weights go from a chain into a running server, through vLLM's own weight-transfer interface.

In vLLM's processes, in the order in which an update passes through them:

    plugin.py             the entry point that vLLM calls; it registers the backend `deltawire`
    answer_recorder.py    a middleware of the server that keeps what the engine drew for each answer
    engine_core.py        lets EngineCore swap in one call, between two steps
    engine_holds.py       keeps EngineCore paused while its weights are those of no version, and ends pauses that nobody ends
    engine_watch.py       lets EngineCore look after workers that confirm a swap later, and quarantines an engine
    abandoned_updates.py  says why EngineCore stays paused after an update that its program has not ended
    lost_wakeups.py       limits the time that a lost wake-up between vLLM's processes costs
    backend.py            the backend, one object in each worker: stages an update while the server generates, writes it while it is paused
    ranks.py              what the workers tell each other
    live/                 updates of live memory, decoded where the weights are
    layout/               learns where a worker keeps the elements of a chain's tensors, from vLLM's own loaders and processing
    modules/              modules whose tensors are results of arithmetic
    worker_model.py       the model, as live updates need it
    model_fit.py          finds out whether the tensors of a chain fit the model
    draft.py              the draft model of speculative decoding, which follows the chain if its weights are there
    loading.py            loads everything anew through the model's own loaders, from files or from the store
    cpu.py                keeps vLLM on CPUs from packing weights in a way that its loaders cannot change
    expert_capture.py     records routed experts in a worker of vLLM's CPU build
    checked_arguments.py  checks what clients give to the workers

In the process that drives the server, which needs neither vLLM nor torch:

    driver/           the sidecar, the client of the server's routes, and completions for a member of a fleet
"""

OLDEST_VLLM = "0.32"
"""The oldest release of vLLM that works: the tests run this one, and older ones do not label tokens with the weights that made them."""

QUARANTINED_LABEL = "deltawire-quarantined"
"""The label of a server's weights while they are in an unknown state."""
