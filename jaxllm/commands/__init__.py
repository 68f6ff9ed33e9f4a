"""The subcommands; `add` declares flags, `run` returns the exit code."""
