"""Files of published models, read and written without jax: safetensors, GGUF, bitsandbytes, PEFT. No jax here."""
