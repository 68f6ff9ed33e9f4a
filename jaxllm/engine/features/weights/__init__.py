"""Sleep, pause, and updates of weights."""
