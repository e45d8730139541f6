"""Group-relative policy gradient: the policy is rewarded for writing even digits and stopping early enough."""
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(2)
VOCAB, EOS, PAD, BOS = 13, 10, 11, 12
GROUP, PROMPTS, MAX_NEW = 8, 4, 10

policy = LlamaForCausalLM(LlamaConfig(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, use_cache=False,
))
policy.train()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)


def policy_logits(ids):
    logits = policy(input_ids=ids).logits
    forbidden = torch.zeros(VOCAB, dtype=torch.bool)
    forbidden[[PAD, BOS]] = True
    return logits.masked_fill(forbidden, -1e9)


@torch.no_grad()
def rollout(prompts):
    ids = prompts
    alive = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(MAX_NEW):
        token = torch.multinomial(policy_logits(ids)[:, -1].softmax(-1), 1).squeeze(1)
        token = torch.where(alive, token, PAD)
        ids = torch.cat([ids, token[:, None]], 1)
        alive &= token != EOS
    return ids


def reward(completions):
    digits = completions < 10
    even = digits & (completions % 2 == 0)
    return even.sum(1).float() - (digits & ~even).sum(1).float()


def token_logprobs(ids):
    logp = F.log_softmax(policy_logits(ids)[:, :-1], dim=-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


for step in range(30):
    start = torch.randint(0, 10, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
    prompts = torch.cat([torch.full_like(start, BOS), start], 1)
    sequences = rollout(prompts)
    completions = sequences[:, prompts.shape[1] :]
    r = reward(completions)
    grouped = r.view(PROMPTS, GROUP)
    advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)

    old = token_logprobs(sequences).detach()[:, prompts.shape[1] - 1 :]
    mask = (completions != PAD).float()
    new = token_logprobs(sequences)[:, prompts.shape[1] - 1 :]
    ratio = (new - old).exp()
    objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = -(objective * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:2d} reward {r.mean().item():6.2f} loss {loss.item():8.4f}")
print(f"final reward {r.mean().item():.2f} loss {loss.item():.4f}")
