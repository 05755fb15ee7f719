"""Engines that start one command on every host.

Each is a module with options, whose fields are flags and whose `chips` are the chips of the hosts;
`check` and `script` of a job; and a launch, a job in progress. Shared code is in `base`.
`tpu.launch` has the table of engines. They call programs of this machine, or Ray, and `lm.launch`
for exit statuses and signals; none imports JAX.
"""
