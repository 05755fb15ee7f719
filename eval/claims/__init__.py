"""The board of claims: statements of papers, and the verdicts of runs that anyone can repeat."""
