"""The parts of ArchitectureComparison: one file for each view, and the data of a view."""
