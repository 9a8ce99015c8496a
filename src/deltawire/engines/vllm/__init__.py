"""vLLM: weights go from a chain into a running server, through vLLM's own weight-transfer interface.

    plugin.py      what vLLM finds by its entry point: registers the backend `deltawire`
    backend.py     the backend, one in each worker: stages an update while the server generates, makes it while it is paused
    staging.py     what differs between the version that a worker has and the next one, found out beforehand
    loading.py     puts weights into a model by its own loaders: whole tensors in place, or everything anew
    element_map.py where a model keeps the elements of a checkpoint, as its loaders have shown; writes changes there
    read_back.py   reads weights back from a model by the same loaders, and compares
    cpu.py         on CPUs, keeps vLLM from packing weights where no loader finds them
    routes.py      a client of the server's HTTP routes
    sidecar.py     follows a chain beside a server, and drives it
    token_route.py which weights made which token: the route that tells, what to ask it and how to read its answer
    generation.py  completions for a member of a fleet, from a server that it drives

Only the last four are used outside of vLLM's processes; they need neither vLLM nor torch.
"""
