"""Which language is it? Two made-up languages with different syllables; DistilBERT from scratch."""
import random
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

PAD = 0


class Sentences(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            label = rng.randrange(3)
            common = range(1 + 8 * label, 13 + 8 * label)
            self.rows.append(([rng.choice(common) for _ in range(rng.randint(4, 16))], label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, label = self.rows[i]
        return {"input_ids": ids, "label": label}


def collate(features):
    width = max(len(f["input_ids"]) for f in features)
    ids = torch.tensor([f["input_ids"] + [PAD] * (width - len(f["input_ids"])) for f in features])
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([f["label"] for f in features]),
    }


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main():
    set_seed(42)
    config = DistilBertConfig(vocab_size=40, dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=32, num_labels=3)
    model = DistilBertForSequenceClassification(config)
    training_args = TrainingArguments(
        tempfile.mkdtemp(), learning_rate=2e-3, per_device_train_batch_size=16, num_train_epochs=2, eval_strategy="epoch",
        logging_strategy="epoch", save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(
        model, training_args, train_dataset=Sentences(320, 0), eval_dataset=Sentences(100, 1), data_collator=collate,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
