"""`jaxtrain sample`: text from a checkpoint, printed alone on standard output."""

import json
import sys
from collections.abc import Sequence

from jaxtrain.commands.output import print_text
from jaxtrain.commands.own_code import own_code
from jaxtrain.errors import ConfigError
from jaxtrain.inference.sampling import Sampling
from jaxtrain.run.answers import run_answers
from jaxtrain.run.open_run import open_run
from jaxtrain.run.saved_config import saved_config
from jaxtrain.runtime import distributed


def run_sample(
    run_dir: str,
    *,
    prompts: Sequence[str] | None,
    questions: Sequence[str] | None = None,
    new_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    beams: int | None = None,
    seed: int,
    quantize: str | None,
    step: int | None,
    emulate: int | None,
    as_json: bool,
) -> int:
    """Print each prompt with its continuation.

    Several prompts are one batch, and an empty line separates the texts.

    Args:
        run_dir: directory of the run.
        prompts: texts to continue; None: standard input is one prompt.
        questions: texts that the model answers by its chat template, in place of prompts; answers alone are printed.
        new_tokens: tokens to add to each prompt; None: 200, or as many as the model has positions for.
        temperature: see `Sampling`.
        top_k: see `Sampling`.
        top_p: see `Sampling`.
        min_p: see `Sampling`.
        repetition_penalty: see `Sampling`.
        stop: texts at which a continuation ends.
        beams: beginnings that are followed for the most likely text; None: tokens are drawn one by one.
        seed: of the random choices.
        quantize: number format of the linear layers; None: the one in which they were trained.
        step: step of the checkpoint; None: the newest intact one.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        as_json: whether one JSON object per prompt is printed, with `prompt` and `text`.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: there is no prompt, or an option is out of range.
    """
    config = saved_config(run_dir).config
    prompts = _prompts(prompts) if questions is None else questions
    distributed.start(emulate=emulate, compilation_cache=config.compilation_cache)
    run = open_run(run_dir, step=step, quantize=quantize)
    with own_code(config):
        if questions is not None:
            if beams is not None or stop:
                raise ConfigError("jaxtrain sample --chat takes no --beams and no --stop; use -p TEXT with them")
            sampling = Sampling(temperature, top_k, top_p, min_p=min_p, repetition_penalty=repetition_penalty)
            texts = run_answers(run, questions, new_tokens=new_tokens, sampling=sampling, seed=seed)
        else:
            texts = run.sample(
                prompts,
                new_tokens=new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                stop=stop,
                beams=beams,
                seed=seed,
            )
    if not distributed.is_main_process():
        return 0
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if as_json:
            print_text(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
        else:
            print_text(("\n" if index else "") + text)
    return 0


def _prompts(given: Sequence[str] | None) -> Sequence[str]:
    if given is not None:
        return given
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("jaxtrain sample: no prompt; give -p TEXT, or text on standard input")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no text: byte {error.start} is not UTF-8; give text in UTF-8") from None
    # The line end belongs to `echo`, not to the text.
    return [text.removesuffix("\n")]
