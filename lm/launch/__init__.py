"""Start of a program, the processes of a job (how they find, watch and agree with each other), and
its end. Programs, lm.record and the rooms above may call this room; it calls lm.config and
lm.storage alone. What runs before JAX is imported takes the standard library alone, and says so.
"""
