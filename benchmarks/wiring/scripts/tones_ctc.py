"""Read sequences of tones with a recurrent network and CTC."""
import math
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

SYMBOLS, FRAME, FEATURES = 5, 6, 12
random.seed(61)
torch.manual_seed(61)


def utterance():
    symbols = [random.randrange(1, SYMBOLS + 1) for _ in range(random.randint(2, 5))]
    frames = []
    for s in symbols:
        for t in range(random.randint(4, 8)):
            frames.append([math.sin(0.4 * s * (t + f)) for f in range(FEATURES)])
        frames += [[0.0] * FEATURES] * 2
    return torch.tensor(frames) + 0.1 * torch.randn(len(frames), FEATURES), torch.tensor(symbols)


def batch(n):
    sounds, texts = zip(*[utterance() for _ in range(n)])
    sound_lengths = torch.tensor([len(s) for s in sounds])
    text_lengths = torch.tensor([len(t) for t in texts])
    return pad_sequence(sounds, batch_first=True), torch.cat(texts), sound_lengths, text_lengths


class Recognizer(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.inp = nn.Linear(FEATURES, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, SYMBOLS + 1)

    def forward(self, sound):
        h, _ = self.rnn(torch.relu(self.norm(self.inp(sound))))
        return self.out(h).log_softmax(-1)


model = Recognizer()
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5)
for step in range(50):
    sound, text, sound_lengths, text_lengths = batch(16)
    log_probs = model(sound).transpose(0, 1)
    loss = ctc(log_probs, text, sound_lengths, text_lengths)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    warmup.step()
    if step % 10 == 9:
        print(f"{step + 1}: ctc {loss.item():.4f}")
