"""Models and inputs that are not the workbench's own, each with an independent check of what is measured."""
