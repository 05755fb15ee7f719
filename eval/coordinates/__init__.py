"""Whether activations and their changes keep their size as a model grows."""
