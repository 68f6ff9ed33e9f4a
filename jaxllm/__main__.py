"""`python -m jaxllm`: the command line, see cli.py."""

from jaxllm.commands.cli import run

if __name__ == "__main__":
    run()
