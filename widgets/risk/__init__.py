"""The parts of RiskExplorer."""
