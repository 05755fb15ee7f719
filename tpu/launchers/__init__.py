"""Engines that start one command on every host. Each is a module with `Options`, whose fields are
flags and whose `chips` are those of the hosts, `check` and `script` of a job, and `Launch`, a job
under way; what they share is in `base`.

`tpu.launch` calls them. They call programs of this machine, or Ray, and `lm.launch` for exit
statuses and signals; none imports JAX.
"""
