"""Fault drills: the real session over doubles of everything around it, broken on purpose, thousands of times, repeatably.

case     a tiny model, cut in a few ways; what every byte must be, in plain numpy
clock    virtual time and one-thread-at-a-time execution, so that a run is a function of its seed
engine   an engine that serves tensors derived from its live parameters
trainer  a trainer rank that goes on stepping the moment it is released
network  what lies between controller, ranks, engines and workers: messages, processes, controllers; where faults strike
faults   the catalogue: what can go wrong
job      one job, and what must hold after whatever happened
drill    runs and their summary
"""
