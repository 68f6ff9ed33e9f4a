"""The checks that need a GPU: `python -m tests.gpu_check`, or `make gpu-check`.

Each part is a module with a function `run(check)` and runs in a separate process, so that a kernel that crashes the
device ends only its part. A part that needs a missing package is reported as not run.
"""
