"""The language-model experiment: from a config to trained runs.

Each of its rooms calls only the rooms before it: config and storage; launch, data and model;
training; devices and record; inference; run; study. eval/, tpu/ and train.py call them.
"""
