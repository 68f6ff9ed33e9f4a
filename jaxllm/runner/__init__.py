"""Run the compiled programs: pack a plan, choose a program, keep the device's state, read results."""
