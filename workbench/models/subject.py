"""A model under study with its name, source and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Subject:
    """A model under study.

    Attributes:
        model: The module, in eval mode as opened; its mode is left alone afterwards.
        name: Short name for titles and stores.
        source: Where it came from, for provenance.
        folder: Folder with tokenizer files, where there is one.
        unloaded: One clause on what of the checkpoint was not loaded and what the model has instead; empty if nothing.
    """

    model: nn.Module
    name: str
    source: str
    folder: Path | None = None
    unloaded: str = ""

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer that lies beside the weights.

        Raises:
            CheckpointError: If there is none.
        """
        if self.folder is not None and (self.folder / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        raise CheckpointError(f"{self.name} comes without a tokenizer; pass token ids instead of text.")

    def tokenize(self, texts: str | Sequence[str], *, max_length: int = 64) -> dict[str, Tensor]:
        """Token ids of texts, padded on the right to one length and at most ``max_length`` long.

        Returns:
            ``input_ids`` and ``attention_mask``, int64, shape (text, token).
        """
        tokenizer = self.tokenizer
        texts = [texts] if isinstance(texts, str) else list(texts)
        rows = [row[:max_length] for row in tokenizer(texts, add_special_tokens=True)["input_ids"]]
        filler = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        length = max(len(row) for row in rows)
        ids = torch.tensor([row + [filler] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}
