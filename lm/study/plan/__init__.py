"""Plans the runs of a study: cells of a sweep, protocols, and the values that a search tries."""
