"""Assessment of an architecture and a plan before compute is committed: measurements, criteria, verdict, decisions."""
