"""What can only be seen on a GPU: `python -m tests.gpu_check`, or `make gpu-check`, on a machine that has one.

Each part is a module with a function `run(check)`, and a process of its own, so that a kernel that crashes the device
takes nothing else with it. What needs a package that is not there is not run, and a line says so.
"""
