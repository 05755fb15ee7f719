"""Plans the runs of a study: the cells of a sweep, protocols, and the values that a search
tries.
"""
