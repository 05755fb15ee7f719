"""The language-model experiment: from a config to trained runs.

Its rooms, each of which calls those before it alone: config and storage; launch, data and model;
training; devices and record; inference; run; sweep. eval/, tpu/ and train.py call them.
"""
