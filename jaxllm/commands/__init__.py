"""The commands of the command line, a module each: `add` describes its flags, `run` does it and gives the exit code."""
