"""Assessment of an architecture and a training plan before training: measurements, criteria, verdict and decisions."""
