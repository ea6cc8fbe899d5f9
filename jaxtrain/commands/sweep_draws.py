"""The settings of the trials of a sweep: all combinations of values, or values drawn from a seed. No jax here."""

import itertools
import math
import random
import re
from collections.abc import Sequence

from jaxtrain.errors import ConfigError

_MOST_TRIALS = 1000
# A quoted text of YAML: in double quotes a backslash, in single ones a second quote keeps a quote inside.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\']|\'\')*\'')
# A value that begins with a quote which is not closed.
_OPEN = re.compile(rf"\s*(?!{_QUOTED.pattern})[\"']")


def draw_trials(words: Sequence[str], num_trials: int | None, seed: int | None) -> list[dict[str, str]]:
    """Return the settings of each trial; those of trial i depend on the seed and i alone.

    Raises:
        ConfigError: a word cannot be read, or it is not said how many values of a range are drawn.
    """
    choices: dict[str, list[str] | tuple[str, str, bool]] = {}
    for word in words:
        key, _, text = word.partition("=")
        values = _split(text)
        if not key or "" in values:
            raise ConfigError(f"cannot read {word!r}; write key=value, key=v1,v2 or key=low..high")
        if key in choices:
            raise ConfigError(f"{key} is given twice, the second time as {word!r}; write it once, as in {key}=v1,v2")
        choices[key] = _read_range(word, text) or values
    ranges = [key for key, found in choices.items() if not isinstance(found, list)]
    if num_trials is None and (ranges or seed is not None):
        raise ConfigError(f"values{f' of {ranges[0]}' if ranges else ''} are drawn; say how many: --trials 20")
    lists = [one for one in choices.values() if isinstance(one, list)]
    count = math.prod(map(len, lists)) if num_trials is None else num_trials
    if count > _MOST_TRIALS:
        raise ConfigError(f"{count} trials are too many, above {_MOST_TRIALS}; draw some: --trials 50 --random 0")
    if not ranges and seed is None:
        return [dict(zip(choices, one, strict=True)) for one in itertools.islice(itertools.product(*lists), count)]
    generators = [random.Random(f"{seed or 0}/{number}") for number in range(count)]
    return [{key: _draw(one, each) for key, one in choices.items()} for each in generators]


def _split(text: str) -> list[str]:
    """Split values at commas; a list, a mapping or a quoted text of YAML is one, whatever is in it."""
    values, depth, at = [""], 0, 0
    while at < len(text):
        # Brackets and quotes mean something where a value begins with one, and inside of one that does.
        begins = not values[-1].strip()
        inside = depth > 0 and values[-1].rstrip()[-1] in "[{,:"
        quoted = _QUOTED.match(text, at) if begins or inside else None
        piece = quoted[0] if quoted else text[at]
        at += len(piece)
        if piece in ("[", "{") and (begins or depth):
            depth += 1
        elif piece in ("]", "}") and depth:
            depth -= 1
        if piece == "," and not depth:
            values.append("")
        else:
            values[-1] += piece
    # What is not closed is not YAML: the error of the value names it whole.
    return [text] if depth or any(_OPEN.match(value) for value in values) else values


def _read_range(word: str, text: str) -> tuple[str, str, bool] | None:
    """The bounds of `low..high[:log]`; None where the text is no range."""
    bounds, _, scale = text.partition(":")
    low, _, high = bounds.partition("..")
    try:
        first, last = float(low), float(high)
    except ValueError:
        return None
    if high.startswith("."):  # a third dot makes another number of the bound
        raise ConfigError(f"{word} has three dots; write {low}..{high[1:]}, or {low}..0{high}")
    if scale not in ("", "log") or not -math.inf < first < last < math.inf or (scale and first <= 0):
        raise ConfigError(f"{word} is no range; write low..high, or low..high:log above 0, as in 1e-4..1e-2:log")
    return low, high, scale == "log"


def _draw(choice: list[str] | tuple[str, str, bool], generator: random.Random) -> str:
    if isinstance(choice, list):
        return generator.choice(choice)
    low, high, is_log = choice
    is_whole = low.lstrip("-").isdigit() and high.lstrip("-").isdigit()
    if is_whole and not is_log:
        return str(generator.randint(int(low), int(high)))
    # Every whole number has the cell that rounds to it; without this the bounds would have half of theirs.
    margin = 0.5 if is_whole else 0.0
    first, last = float(low) - margin, float(high) + margin
    value = math.exp(generator.uniform(math.log(first), math.log(last))) if is_log else generator.uniform(first, last)
    if is_whole:
        return str(min(max(round(value), int(low)), int(high)))
    # Six digits read well; in a range that is narrower than they are, all digits.
    short = f"{value:.6g}"
    return short if first <= float(short) <= last else repr(value)
