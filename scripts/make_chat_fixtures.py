"""Makes what the tests of chat templates compare with, in tests/data/chats/.

tokenizer.json is a small byte-level BPE tokenizer with the special tokens of several families. expected.json holds,
for each template (*.jinja) and conversation (conversations.json) of the folder, the text and the ids that transformers
makes of it, and its mask of the answers where the template marks them itself.

Run it in an environment with the package `transformers`:

    python scripts/make_chat_fixtures.py tests/data/chats
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

SPECIAL = (
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
)


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Returns a tokenizer that learned a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] a setter
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] a setter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def main(folder: Path) -> None:
    conversations = json.loads((folder / "conversations.json").read_text(encoding="utf-8"))
    texts = [one["content"] for messages in conversations.values() for one in messages]
    make_tokenizer(texts * 2).save(str(folder / "tokenizer.json"))
    expected: dict[str, dict[str, dict]] = {}
    for file in sorted(folder.glob("*.jinja")):
        model = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        )
        model.chat_template = file.read_text(encoding="utf-8")
        expected[file.stem] = {}
        for name, messages in conversations.items():
            marks = "{% generation %}" in model.chat_template
            try:
                found = model.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marks)
            except Exception as error:  # a template refuses some conversations
                expected[file.stem][name] = {"refused": str(error)}
                continue
            prompt = model.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
            row = {"ids": found["input_ids"], "text": model.decode(found["input_ids"]), "prompt": prompt}
            if "assistant_masks" in found:
                row["mask"] = found["assistant_masks"]
            expected[file.stem][name] = row
    content = json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    (folder / "expected.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
