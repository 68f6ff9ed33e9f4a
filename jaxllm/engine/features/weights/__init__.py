"""Sleep, pause, and updates of the weights of a running engine."""
