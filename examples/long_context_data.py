"""The text of `long_context.py`: Python's documentation and the source of its library, from any installation.

Tokens are bytes.
"""

import functools
import sysconfig
from pathlib import Path

import language_data
import numpy as np

VOCABULARY = language_data.VOCABULARY
# Tests, and folders that distributions of Python omit or add.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@functools.cache
def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes to train on and the held-out ones, uint8 each: a tenth of the topics and every tenth file.

    The topics are those of Python's own `help("topics")`. They and the library's source are about ten megabytes.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    sources = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    topics, held_out_topics = language_data.load_text()
    training = [topics, *(source for index, source in enumerate(sources) if index % 10)]
    return np.concatenate(training), np.concatenate([held_out_topics, *sources[::10]])


def crop(text: np.ndarray, batch_size: int, context: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a step and the token that follows each of them, int32 [batch_size, context] each.

    A step's contexts depend only on the seed and the step, so a resumed training continues with the same contexts.
    Targets are cut from the text before devices divide the tokens, because the target of a device's last token is the
    first token of the next device.

    Raises:
        ValueError: the text is shorter than a context.
    """
    if len(text) <= context:
        raise ValueError(f"`context` is {context}, and the text has {len(text)} bytes; take a shorter context")
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - context, size=(batch_size, 1))
    bytes_of_rows = text[starts + np.arange(context + 1)].astype(np.int32)
    return bytes_of_rows[:, :-1], bytes_of_rows[:, 1:]
