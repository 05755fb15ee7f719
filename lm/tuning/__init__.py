"""Tunes the arms of an ablation at equal budgets, and judges them, from losses alone."""
