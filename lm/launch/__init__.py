"""Start of a program, the processes of a job (how they find, watch and agree with each other), and
its end. Programs, lm.record and the rooms above may call this room; it calls only lm.config and
lm.storage. Modules that run before JAX is imported use the standard library only, and state it.
"""
