# LSTM language model, truncated backpropagation through time over contiguous streams
import textwrap

import torch
import torch.nn as nn

torch.manual_seed(99)
with open(textwrap.__file__) as f:
    corpus = f.read()
alphabet = {c: i for i, c in enumerate(sorted(set(corpus)))}
encoded = torch.tensor([alphabet[c] for c in corpus])


def batchify(stream, bsz):
    nbatch = stream.size(0) // bsz
    return stream.narrow(0, 0, nbatch * bsz).view(bsz, -1)


def repackage(state):
    return tuple(s.detach() for s in state)


class CharLSTM(nn.Module):
    def __init__(self, ntoken, nhid=96, nlayers=1):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, nhid)
        self.rnn = nn.LSTM(nhid, nhid, nlayers, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid, self.nlayers = nhid, nlayers

    def init_hidden(self, bsz):
        return torch.zeros(self.nlayers, bsz, self.nhid), torch.zeros(self.nlayers, bsz, self.nhid)

    def forward(self, tokens, hidden):
        out, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(out), hidden


bsz, bptt, clip = 16, 20, 0.25
train_data = batchify(encoded, bsz)
model = CharLSTM(len(alphabet))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
hidden = model.init_hidden(bsz)
for batch, i in enumerate(range(0, min(train_data.size(1) - 1 - bptt, 50 * bptt), bptt)):
    data, targets = train_data[:, i : i + bptt], train_data[:, i + 1 : i + 1 + bptt]
    model.zero_grad()
    hidden = repackage(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output.reshape(-1, len(alphabet)), targets.reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    if batch % 10 == 0:
        print(f"| {batch:3d} batches | loss {loss.item():5.2f} | ppl {loss.exp().item():8.2f}")
print(f"| end | loss {loss.item():5.2f}")
