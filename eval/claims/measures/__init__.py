"""Measures: quantities of claims that need no sweep, computed in seconds to minutes on a CPU."""
