"""A byte-level BPE tokenizer trained on documents, for targets that are trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.data.corpus import Document
from specjax.models.files import import_transformers

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Iterable[Document], vocab_size: int, directory: Path | None = None):
    """A byte-level BPE tokenizer of at most ``vocab_size`` ids, with one special token, which closes documents and
    pads. It is a function of the set of texts: their order and names do not matter. It is saved to ``directory`` if
    given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in sorted(documents, key=lambda d: d.digest)), trainer)
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    if directory is not None:
        fast.save_pretrained(directory)
    return fast
