import calendar
import os
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

os.environ["TOKENIZERS_PARALLELISM"] = "false"
set_seed(7)
lines = [line.strip() for line in open(calendar.__file__) if len(line.strip()) > 10]

raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
raw.train_from_iterator(
    lines, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
)
dataset = Dataset.from_dict({"text": lines}).map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True, remove_columns="text"
)
model = RobertaForMaskedLM(RobertaConfig(
    vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=40, type_vocab_size=1, pad_token_id=tokenizer.pad_token_id,
))
collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.2)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=40, per_device_train_batch_size=16, learning_rate=3e-3, warmup_steps=4,
    logging_steps=10, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=collator)
print("loss", trainer.train().training_loss)
