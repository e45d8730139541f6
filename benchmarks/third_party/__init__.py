"""Third-party models, inputs and checkpoints, each with an independent check of the measurements."""
