import tempfile

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
text = open(tempfile.__file__).read()
letters = sorted(set(text))
encode = {c: i for i, c in enumerate(letters)}
block = 48
chunks = [[encode[c] for c in text[i : i + block]] for i in range(0, len(text) - block, block)]
dataset = Dataset.from_dict({"input_ids": chunks, "labels": chunks})

model = GPT2LMHeadModel(GPT2Config(
    vocab_size=len(letters), n_positions=block, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
))
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_steps=30,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    weight_decay=0.01,
    logging_steps=10,
    save_strategy="no",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
result = trainer.train()
print(f"train loss {result.training_loss:.4f}")
