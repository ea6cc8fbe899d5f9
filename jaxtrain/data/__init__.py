"""Data by index: sources of rows, tokenizers, and batches that are a pure function of their number."""

from jaxtrain.data.batches import Batch, Batches, check_tokens, prefetch
from jaxtrain.data.dataset import Data
from jaxtrain.data.sources.open import open_data
from jaxtrain.data.sources.shards import prepare_tokens
from jaxtrain.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "Data",
    "Tokenizer",
    "build_tokenizer",
    "check_tokens",
    "load_tokenizer",
    "open_data",
    "prefetch",
    "prepare_tokens",
]
