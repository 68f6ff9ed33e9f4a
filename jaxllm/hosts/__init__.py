"""One model over the devices of several hosts, in lock step.

Each host runs one process. Rank 0, the leader, has the engine and serves; the others are followers: a replay with a
device. The leader sends each call of its scheduler, and for each step the program's index, digests of the plan and of
the packed batch, and inputs that a scheduler does not know (sampling parameters, masks). A follower runs the same pure
scheduler, compares the digests, and dispatches the same program, so that collectives meet. Results are replicated:
each process reads its copy, and a follower compares its tokens with the leader's.
"""
