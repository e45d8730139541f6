import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = self.pool(torch.relu(self.bn2(self.conv2(x))))
        x = self.dropout(torch.flatten(x, 1))
        return self.fc(x)


def train(model, loader, optimizer, scheduler, criterion):
    model.train()
    running = 0.0
    for images, targets in loader:
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()
    return running / len(loader)


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, targets in loader:
            correct += (model(images).argmax(dim=1) == targets).sum().item()
    return correct / len(loader.dataset)


digits = load_digits()
X = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
Y = torch.tensor(digits.target)
train_set, test_set = random_split(TensorDataset(X, Y), [1440, len(X) - 1440])
train_loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, batch_size=256)

EPOCHS = 2
model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=len(train_loader))
for epoch in range(1, EPOCHS + 1):
    loss = train(model, train_loader, optimizer, scheduler, criterion)
    print(f"Epoch {epoch}: loss {loss:.4f} test accuracy {test(model, test_loader):.3f}")
