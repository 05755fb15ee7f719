"""Measures: what claims say that takes no sweep, computed in seconds to minutes on a CPU."""
