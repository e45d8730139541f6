"""Supervised fine-tuning of a small Llama on made-up question and answer pairs."""
import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = [str(n) for n in range(60)] + ["what", "is", "plus", "?", "it"]
vocab = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *words])}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

rng = random.Random(0)
pairs = []
for _ in range(400):
    a, b = rng.randrange(30), rng.randrange(3)
    pairs.append({"prompt": f"what is {a} plus {b} ? ", "completion": f"it is {a + b}"})
dataset = Dataset.from_list(pairs)

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
))
args = SFTConfig(
    output_dir=tempfile.mkdtemp(), max_steps=40, per_device_train_batch_size=8, learning_rate=4e-3, logging_steps=10,
    max_length=32, save_strategy="no", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, gradient_checkpointing=False,
    dataset_num_proc=None,
)
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
print("loss", trainer.train().training_loss)
