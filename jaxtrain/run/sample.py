"""The text that a run generates at its end."""

from typing import TYPE_CHECKING

from jaxtrain.data.chat.templates import format_of_reading
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.metrics.progress import Progress
    from jaxtrain.train.assemble import Run
    from jaxtrain.train.state import TrainState


def sample_text(run: "Run", state: "TrainState", progress: "Progress") -> str | None:
    """Continue or answer `evaluation.sample_prompt`; None where there is no prompt, no tokenizer or no text model."""
    settings, tokenizer = run.config.evaluation, run.data.tokenizer
    prompt, form = settings.sample_prompt, format_of_reading(run.data.reading)
    if prompt is None or tokenizer is None or run.step.model.decoder is None:
        return None
    from jaxtrain.inference.chat import answer_questions
    from jaxtrain.inference.generate import generate_text, room_for_new_tokens
    from jaxtrain.inference.sampling import Sampling

    options = {"sampling": Sampling(settings.sample_temperature), "seed": run.config.seed}
    new_tokens, model, params = settings.sample_tokens, run.step.sharded_model, state.evaluation_params
    try:
        with progress.phase("sampling"):
            if form is not None:
                answers = answer_questions(model, params, tokenizer, form, [prompt], new_tokens=new_tokens, **options)
                return f"{prompt}\n\n{answers[0]}"
            new_tokens = min(new_tokens, room_for_new_tokens(run.step.model.decoder, len(tokenizer.encode(prompt))))
            options["add_special_tokens"] = False  # rows of plain text have none
            return generate_text(run.step, params, tokenizer, [prompt], new_tokens=new_tokens, **options)[0]
    except UserError as error:  # the run is done: it is not lost over its sample
        progress.message(f"no sample: {error}")
        return None
