"""A byte-level BPE tokenizer trained on a few sentences, written as a model folder has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIAL = [BOS, EOS, USER, ASSISTANT]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a terrazzo floor is made of many small stones",
    "größe, naïve café, 你好世界, здравствуй мир",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\n"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    vocab_size: int = 320,
    adds_bos: bool = False,
    config: dict[str, Any] | None = None,
) -> Path:
    """tokenizer.json and tokenizer_config.json in `folder`; ids 0..3 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
    return folder
