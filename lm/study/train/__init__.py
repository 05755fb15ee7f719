"""Trains the runs of a study: groups of one program, waves, hosts, engines, and sweep.json."""
