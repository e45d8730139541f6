"""Loops typed as in the documentation of their libraries, with one line more: the losses are the same to the bit."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.callbacks.test_mirrors import wandb  # noqa: F401
from tests.callbacks.wandb_files import runs_in
from workbench.contracts.results import Status

pytestmark = [pytest.mark.slow, pytest.mark.framework, pytest.mark.usefixtures("quiet")]

N_TOKENS, LENGTH, N_STEPS = 24, 12, 16


def texts(n=64):
    """Return texts in which each token but the first two depends on the one before."""
    rows = np.random.default_rng(0).integers(0, N_TOKENS, (n, LENGTH))
    rows[:, 2:] = (rows[:, 1:-1] + 1) % N_TOKENS
    return torch.as_tensor(rows)


def small_gpt2():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=N_TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def of_transformers(watch, folder, *, clears=True, report_to="none"):
    from transformers import Trainer, TrainingArguments

    model = small_gpt2()
    if not clears:
        model.zero_grad = lambda set_to_none=True: None
    training_args = TrainingArguments(
        output_dir=folder / "out",
        learning_rate=2e-3,
        max_steps=N_STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to=report_to,
    )
    trainer = Trainer(
        model=model, args=training_args, train_dataset=[{"input_ids": row, "labels": row} for row in texts()]
    )
    watched = None if watch is None else watch(trainer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], watched


def of_lightning(watch, folder, *, clears=True):
    import lightning as L  # noqa: N812
    from torch.utils.data import DataLoader

    losses = []

    class LitGPT(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_gpt2()

        def training_step(self, batch, batch_idx):
            loss = self.model(batch, labels=batch).loss
            self.log("train_loss", loss)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if clears:
                optimizer.zero_grad()

    module = LitGPT()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=N_STEPS, enable_model_summary=False, default_root_dir=folder, **options)
    watched = None if watch is None else watch(trainer)
    torch.manual_seed(1)
    trainer.fit(model=module, train_dataloaders=DataLoader(texts(), batch_size=4, shuffle=True))
    return losses, watched


def of_accelerate(watch, folder):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1)
    data = DataLoader(texts(), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    watched = None if watch is None else watch(model, optimizer)
    losses = []
    model.train()
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, watched


def of_trl(watch, folder):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": texts().tolist()})
    training_args = trl.SFTConfig(
        output_dir=str(folder / "out"), max_steps=N_STEPS, per_device_train_batch_size=4, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=2e-3, max_length=LENGTH,
        dataset_kwargs={"skip_prepare_dataset": True}, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=small_gpt2(), args=training_args, train_dataset=data, processing_class=tokenizer(folder)
    )
    watched = None if watch is None else watch(trainer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], watched


def tokenizer(folder):
    """Return a tokenizer of words that are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({str(i): i for i in range(N_TOKENS)}, unk_token="0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="0", pad_token="0", unk_token="0")


class NanoGPT(nn.Module):
    """Model with the names and the outputs of nanoGPT."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(N_TOKENS, 16), nn.Embedding(LENGTH, 16)
        self.ln_1, self.ln_f = nn.LayerNorm(16), nn.LayerNorm(16)
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, N_TOKENS, bias=False)
        self.lm_head.weight = self.wte.weight
        for each in (self.wte, self.wpe):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        q, k, v = self.c_attn(self.ln_1(x)).split(16, dim=2)
        x = x + self.c_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def of_nanogpt(watch, folder):
    torch.manual_seed(0)
    model, data = NanoGPT(), texts(256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    watched = None if watch is None else watch(model, optimizer)
    losses = []
    for it in range(N_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * it / N_STEPS)))
        for _ in range(2):
            rows = data[torch.randint(len(data), (4,))]
            _, loss = model(rows[:, :-1], rows[:, 1:])
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, watched


LOOPS = {
    "transformers": of_transformers,
    "lightning": of_lightning,
    "accelerate": of_accelerate,
    "trl": of_trl,
    "nanoGPT": of_nanogpt,
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_losses_are_the_same_to_the_bit_and_in_wandb(name, tmp_path, wandb):  # noqa: F811
    def watch(*trained):
        return wb.watch(*trained, store=tmp_path / "a.zarr", shows=False, log="wandb", budget=None)

    alone, _ = LOOPS[name](None, tmp_path)
    options = {"report_to": "wandb"} if name == "transformers" else {}
    losses, watched = LOOPS[name](watch, tmp_path, **options)
    watched.close()
    if wandb.run is not None:
        wandb.finish()
    assert losses == alone
    assert len(losses) == N_STEPS
    assert watched.alarms.raised == []
    ((rows, _, _),) = runs_in(tmp_path).values()
    of_watch = [row for row in rows if "monitors/loss" in row]
    if name == "transformers":  # its own callback logs to the same run
        assert [row["train/loss"] for row in rows if "train/loss" in row] == losses
        assert of_watch[-1]["watch/step"] == N_STEPS - 1
    else:
        assert [row["watch/step"] for row in of_watch] == [*range(N_STEPS)]
    recorded = wb.open_run(tmp_path / "a.zarr")["monitors"]["loss"].values
    assert all(row["monitors/loss"] == recorded[row["watch/step"]] for row in of_watch)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_contracts_of_a_trainer_are_observed(name, clears, tmp_path):
    def watch(trainer):
        return wb.watch(trainer, store=tmp_path / "a.zarr", shows=False, budget=None, every=None)

    alone, _ = LOOPS[name](None, tmp_path, clears=clears)
    losses, watched = LOOPS[name](watch, tmp_path, clears=clears)
    assert losses == alone
    report = watched.contracts
    assert report.n_updates > 0
    assert report["gradients_cleared"].status is (Status.PASSED if clears else Status.FAILED)
    assert [each.signal for each in watched.alarms.raised] == ([] if clears else ["contract gradients_cleared"])
    assert {report[id].status for id in ("causal", "labels_aligned")} == {Status.PASSED}
