from .architecture_comparison import ArchitectureComparison as ArchitectureComparison
from .assessment_report import AssessmentReport as AssessmentReport
from .figure import show as show
from .live_training import LiveTraining as LiveTraining
from .risk_explorer import RiskExplorer as RiskExplorer
from .spectrum_explorer import SpectrumExplorer as SpectrumExplorer
from .timeline import Timeline as Timeline
