"""Training: the plan of a run, its loop, its checkpoints."""
