"""One model over the devices of several hosts, in lock step.

Rank 0, the leader, has the engine and serves. It sends each call of its scheduler, and for each step the program's
index, digests of plan and packed batch, and inputs that a scheduler lacks (sampling parameters, masks). A follower runs
the same pure scheduler, compares the digests, and dispatches the same program, so that collectives meet. Results are
replicated, and compared too.
"""
