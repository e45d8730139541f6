"""The parts of ArchitectureComparison: one file a view, and what a view looks at."""
