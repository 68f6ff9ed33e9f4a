"""Pack a plan, choose a compiled program, keep the device's state, read results."""
