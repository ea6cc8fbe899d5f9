"""The text that a run writes at its end, to `evaluation.sample_prompt`."""

import dataclasses

from jaxtrain.data.chat.templates import format_of_reading
from jaxtrain.errors import UserError
from jaxtrain.inference.decoding import Writing
from jaxtrain.inference.generate import whole_texts
from jaxtrain.inference.prompts import room_for_new_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.assemble import Run
from jaxtrain.train.state import TrainState


def sample_text(run: Run, state: TrainState, progress: Progress) -> str | None:
    """Continue or answer `evaluation.sample_prompt`; None where there is no prompt, no tokenizer or no text model."""
    settings, tokenizer = run.config.evaluation, run.data.tokenizer
    prompt, form = settings.sample_prompt, format_of_reading(run.data.reading)
    if prompt is None or tokenizer is None or run.step.model.decoder is None:
        return None
    # Rows of plain text have no special tokens.
    sampling = Sampling(settings.sample_temperature)
    writing = Writing(settings.sample_tokens, sampling, run.config.seed, add_special_tokens=False)
    try:
        with progress.phase("sampling"):
            if form is None:
                room = room_for_new_tokens(run.step.model.decoder, len(tokenizer.encode(prompt)))
                writing = dataclasses.replace(writing, new_tokens=min(settings.sample_tokens, room))
            model, params = run.step.sharded_model, state.evaluation_params
            (text,) = whole_texts(model, params, tokenizer, [prompt], writing, form)
            return text if form is None else f"{prompt}\n\n{text}"
    except UserError as error:  # the run is done: it is not lost over its sample
        progress.message(f"no sample: {error}")
        return None
