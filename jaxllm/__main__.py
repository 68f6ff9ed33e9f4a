"""Command line entry point, `python -m jaxllm`."""

from jaxllm.commands.cli import run

if __name__ == "__main__":
    run()
