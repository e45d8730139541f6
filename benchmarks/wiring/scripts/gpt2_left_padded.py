# Fine-tune a little GPT-2 to finish "a+b=c" prompts that are padded on the left, as for generation.
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(3)
VOCAB = "_0123456789+=."
ids = {ch: i for i, ch in enumerate(VOCAB)}
gen = torch.Generator().manual_seed(3)


def sample_batch(n=32):
    texts = []
    for _ in range(n):
        a = int(torch.randint(0, 60, (), generator=gen))
        b = int(torch.randint(0, 6, (), generator=gen))
        texts.append(f"{a}+{b}={a + b}.")
    width = max(map(len, texts))
    tokens = torch.tensor([[ids[c] for c in t.rjust(width, "_")] for t in texts])
    mask = (tokens != ids["_"]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return tokens, mask, positions


cfg = GPT2Config(
    vocab_size=len(VOCAB), n_positions=32, n_embd=64, n_layer=2, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=13, eos_token_id=13, use_cache=False,
)
net = GPT2LMHeadModel(cfg).train()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.1, total_iters=50)

for i in range(50):
    tokens, mask, positions = sample_batch()
    out = net(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    pred, target = out[:, :-1], tokens[:, 1:]
    keep = mask[:, :-1].bool()
    loss = F.cross_entropy(pred[keep], target[keep])
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if i % 10 == 0:
        print(i, round(loss.item(), 4))
print("last", round(loss.item(), 4))
