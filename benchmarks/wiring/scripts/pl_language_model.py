import gettext
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

warnings.filterwarnings("ignore")


class TextDataset(Dataset):
    def __init__(self, path, length):
        data = open(path, encoding="utf-8").read()
        self.vocab = {c: i for i, c in enumerate(sorted(set(data)))}
        self.ids = torch.tensor([self.vocab[c] for c in data])
        self.length = length

    def __len__(self):
        return len(self.ids) // self.length

    def __getitem__(self, i):
        return self.ids[i * self.length : (i + 1) * self.length]


class LitGPT(pl.LightningModule):
    def __init__(self, vocab_size, total_steps, lr=4e-3):
        super().__init__()
        config = GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
        self.gpt = GPT2LMHeadModel(config)
        self.total_steps = total_steps
        self.lr = lr

    def training_step(self, batch, _):
        loss = self.gpt(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.gpt.parameters(), lr=self.lr, weight_decay=0.01)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 4, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


pl.seed_everything(0, verbose=False)
dataset = TextDataset(gettext.__file__, 40)
module = LitGPT(len(dataset.vocab), total_steps=40)
module.gpt.train()
trainer = pl.Trainer(
    max_steps=40, gradient_clip_val=1.0, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True))
print("final loss", trainer.callback_metrics["loss"].item())
