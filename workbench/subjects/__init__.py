"""What is looked at: checkpoints, their anatomy, and the capture of their residual stream."""
