"""A deterministic simulation: the production engine over a device, a clock, clients and faults that a seed decides.

`oracle.py` says what each request must give, whatever happens around it; `device.py` is a device that checks all it
reads of the cache; `reference.py` is the scheduler once more, naively; `trace.py` makes a list of events from a seed;
`world.py` plays it, with a `client.py` for each request, the event loop of `loop.py` and what stands for threads in
`stand_ins.py`; `checks.py` has the invariants I1 to I14; `shrink.py` makes a failing trace short; `mutants.py` are bugs
that the simulation must find.

`python -m tests.simulation --help` runs it; an invariant's number is that of checks.py; reliability.md §2a.
"""
