"""vLLM: weights go from a chain into a running server, through vLLM's own weight-transfer interface.

In vLLM's processes, in the order in which an update passes through them:

    plugin.py         the entry point that vLLM calls; it registers the backend `deltawire`
    engine_core.py    lets EngineCore swap in one call, between two steps
    engine_holds.py   keeps EngineCore paused while its weights are those of no version, and ends pauses that nobody ends
    update_types.py   types that live updates share
    backend.py        the backend, one object in each worker: stages an update while the server generates, writes it while it is paused
    ranks.py          what the workers tell each other

    live_updates.py   updates of live memory: learn the layout, adopt a version, prepare, swap
    live_staging.py   stages them on a separate thread
    live_weights.py   a worker's weights at a version; decodes updates against them, and writes them in one transaction
    layout_update.py  one such update: decoded, written, undone
    worker_model.py   the model, as such updates need it
    ownership.py      which worker digests which elements
    kept_bases.py     one copy on the host of the tensors that workers cannot read from their own memory
    cold_start.py     brings workers to a version with nothing but the store
    layout/           learns where a worker keeps the elements of a chain's tensors, from vLLM's own loaders and processing
    recompute.py      computes tensors again that are results of arithmetic, in the memory that they have
    module_shell.py   copies of modules, on which vLLM's processing runs without any effect on the live model
    load_module.py    loads one module anew

    mirror_updates.py updates from a mirror: writes what differs between two versions, or loads everything
    staging.py        finds out what differs between the version that a worker has and the next one
    element_map.py    where a model keeps the elements of a checkpoint; writes changed elements there
    read_back.py      reads weights back through the model's own loaders, and compares them
    loading.py        loads weights through the same loaders: single tensors, or everything anew
    cpu.py            keeps vLLM on CPUs from packing weights in a way that its loaders cannot change

In the process that drives the server, which needs neither vLLM nor torch:

    sidecar.py        follows a chain and brings each version into the server
    server_replica.py the weights of the server, which take updates live, from a spool of deltas, or from a mirror
    server_update.py  the server as an engine for `SwapController`: pause, update, resume
    routes.py         a client of the server's HTTP routes
    readiness.py      a route that tells load balancers whether the server serves a version of the chain
    token_route.py    the route that tells which weights made which token: its requests and answers
    lora.py           LoRA adapters of a chain, under the names of their versions
    canary.py         checks after an update that decoding computes what prompts do
    generation.py     completions for a member of a fleet, from a server that the member drives
"""

OLDEST_VLLM = "0.32"
"""The oldest release of vLLM that works: the tests run this one, and older ones do not label tokens with the weights that made them."""

QUARANTINED_LABEL = "deltawire-quarantined"
"""The label of a server's weights while they are in an unknown state."""
