"""The parts of `workbench.widgets.live_training`: what is drawn, what trains, and what the page is told."""
