# BiLSTM tagger: opening and closing brackets; padding has the tag -1
import random

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

rng = random.Random(30)
accelerator = Accelerator(cpu=True)
torch.manual_seed(30)


def sentence():
    words, tags, depth = [], [], 0
    for _ in range(rng.randint(6, 18)):
        w = rng.choice([1, 2, 3, 4, 5])
        if w == 1:
            depth += 1
        elif w == 2:
            depth = max(0, depth - 1)
        words.append(w)
        tags.append(min(depth, 3))
    return torch.tensor(words), torch.tensor(tags)


def collate(batch):
    words, tags = zip(*batch)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=-1), lengths


class Tagger(nn.Module):
    def __init__(self, dim=32, hidden=48):
        super().__init__()
        self.embedding = nn.Embedding(6, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.projection = nn.Linear(2 * hidden, 4)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.size(1))
        return self.projection(states)


criterion = nn.CrossEntropyLoss(ignore_index=-1)
tagger = Tagger()
optimizer = torch.optim.NAdam(tagger.parameters(), lr=5e-3)
data = DataLoader([sentence() for _ in range(800)], batch_size=32, shuffle=True, collate_fn=collate)
tagger, optimizer, data = accelerator.prepare(tagger, optimizer, data)
for epoch in range(2):
    tagger.train()
    for words, tags, lengths in data:
        scores = tagger(words, lengths)
        loss = criterion(scores.view(-1, 4), tags.view(-1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(tagger.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
