"""Deep Q-learning on a corridor with a target network and a replay buffer."""
import collections
import copy
import random

import torch
from torch import nn

LENGTH, GAMMA = 8, 0.9
random.seed(0)
torch.manual_seed(0)


class Corridor:
    def reset(self):
        self.at, self.t = LENGTH // 2, 0
        return self.observe()

    def observe(self):
        return nn.functional.one_hot(torch.tensor(self.at), LENGTH).float()

    def step(self, action):
        self.at = min(max(self.at + (1 if action else -1), 0), LENGTH - 1)
        self.t += 1
        reached = self.at == LENGTH - 1
        return self.observe(), float(reached), reached or self.t >= 20


def q_network():
    return nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2))


online = q_network()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
buffer = collections.deque(maxlen=1000)
env, updates, episode = Corridor(), 0, 0
while updates < 60:
    state, done = env.reset(), False
    episode += 1
    while not done and updates < 60:
        explore = random.random() < max(0.1, 1 - updates / 40)
        action = random.randrange(2) if explore else int(online(state).argmax())
        following, reward, done = env.step(action)
        buffer.append((state, action, reward, following, float(reward > 0)))
        state = following
        if len(buffer) < 64:
            continue
        s, a, r, s2, terminal = zip(*random.sample(list(buffer), 32))
        s, s2 = torch.stack(s), torch.stack(s2)
        a, r, terminal = torch.tensor(a), torch.tensor(r), torch.tensor(terminal)
        with torch.no_grad():
            goal = r + GAMMA * (1 - terminal) * target(s2).max(1).values
        q = online(s).gather(1, a[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        if updates % 10 == 0:
            target.load_state_dict(online.state_dict())
        if updates % 15 == 0:
            print(f"update {updates} episode {episode} td loss {loss.item():.4f}")
