"""Scaling laws and laws of loss curves, fitted to runs or to a table of numbers."""
