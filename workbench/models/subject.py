"""Subjects: models under study with their name, source and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError, SnapshotError
from workbench.models.streaming import StreamedWeights
from workbench.option_kinds import PositiveInt


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: 256 tokens, none of them special, as in `workbench.tasks.text_bytes`.

    Attributes:
        model_max_length: Maximum number of tokens of a sequence; None for no limit.

    Example:
        >>> import workbench as wb
        >>> wb.ByteTokenizer()(["Hi"])
        {'input_ids': [[72, 105]]}
        >>> wb.ByteTokenizer().decode([72, 105])
        'Hi'

    See Also:
        `workbench.Subject`: Uses a tokenizer.
        `workbench.tasks.text_bytes`: Trains on the bytes of texts.
    """

    #: Name of the tokenizer in the config.json of a folder.
    name = "bytes"
    pad_token_id = 0
    eos_token_id = None

    def __init__(self, model_max_length: int | None = None) -> None:
        self.model_max_length = model_max_length

    def __repr__(self) -> str:
        return f"ByteTokenizer({self.model_max_length or ''})"

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        """Return the token ids of each text under ``input_ids``; there are no special tokens to add."""
        texts = [texts] if isinstance(texts, str) else texts
        return {"input_ids": [list(text.encode())[: self.model_max_length] for text in texts]}

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        r"""Return the text of one sequence; incomplete characters become the replacement character (U+FFFD)."""
        return bytes(int(i) for i in ids).decode(errors="replace")


@dataclass(frozen=True)
class Subject:
    """A model under study.

    Attributes:
        model: Module, in eval mode as opened; its mode is not changed afterwards.
        name: Short name for titles and stores.
        source: Origin of the model, for provenance.
        folder: Folder with tokenizer files, or GGUF file with a tokenizer; None if there is none.
        own_tokenizer: Tokenizer that is called like those of Hugging Face, such as `ByteTokenizer`; None to use the one
            in the folder.
        streamed: Weights that stay on disk and fill each block while it runs; None if they are in memory.
        unloaded: Clause that describes tensors that were not loaded and the values in their place; empty if all were
            loaded.
        trusts_code: Whether the tokenizer may run Python code of the folder.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_heads=2)
        >>> subject = wb.Subject(model, name="tiny", source="created here", own_tokenizer=wb.ByteTokenizer())
        >>> subject.tokenize(["Hi"])["input_ids"].tolist()
        [[72, 105]]

    See Also:
        `workbench.open_checkpoint`: Opens a subject.
        `workbench.profile`: Computes the spectra of a subject.
    """

    model: nn.Module
    name: str
    source: str
    folder: Path | None = None
    unloaded: str = ""
    own_tokenizer: Any = None
    streamed: StreamedWeights | None = None
    trusts_code: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        """The subject's own tokenizer, or the Hugging Face tokenizer next to the parameters.

        Raises:
            CheckpointError: If there is none.
        """
        if self.own_tokenizer is not None:
            return self.own_tokenizer
        if self.folder is not None and self.folder.suffix == ".gguf" and self.folder.is_file():
            from workbench.models.lazy_state import gguf_tokenizer

            return gguf_tokenizer(self.folder)
        if self.folder is not None and (self.folder / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            from workbench.models.pretrained import errors_in_one_sentence

            # The default, None, asks on standard input whether to run code of the folder.
            with errors_in_one_sentence(str(self.folder)):
                return AutoTokenizer.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=self.trusts_code
                )
        raise CheckpointError(
            f"{self.name} has no tokenizer; pass token ids instead of text, or a task of wb.tasks, or, if its tokens "
            "are bytes, open it as wb.Subject(model, name='mine', source='here', own_tokenizer=wb.ByteTokenizer())."
        )

    def tokenize(self, texts: str | Sequence[str], *, max_length: PositiveInt = 64) -> dict[str, Tensor]:
        """Convert texts to token ids, padded on the right to equal length.

        Args:
            texts: One text or several.
            max_length: Maximum number of tokens per text; longer ones are truncated.

        Returns:
            ``input_ids`` and ``attention_mask``, int64, shape (text, token).

        Raises:
            CheckpointError: If the subject has no tokenizer.
            SnapshotError: If no text has a token.
        """
        tokenizer = self.tokenizer
        texts = [texts] if isinstance(texts, str) else list(texts)
        rows = [row[:max_length] for row in tokenizer(texts, add_special_tokens=True)["input_ids"]]
        if not any(rows):
            raise SnapshotError("The texts are empty; pass at least one that is not.")
        filler = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        length = max(len(row) for row in rows)
        ids = torch.tensor([row + [filler] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}
