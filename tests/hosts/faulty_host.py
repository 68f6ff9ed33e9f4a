"""`jaxllm serve` with a fault of tests.hosts.group."""

import os

from jaxllm.commands import cli
from tests.hosts.group import plant

if __name__ == "__main__":
    plant(os.environ["FAULT"])
    cli.run()
