from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

set_seed(123)
gen = torch.Generator().manual_seed(123)


def build(n):
    data = {"source": [], "target": []}
    for _ in range(n):
        length = int(torch.randint(3, 9, (), generator=gen))
        x = torch.randint(2, 22, (length,), generator=gen).tolist()
        data["source"].append(x + [1])
        data["target"].append([t + 20 for t in x] + [1])
    return Dataset.from_dict(data)


def collate(rows):
    n_source = max(len(r["source"]) for r in rows)
    n_target = max(len(r["target"]) for r in rows)
    source = torch.zeros(len(rows), n_source, dtype=torch.long)
    target = torch.full((len(rows), n_target), -100)
    for i, r in enumerate(rows):
        source[i, : len(r["source"])] = torch.tensor(r["source"])
        target[i, : len(r["target"])] = torch.tensor(r["target"])
    return dict(input_ids=source, attention_mask=(source != 0).long(), labels=target)


model = T5ForConditionalGeneration(T5Config(
    vocab_size=42, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.05,
    feed_forward_proj="gated-gelu", decoder_start_token_id=0,
))
with TemporaryDirectory() as folder:
    args = Seq2SeqTrainingArguments(
        folder, per_device_train_batch_size=16, per_device_eval_batch_size=32, max_steps=45, learning_rate=6e-3,
        lr_scheduler_type="constant_with_warmup", warmup_steps=5, remove_unused_columns=False, eval_strategy="steps",
        eval_steps=45, logging_steps=9, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=build(800), eval_dataset=build(64), data_collator=collate)
    trainer.train()
