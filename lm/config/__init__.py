"""Configs: their fields, types and tables, and the Recipe that a ConfigDict resolves to.

Every room of lm/ may call this one; it calls no other.
"""
