# ViT on sklearn digits with label smoothing and the Trainer's own collator
import tempfile

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed


class Digits(Dataset):
    def __init__(self):
        bunch = load_digits()
        self.pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.targets = bunch.target.tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": self.targets[index]}


set_seed(99)
everything = Digits()
train, test = Subset(everything, range(1500)), Subset(everything, range(1500, 1797))
vit = ViTForImageClassification(ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=96, num_labels=10, hidden_dropout_prob=0.0,
))
training_args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    label_smoothing_factor=0.1,
    max_steps=50,
    per_device_train_batch_size=32,
    learning_rate=3e-3,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=25,
    save_strategy="no",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model=vit, args=training_args, train_dataset=train, eval_dataset=test,
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)
trainer.train()
