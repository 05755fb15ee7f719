"""Claims of papers: what each says, which runs show it, and what counts as reproduced."""
