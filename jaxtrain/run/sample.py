"""The text that a run writes at its end, to `evaluation.sample_prompt`."""

from jaxtrain.data.chat.templates import format_of_reading
from jaxtrain.errors import UserError
from jaxtrain.inference.decoding import Writing
from jaxtrain.inference.generate import joined, write_texts
from jaxtrain.inference.prompts import room_for_new_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.assemble import Run
from jaxtrain.train.state import TrainState


def sample_text(run: Run, state: TrainState, progress: Progress) -> str | None:
    """Continue or answer `evaluation.sample_prompt`; None where there is no prompt, no tokenizer or no text model."""
    settings = run.config.evaluation
    prompt = settings.sample_prompt
    tokenizer = run.data.tokenizer
    model = run.step.sharded_model
    decoder = model.model.decoder
    if prompt is None or tokenizer is None or decoder is None:
        return None
    chat = format_of_reading(run.data.reading)
    try:
        with progress.phase("sampling"):
            new_tokens = settings.sample_tokens
            if chat is None:
                new_tokens = min(new_tokens, room_for_new_tokens(decoder, len(tokenizer.encode(prompt))))
            # Rows of plain text have no special tokens.
            sampling = Sampling(settings.sample_temperature)
            writing = Writing(new_tokens, sampling, run.config.seed, add_special_tokens=False)
            written = write_texts(model, state.evaluation_params, tokenizer, [prompt], writing, chat)
            (text,) = joined(written, 1)
            return text if chat is None else f"{prompt}\n\n{text}"
    except UserError as error:  # the run is done: it is not lost over its sample
        progress.message(f"no sample: {error}")
        return None
