import configparser
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(2)
folder = tempfile.mkdtemp()
config = GPTNeoXConfig(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=64, hidden_dropout=0.1, attention_dropout=0.1, use_cache=False,
)
data = torch.tensor(list(open(configparser.__file__, "rb").read())).clamp(max=127)
rows = data[: len(data) // 32 * 32].view(-1, 32)
records = [{"input_ids": r, "labels": r} for r in rows]


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"{state.global_step:3d} {float(logs['loss']):.4f} {float(logs['learning_rate']):.2e}")


def run(model, steps, lr):
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=lr, logging_steps=5,
        save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=records, callbacks=[Report()])
    trainer.train()
    return trainer


print("pretraining")
run(AutoModelForCausalLM.from_config(config), 30, 5e-3).save_model(folder)
print("fine-tuning the upper half")
model = AutoModelForCausalLM.from_pretrained(folder)
model.gpt_neox.embed_in.requires_grad_(False)
model.gpt_neox.layers[0].requires_grad_(False)
run(model, 30, 2e-4)
