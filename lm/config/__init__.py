"""Configs: fields with their types and tables, and the Recipe that a ConfigDict is resolved into.

Every room of lm/ may call it; it calls no other.
"""
