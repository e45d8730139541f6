"""Parts of `workbench.widgets.live_training`: drawing, training, and messages to the page."""
