"""The subcommands. In each module, `add` declares flags and `run` returns the exit code."""
