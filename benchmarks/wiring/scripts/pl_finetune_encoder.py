# Fine-tune a saved encoder: load, freeze the embeddings, add a head, train with Lightning.
import tempfile

import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, ElectraConfig, ElectraModel


def pretrained_folder():
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    config = ElectraConfig(
        vocab_size=50, embedding_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=24,
    )
    ElectraModel(config).save_pretrained(folder)
    return folder


def toy_sentences(n):
    ids = torch.randint(2, 50, (n, 16))
    lengths = torch.randint(6, 17, (n,))
    mask = (torch.arange(16) < lengths[:, None]).long()
    ids = ids * mask
    label = torch.rand(n) < 0.5
    ids[label, 2] = 49
    return TensorDataset(ids, mask, label.float())


class SentimentModule(L.LightningModule):
    def __init__(self, path):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(path)
        self.encoder.embeddings.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 1)
        self.losses = []

    def forward(self, ids, mask):
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        return self.head(self.dropout(pooled)).squeeze(-1)

    def on_train_start(self):
        self.train()

    def training_step(self, batch, batch_idx):
        ids, mask, label = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(ids, mask), label)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        trainable = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.AdamW(trainable, lr=3e-3)


path = pretrained_folder()
L.seed_everything(12, verbose=False)
module = SentimentModule(path)
trainer = L.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(module, DataLoader(toy_sentences(512), batch_size=32, shuffle=True))
print(f"loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f}")
