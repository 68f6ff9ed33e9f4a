"""A recording of every call of the scheduler, written beside a running engine, and the reading of it.

Knows the scheduler and its state. Knows no model and no device.
"""
