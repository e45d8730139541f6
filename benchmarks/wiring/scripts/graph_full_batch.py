# Graph convolution, all nodes in every step (Kipf & Welling)
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)
n, groups = 180, 3
label = torch.arange(n) % groups
edge_probability = torch.where(label[:, None] == label[None, :], 0.12, 0.02)
upper = (torch.rand(n, n) < edge_probability).triu(1)
adjacency = (upper | upper.T).float() + torch.eye(n)
degree = adjacency.sum(1)
A = adjacency / (degree[:, None] * degree[None, :]).sqrt()
X = torch.randn(n, 16) + 0.5 * F.one_hot(label, 16)
train_nodes = torch.randperm(n)[:60]
test_nodes = torch.tensor([i for i in range(n) if i not in set(train_nodes.tolist())])


class GCN(nn.Module):
    def __init__(self, n_in, n_hidden, n_out, p=0.3):
        super().__init__()
        self.w1 = nn.Linear(n_in, n_hidden)
        self.w2 = nn.Linear(n_hidden, n_out)
        self.p = p

    def forward(self, a, x):
        h = F.relu(a @ self.w1(F.dropout(x, self.p, self.training)))
        return a @ self.w2(F.dropout(h, self.p, self.training))


gcn = GCN(16, 32, groups)
opt = torch.optim.Adam([
    {"params": gcn.w1.parameters(), "weight_decay": 5e-4},
    {"params": gcn.w2.parameters(), "weight_decay": 0.0},
], lr=0.02)
for epoch in range(50):
    gcn.train()
    opt.zero_grad()
    loss = F.cross_entropy(gcn(A, X)[train_nodes], label[train_nodes])
    loss.backward()
    opt.step()
    if epoch % 10 == 9:
        gcn.eval()
        with torch.no_grad():
            accuracy = (gcn(A, X).argmax(1) == label)[test_nodes].float().mean().item()
        print(f"epoch {epoch + 1} loss {loss.item():.4f} test {accuracy:.3f}")
