"""Parts of `widgets.AssessmentReport`."""
