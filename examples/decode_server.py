"""Server of `decode.py`: the scheduler, the compiled step and the cache together."""

import numpy as np
from decode_model import PAGE_SIZE, StepFunction, make_cache
from decode_scheduler import Batch, Request, Scheduler
from jaxtyping import Int

from blockdiag.demo.language_model import Settings


class Server:
    """A server of requests, which arrive and end between any two steps.

    Args:
        step: a step from `make_step`.
        settings: settings of the model.
        slots: maximum number of requests in a step.
        budget: rows of a step; see `Scheduler`.
        num_pages: size of the pool that all requests share.
        drafts: maximum number of drafted tokens of a request in a step; 0 for greedy decoding.
        dtype: dtype of keys and values in the cache.
    """

    def __init__(
        self,
        step: StepFunction,
        settings: Settings,
        *,
        slots: int,
        budget: int,
        num_pages: int,
        drafts: int = 0,
        dtype: str = "float32",
    ) -> None:
        self.scheduler = Scheduler(
            slots=slots,
            budget=budget,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_length=settings.sequence_length,
            drafts=drafts,
        )
        self._step = step
        self._cache = make_cache(settings, num_pages=num_pages, dtype=dtype)
        # Steps have one of two sizes, so that both programs are compiled before the first request arrives.
        for is_decoding in (True, False):
            self._predict(self.scheduler.empty_batch(is_decoding=is_decoding))

    def submit(self, prompt: bytes, new_tokens: int) -> Request:
        """Add a request to the queue; its `text` grows with every step that generates bytes of it."""
        return self.scheduler.submit(prompt, new_tokens)

    def cancel(self, request: Request) -> None:
        """End a request before the next step."""
        self.scheduler.cancel(request)

    def advance(self) -> list[Request]:
        """Compute a step, in which prompts are read beside requests that decode; return the finished requests."""
        batch = self.scheduler.plan()
        return [] if batch is None else self.scheduler.complete(batch, self._predict(batch))

    def _predict(self, batch: Batch) -> Int[np.ndarray, " rows"]:
        """Append the tokens of a batch to the cache; return the most likely token after each, int32 [rows]."""
        arrays = batch.tokens, batch.offsets, batch.lengths, batch.page_table
        found, self._cache = self._step(self._cache, *arrays, batch.most_tokens)
        return np.asarray(found.predictions)
