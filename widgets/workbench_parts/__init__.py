"""Parts of `workbench.widgets.Workbench`: sources, views, the calls that compute what is shown, and their code."""
