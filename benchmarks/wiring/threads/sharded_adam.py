# torchrun --nproc-per-node 2: each rank updates its shard of every weight, and the shards are gathered
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


class ShardedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    def shard(self, flat):
        size = -(-len(flat) // WORLD)
        return slice(RANK * size, min((RANK + 1) * size, len(flat)))

    def gather(self, flat, mine):
        whole = torch.zeros_like(flat)
        whole[mine] = flat[mine]
        dist.all_reduce(whole)
        flat.copy_(whole)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                dist.all_reduce(p.grad)
                flat, mine = p.view(-1), self.shard(p.view(-1))
                g = p.grad.view(-1)[mine] / WORLD
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(g), v=torch.zeros_like(g))
                state["step"] += 1
                state["m"].lerp_(g, 1 - b1)
                state["v"].lerp_(g * g, 1 - b2)
                m, v = state["m"] / (1 - b1 ** state["step"]), state["v"] / (1 - b2 ** state["step"])
                flat[mine] -= group["lr"] * m / (v.sqrt() + group["eps"])
                self.gather(flat, mine)


torch.manual_seed(12)
centers = torch.randn(5, 10)
net = nn.Sequential(nn.Linear(10, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 5))
opt = ShardedAdam(net.parameters(), lr=3e-3)
torch.manual_seed(900 + RANK)
for step in range(50):
    y = torch.randint(0, 5, (32,))
    x = centers[y] + 0.8 * torch.randn(32, 10)
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if RANK == 0 and step % 10 == 9:
        print(step + 1, round(loss.item(), 4), flush=True)
dist.destroy_process_group()
