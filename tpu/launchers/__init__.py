"""Engines that start one command on every host.

Each engine is a module with a dataclass of options, the functions `check` and `script`, and a
launch class for the job in progress. The fields of the options are flags; `chips` gives the chips
of the hosts. Shared code is in `base`. `tpu.launch` has the table of engines. Engines call programs
of this machine, or Ray, and take exit statuses and signals from `lm.launch`; none imports JAX.
"""
