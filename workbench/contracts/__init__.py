"""Contracts of a training: experiments that tell whether it is wired as its author believes.

See Also:
    `workbench.check`: Makes the experiments.
"""
