"""Compiled programs and what they run on: batches, the device's state, memory, when what is compiled.

Knows plans and arrays. Knows no request, no text and no reader.
"""
