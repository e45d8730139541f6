"""Watching a run: recorder, probes and alarms in one line, and a display of the status of the run."""
