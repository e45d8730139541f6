import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn


class Copy(torch.utils.data.IterableDataset):
    """A random word, a separator, the word again."""

    def __init__(self, n, word=6, letters=10):
        self.n, self.word, self.letters = n, word, letters

    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        for _ in range(self.n):
            w = torch.randint(1, self.letters + 1, (self.word,), generator=g)
            yield torch.cat([w, torch.tensor([0]), w])


class CopyModel(L.LightningModule):
    def __init__(self, vocab=11, dim=64):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.place = nn.Embedding(16, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, vocab))
        mask = torch.full((16, 16), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        n = x.size(1)
        h = self.token(x) + self.place.weight[:n]
        return self.out(self.trunk(h, mask=self.mask[:n, :n]))

    def training_step(self, batch, _):
        logits = self(batch[:, :-1])
        return nn.functional.cross_entropy(logits[:, 6:].flatten(0, 1), batch[:, 7:].flatten())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Printer(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 20 == 19:
            print(f"batch {batch_idx + 1} loss {outputs['loss'].item() * trainer.accumulate_grad_batches:.4f}")


L.seed_everything(77, verbose=False)
trainer = L.Trainer(
    max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu", logger=False, callbacks=[Printer()],
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(CopyModel(), torch.utils.data.DataLoader(Copy(16 * 100), batch_size=16))
