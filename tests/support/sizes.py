"""The few engine sizes of tests, which share compiled programs.

Compiling the two programs of an engine takes 11 s of a slow core, loading them from the cache 1 s. They depend on the
model and on these sizes: use other sizes only in tests about sizes. See DECISIONS.md, "The simulation runs production
code, and tests have tiers".
"""

from __future__ import annotations

from typing import Any

FEW_SLOTS: dict[str, Any] = {"precompile": "covering", "max_num_seqs": 2, "max_num_batched_tokens": 128}
SLOTS: dict[str, Any] = {"precompile": "covering", "max_num_seqs": 8, "max_num_batched_tokens": 64}
MANY_SLOTS: dict[str, Any] = {"precompile": "covering", "max_num_seqs": 16, "max_num_batched_tokens": 128}
FEW_BLOCKS = SLOTS | {"num_kv_blocks": 10}  # of 16 tokens: too few for eight sequences
SHORT_BLOCKS = SLOTS | {"block_size": 4, "max_num_batched_tokens": 32}


def flags(sizes: dict[str, Any]) -> tuple[str, ...]:
    """Return sizes as command-line flags.

    >>> flags({"precompile": "covering", "max_num_seqs": 2})
    ('--precompile', 'covering', '--max-num-seqs', '2')
    """
    return tuple(word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value)))
