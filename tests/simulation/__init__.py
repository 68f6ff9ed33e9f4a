"""A deterministic simulation: the production engine with a simulated device, clock and clients, and injected faults.

A seed decides everything. `oracle.py` computes the expected output of each request. `device.py` checks every read of
the KV cache. `reference.py` is a naive second scheduler. `trace.py` makes a list of events from a seed, and `world.py`
plays it, with a `client.py` for each request, the event loop of `loop.py` and the replacements for threads in
`stand_ins.py`. Errors name the invariants I1 to I17; `checks.py` checks those of the whole engine. `shrink.py` shortens
a failing trace. `mutants.py` lists bugs that the simulation must find.

`python -m tests.simulation` plays seeds; `--help` lists its flags. docs/reliability.md, "Simulation", has the results.
"""
