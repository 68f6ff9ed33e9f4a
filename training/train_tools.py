"""Trains the adapter "tools" of the embedded model on the CPU: `python -m training.train_tools --out DIR --seed 0`."""

from training import tool_calls, train_adapter

# Longer rows than the pirate's, so that the positions of an agent's second and third call are trained.
TOOLS = train_adapter.Recipe(tool_calls.documents, 16, 900, 6, 256, tool_calls.CHAT_TEMPLATE)


def main() -> None:
    """Train and write the adapter "tools"."""
    train_adapter.run("training.train_tools", TOOLS)


if __name__ == "__main__":
    main()
