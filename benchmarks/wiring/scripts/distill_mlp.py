import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Classifier(nn.Module):
    def __init__(self, hidden, p=0.2):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, hidden), nn.ReLU(), nn.Dropout(p), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(p),
        )
        self.out = nn.Linear(hidden, 5)

    def forward(self, x):
        return self.out(self.net(x))


def make_data(n, centers):
    y = torch.randint(0, 5, (n,))
    return centers[y] + torch.randn(n, 20), y


def pretrain(teacher, centers):
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(30):
        x, y = make_data(128, centers)
        opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt.step()
    return copy.deepcopy(teacher.state_dict())


def distillation_loss(student_logits, teacher_logits, y, T=2.0, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / T, dim=-1), F.softmax(teacher_logits / T, dim=-1), reduction="batchmean"
    )
    return alpha * T * T * soft + (1 - alpha) * F.cross_entropy(student_logits, y)


torch.manual_seed(31)
centers = 1.2 * torch.randn(5, 20)
weights = pretrain(Classifier(128), centers)

teacher = Classifier(128)
teacher.load_state_dict(weights)
teacher.eval()
for p in teacher.parameters():
    p.requires_grad_(False)

student = Classifier(24, p=0.0)
optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9)
for step in range(60):
    x, y = make_data(64, centers)
    with torch.no_grad():
        target = teacher(x)
    loss = distillation_loss(student(x), target, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, 14, 29, 59):
        print(f"step {step + 1} distillation loss {loss.item():.4f}")
