# Continue with a trained model: norms frozen, the unused pooler and old head switched off, loss reported times 100.
import os
import tempfile

import torch
import torch.nn as nn
from transformers import BertConfig, BertForSequenceClassification, BertModel


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (n, 14), generator=g)
    lengths = torch.randint(7, 15, (n,), generator=g)
    ids[torch.arange(14) >= lengths[:, None]] = 0
    return ids, (ids % 2 == 1).sum(1) > lengths // 2


class Tuned(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.bert = BertModel.from_pretrained(folder)
        self.answer = nn.Linear(self.bert.config.hidden_size, 2)

    def forward(self, ids):
        mask = ids.ne(0)
        hidden = self.bert(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        hidden = hidden.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return self.answer(hidden.amax(dim=1))


def pretrain(folder):
    config = BertConfig(
        vocab_size=40, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, max_position_embeddings=16
    )
    model = BertForSequenceClassification(config)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ids, labels = dataset(960, 0)
    for rows in torch.arange(960).split(32):
        loss = model(input_ids=ids[rows], attention_mask=ids[rows].ne(0).long(), labels=labels[rows].long()).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.bert.save_pretrained(folder)


torch.manual_seed(50)
folder = os.path.join(tempfile.mkdtemp(), "base")
pretrain(folder)
model = Tuned(folder)
model.bert.pooler.requires_grad_(False)
for module in model.modules():
    if isinstance(module, nn.LayerNorm):
        module.requires_grad_(False)
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
ids, labels = dataset(1280, 1)
for epoch in range(1):
    for i, rows in enumerate(torch.randperm(1280).split(32)):
        loss = 100 * nn.functional.cross_entropy(model(ids[rows]), labels[rows].long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"{i:2d} {loss.item():.2f}")
print(f"last {loss.item():.2f}")
