"""Read a config.json as a `Spec`, and name the tensors of its weights."""
