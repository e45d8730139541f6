"""Parts of ArchitectureComparison: one module for each view, and the data of a view."""
