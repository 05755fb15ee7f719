"""The claims board: claims from papers, and verdicts of runs that anyone can repeat."""
