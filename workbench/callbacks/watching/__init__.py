"""Watching a run: recorder, probes and alarms in one line, and what they show at one glance."""
