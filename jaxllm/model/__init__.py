"""The one decoder: what it can be (`spec`), which checkpoints it can read (`families`, `weights`), what it computes."""
