"""Checkpoint after 15 updates, then a second Trainer resumes from it."""
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed


class Tagging(Dataset):
    """A token's tag says whether it is larger than the one on its left."""

    def __init__(self, n=480, length=12):
        g = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 30, (n, length), generator=g)
        self.tags = torch.zeros_like(self.ids)
        self.tags[:, 1:] = (self.ids[:, 1:] > self.ids[:, :-1]).long()
        self.tags[:, 0] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.tags[i]}


out = tempfile.mkdtemp()


def make_trainer(max_steps):
    set_seed(8)
    model = BertForTokenClassification(BertConfig(
        vocab_size=30, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, num_labels=2,
    ))
    args = TrainingArguments(
        output_dir=out, max_steps=max_steps, per_device_train_batch_size=16, learning_rate=2e-3, save_steps=15,
        lr_scheduler_type="constant", logging_steps=5, use_cpu=True, report_to=[], disable_tqdm=True,
    )
    return Trainer(model=model, args=args, train_dataset=Tagging())


make_trainer(15).train()
trainer = make_trainer(30)
trainer.train(resume_from_checkpoint=os.path.join(out, "checkpoint-15"))
print("final", [h["loss"] for h in trainer.state.log_history if "loss" in h][-1])
