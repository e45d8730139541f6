"""The parts of `workbench.widgets.live_training`: drawing, training, and the messages to the page."""
