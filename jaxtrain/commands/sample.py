"""`jaxtrain sample`: text from a checkpoint or a published model, printed alone on standard output."""

import json
import sys
from collections.abc import Sequence

from jaxtrain.commands.output import print_text
from jaxtrain.commands.own_code import own_code
from jaxtrain.commands.sample_print import gathered, print_scores, print_stream, scores_json
from jaxtrain.config import Config
from jaxtrain.config.local_path import local_path
from jaxtrain.config.saved_run import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.request import MOST_ALTERNATIVES
from jaxtrain.inference.sampling import Sampling
from jaxtrain.interop.weights import is_published
from jaxtrain.published.hub import published_place
from jaxtrain.published.peft import is_adapter_folder
from jaxtrain.run.open_run import saved_config
from jaxtrain.run.served import Writing, open_writer, search_continuations, write_answers, write_continuations
from jaxtrain.runtime import distributed

# Tokens between two looks for a stop, for which the host waits.
_PIECE = 16


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
    stream: bool = False,
    logprobs: int | None = None,
    special_tokens: bool = False,
) -> int:
    """Print each prompt with its continuation: as it is written on a terminal, elsewhere when it is done.

    Several prompts are one batch, and an empty line separates the texts.

    Args:
        run_dir: directory of the run; or a published folder, a GGUF file, or an adapter that names its base.
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
        step: step of the checkpoint of a run; None: the newest intact one.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        as_json: whether one JSON object per prompt is printed, with `prompt` and `text` (and `logprobs`).
        stream: whether text is printed as it is written also where nobody watches.
        logprobs: alternatives that are reported per new token with their log-probabilities; None: none are.
        special_tokens: whether the special tokens that the model writes are shown.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: there is no prompt, or an option is out of range.
    """
    if stream and as_json:
        raise ConfigError("jaxtrain sample: --json prints whole objects and --stream pieces of text; leave one out")
    if beams is not None and (stream or logprobs is not None):
        raise ConfigError("jaxtrain sample: --beams finds whole texts; leave --stream and --logprobs out")
    if logprobs is not None and logprobs > MOST_ALTERNATIVES:
        raise ConfigError(f"jaxtrain sample: --logprobs {logprobs} is too many; at most {MOST_ALTERNATIVES} are shown")
    if questions is not None and (beams is not None or stop):
        raise ConfigError("jaxtrain sample --chat takes no --beams and no --stop; use -p TEXT with them")
    # What is no run is opened as a published model, if it looks like one; else as a run, which says what is missing.
    path = local_path(published_place(run_dir, what="run or model"), what="run directory")
    is_folder = not is_run(path) and (is_published(path) or is_adapter_folder(path))
    config = Config() if is_folder else saved_config(run_dir).config
    texts = _prompts(prompts) if questions is None else questions
    distributed.start(emulate=emulate, compilation_cache=config.compilation_cache)
    is_main = distributed.is_main_process()
    sampling = Sampling(temperature, top_k, top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    as_written = stream or (_is_watched() and not as_json and beams is None)
    # Without a stop nobody looks before the end.
    piece = 1 if as_written else (_PIECE if stop else None)
    writing = Writing(new_tokens, sampling, seed, stop, not special_tokens, logprobs, piece)
    with own_code(config):
        writer = open_writer(path, answers=questions is not None, quantize=quantize, step=step)
        if beams is not None:
            found, scores = search_continuations(writer, texts, writing, beams=beams), [[] for _ in texts]
        else:
            write = write_continuations if questions is None else write_answers
            written = write(writer, texts, writing)
            if as_written and is_main:
                print_stream(written, len(texts), scored=logprobs is not None)
                return 0
            found, scores = gathered(written, len(texts))
    if not is_main:
        return 0
    for index, (prompt, text, scored) in enumerate(zip(texts, found, scores, strict=True)):
        if as_json:
            more = {} if logprobs is None else {"logprobs": scores_json(scored)}
            print_text(json.dumps({"prompt": prompt, "text": text, **more}, ensure_ascii=False))
            continue
        print_text(("\n" if index else "") + text)
        if logprobs is not None:
            print_scores(scored)
    return 0


def _is_watched() -> bool:
    """Whether standard output is the terminal of the one process that there is."""
    import jax

    # Several processes must take pieces of one length, and only some of them may have a terminal.
    return sys.stdout is not None and sys.stdout.isatty() and jax.process_count() == 1


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
