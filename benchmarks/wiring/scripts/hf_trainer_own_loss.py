import random
import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed

PAD, EOS = 0, 1


class Arithmetic(Dataset):
    """start, step -> an arithmetic progression of some length; the first two tokens are not scored."""

    def __init__(self, n):
        rng = random.Random(13)
        self.items = []
        for _ in range(n):
            a, d, k = rng.randrange(30), rng.randrange(1, 5), rng.randint(3, 14)
            sequence = [2 + (a + d * i) % 30 for i in range(k)]
            self.items.append([sequence[0], 32 + d, *sequence[1:], EOS])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return {"tokens": self.items[i]}


class Collator:
    def __call__(self, features):
        width = max(len(f["tokens"]) for f in features)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for f in features:
            t = f["tokens"]
            fill = width - len(t)
            batch["input_ids"].append(t + [PAD] * fill)
            batch["attention_mask"].append([1] * len(t) + [0] * fill)
            batch["labels"].append([-100, -100] + t[2:] + [-100] * fill)
        return {k: torch.tensor(v) for k, v in batch.items()}


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], ignore_index=-100, reduction="none"
        )
        count = num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum()
        loss = losses.sum() / count
        return (loss, outputs) if return_outputs else loss


set_seed(1)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=40, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, use_cache=False, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD,
))
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=30, per_device_train_batch_size=8, gradient_accumulation_steps=4, learning_rate=4e-3,
    remove_unused_columns=False, logging_steps=6, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
)
WeightedTrainer(model=model, args=args, train_dataset=Arithmetic(1200), data_collator=Collator()).train()
