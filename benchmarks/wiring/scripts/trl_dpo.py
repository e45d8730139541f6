# Direct preference optimization: even numbers are preferred
import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

set_seed(3)
rng = random.Random(3)
vocab = {w: i for i, w in enumerate(["[PAD]", "[EOS]", "[UNK]", "say", *map(str, range(40))])}
raw = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def numbers(remainder):
    return " ".join(str(2 * rng.randrange(20) + remainder) for _ in range(rng.randint(2, 6)))


rows = [{"prompt": "say ", "chosen": numbers(0), "rejected": numbers(1)} for _ in range(320)]
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=len(vocab), n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=1, eos_token_id=1, pad_token_id=0,
))
ref = GPT2LMHeadModel(model.config)
ref.load_state_dict(model.state_dict())
args = DPOConfig(
    output_dir=tempfile.mkdtemp(), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-3, beta=0.2, logging_steps=6,
    save_strategy="no", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, gradient_checkpointing=False,
)
trainer = DPOTrainer(model=model, ref_model=ref, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
print("loss", trainer.train().training_loss)
