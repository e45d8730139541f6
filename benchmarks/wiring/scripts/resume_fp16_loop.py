"""A run in two parts: weights, optimizer, scaler, schedule, sampler and random states all travel in one file."""
import pathlib
import tempfile

import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer


class Run:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(30, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=2e-3, weight_decay=0.01)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=60)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
        self.rng = torch.Generator().manual_seed(seed)
        self.step = 0
        x, y = load_breast_cancer(return_X_y=True)
        self.x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        self.y = torch.tensor(y, dtype=torch.float32)

    def parts(self):
        return {"net": self.net, "opt": self.opt, "sched": self.sched, "scaler": self.scaler}

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state.update(step=self.step, rng=self.rng.get_state(), torch_rng=torch.get_rng_state())
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        self.rng.set_state(state["rng"])
        torch.set_rng_state(state["torch_rng"])

    def train(self, until):
        while self.step < until:
            rows = torch.randint(0, len(self.x), (48,), generator=self.rng)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = self.net(self.x[rows]).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), self.y[rows])
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.sched.step()
            self.step += 1
            if self.step % 10 == 0:
                print(f"{self.step} loss {loss.item():.4f} scale {self.scaler.get_scale():.0f}")


if __name__ == "__main__":
    file = pathlib.Path(tempfile.mkdtemp()) / "state.pt"
    run = Run(seed=0)
    run.train(30)
    run.save(file)
    run = Run(seed=1)
    run.load(file)
    run.train(60)
