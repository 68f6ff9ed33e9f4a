"""A generating call on any protocol: its prompts, constraints and forms of output."""
