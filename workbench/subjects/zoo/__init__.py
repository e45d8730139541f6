"""Reference architectures, small enough to read and to train on a laptop."""

from workbench.subjects.zoo.transformer import NORMS, Transformer, TransformerConfig, transformer

__all__ = ["NORMS", "Transformer", "TransformerConfig", "transformer"]
