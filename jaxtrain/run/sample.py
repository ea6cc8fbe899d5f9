"""The text that a run generates at its end."""

from jaxtrain.data.chat.formats import ChatFormat, format_of_reading
from jaxtrain.errors import UserError
from jaxtrain.metrics.progress import Progress
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState


def sample_text(run: Run, state: TrainState, progress: Progress) -> str | None:
    """Continue `evaluation.sample_prompt`; None where there is no prompt, no tokenizer or no text model.

    Args:
        run: what was trained.
        state: the last state; its `evaluation_params` are used.
        progress: what people see.
    """
    settings, tokenizer, decoder = run.config.evaluation, run.data.tokenizer, run.step.model.decoder
    prompt = settings.sample_prompt
    if prompt is None or tokenizer is None or decoder is None:
        return None
    from jaxtrain.inference.generate import generate_text, room_for_new_tokens
    from jaxtrain.inference.sampling import Sampling

    form = format_of_reading(run.data.reading)
    if form is not None:
        with progress.phase("sampling"):
            return f"{prompt}\n\n{_answer(run, state, form, prompt)}"
    length, limit = max(len(tokenizer.encode(prompt)), 1), decoder.max_length
    room = room_for_new_tokens(decoder, length)
    if room < 1:
        progress.message(f"no sample: evaluation.sample_prompt has {length} tokens, the model takes {limit}")
        return None
    with progress.phase("sampling"):
        return generate_text(
            run.step,
            state.evaluation_params,
            tokenizer,
            [prompt],
            new_tokens=min(settings.sample_tokens, room),
            sampling=Sampling(settings.sample_temperature),
            seed=run.config.seed,
            add_special_tokens=False,  # rows of plain text have none
        )[0]


def _answer(run: Run, state: TrainState, form: ChatFormat, question: str) -> str:
    """What the model of a run on chats answers; the reason where it cannot."""
    from jaxtrain.inference.chat import answer_questions
    from jaxtrain.inference.sampling import Sampling

    settings = run.config.evaluation
    try:
        return answer_questions(
            run.step.sharded_model,
            state.evaluation_params,
            run.data.tokenizer,
            form,
            [question],
            new_tokens=settings.sample_tokens,
            sampling=Sampling(settings.sample_temperature),
            seed=run.config.seed,
        )[0]
    except UserError as error:  # the run is done: it is not lost over its sample
        return f"[no answer: {error}]"
