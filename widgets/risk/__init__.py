"""Parts of RiskExplorer."""
