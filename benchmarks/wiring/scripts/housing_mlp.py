# Small tabular regression; the whole set is seen once an epoch.
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
features, target = load_diabetes(return_X_y=True)
features = (features - features.mean(0)) / features.std(0)
target = (target - target.mean()) / target.std()
X = torch.from_numpy(features.astype(np.float32))
y = torch.from_numpy(target.astype(np.float32)).unsqueeze(1)

train = DataLoader(TensorDataset(X[:352], y[:352]), batch_size=88, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
loss_fn = nn.MSELoss()
opt = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2)

for epoch in range(12):
    model.train()
    total = 0.0
    for xb, yb in train:
        pred = model(xb)
        loss = loss_fn(pred, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(xb)
    model.eval()
    with torch.no_grad():
        val = loss_fn(model(X[352:]), y[352:]).item()
    plateau.step(val)
    if epoch % 3 == 2:
        print(f"epoch {epoch + 1:2d} train mse {total / 352:.4f} validation mse {val:.4f}")
