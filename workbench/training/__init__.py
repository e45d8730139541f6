"""Training: plan, loop and checkpoints of a run, and callbacks."""
