"""A small server with continuous batching, paged caches, shared prefixes and speculative decoding.

    python examples/decode.py
    python examples/decode.py --requests 200 --arrivals 2 --cache bfloat16
    python examples/decode.py --model tiny --requests 10000 --slots 32 --arrivals 1.5 --pages 48

The program trains the demo's byte-level language model briefly, and then serves requests that arrive while others
decode. A step of the model takes chunks of prompts beside requests that decode. Requests with equal prefixes share
pages. Bytes are generated one by one, or several at a time by speculative decoding, whose drafts are looked up in the
text so far. Some requests are cancelled. The program fails if it loses a request or a page, or if any byte differs from
the one that the same model generates without a cache; for smaller caches, that model rounds its keys and values as the
cache does. Finally the program prints the cost of smaller caches, in bits per byte of held-out text.

| module | content |
|---|---|
| `decode_pages.py` | page allocator with reference counts, and the index of shared prefixes |
| `decode_scheduler.py` | which tokens the next step processes |
| `decode_model.py` | the step over the paged cache, and the model without a cache |
| `decode_server.py` | the server |
| `decode_table.py` | figures of the running server |
"""

import argparse
import collections
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decode_model import PAGE_SIZE, StepFunction, causal_attention, make_cache, make_step
from decode_scheduler import Request, Status
from decode_server import Server
from decode_table import Report
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console

from blockdiag.demo import language_model
from blockdiag.demo.language_model import LanguageModel, Settings

MODELS = {
    "small": Settings(sequence_length=256),
    "tiny": Settings(sequence_length=64, width=16, heads=2, layers=1),
}
CACHES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Rows of a step in addition to those that decoding may need, and rows of a sequence when bits per byte are measured.
CHUNK = 32
# Logits that differ by no more are a tie. A key that lies between two numbers of a smaller cache may be rounded to
# either one, and on a GPU the kernels for 16-bit caches round attention weights to 16 bits.
TIES = {"float32": 0.0, "bfloat16": 2**-5, "float8_e4m3fn": 2**-7, "float8_e5m2": 2**-7}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Settings of the server, and of the requests that are drawn.

    Attributes:
        requests: number of requests.
        arrivals: mean number of requests that arrive in a step.
        cancelled: share of the requests that are cancelled at some time.
        new_tokens: maximum number of bytes to generate for a request.
        slots: maximum number of requests in a step.
        num_pages: size of the pool; None for a fifth of what all slots may need, so that pages run out.
        drafts: maximum number of drafted tokens of a request in a step.
        caches: dtypes of the cache, which are served one after the other.
    """

    requests: int = 24
    arrivals: float = 0.25
    cancelled: float = 0.1
    new_tokens: int = 96
    slots: int = 8
    num_pages: int | None = None
    drafts: int = 7
    caches: tuple[str, ...] = CACHES[:3]

    @property
    def budget(self) -> int:
        """Rows of a step. They do not depend on drafts, so that greedy and drafted serving share a program."""
        return self.slots * (1 + self.drafts) + CHUNK

    def pages(self, settings: Settings) -> int:
        """Return the size of the pool."""
        longest = -(-settings.sequence_length // PAGE_SIZE)
        return self.num_pages if self.num_pages is not None else max(longest, self.slots * longest // 5)


class Arrival(NamedTuple):
    """A request that arrives before a step, and how many steps later it is cancelled, if ever."""

    step: int
    prompt: bytes
    new_tokens: int
    patience: int | None


def draw_arrivals(settings: Settings, load: Load) -> list[Arrival]:
    """Draw requests. Prompts are pieces of held-out text, and half of them begin with one of four common texts."""
    _, text = language_model.split_text(language_model.english_text())
    generator = np.random.default_rng(settings.seed)

    def piece(length: int) -> bytes:
        begin = generator.integers(0, len(text) - settings.sequence_length)
        return text[begin : begin + length].tobytes()

    longest = settings.sequence_length - load.new_tokens
    common = [piece(longest // 2) for _ in range(4)]
    steps = np.cumsum(generator.exponential(1 / load.arrivals, load.requests)).astype(int)
    arrivals = []
    for step in steps.tolist():
        beginning = common[generator.integers(4)] if generator.random() < 0.5 else b""
        prompt = beginning + piece(int(generator.integers(1, longest - len(beginning) + 1)))
        is_cancelled = generator.random() < load.cancelled
        patience = int(generator.integers(load.new_tokens + 1)) if is_cancelled else None
        arrivals.append(Arrival(step, prompt, int(generator.integers(1, load.new_tokens + 1)), patience))
    return arrivals


def serve(server: Server, arrivals: Sequence[Arrival], report: Report) -> list[Request]:
    """Serve requests that arrive and are cancelled between steps; return all of them when the last one has ended."""
    requests, arriving, step = [], collections.deque(arrivals), 0
    leaving: dict[int, list[Request]] = collections.defaultdict(list)
    while arriving or not server.scheduler.is_idle:
        while arriving and arriving[0].step <= step:
            arrival = arriving.popleft()
            requests.append(server.submit(arrival.prompt, arrival.new_tokens))
            if arrival.patience is not None:
                leaving[step + arrival.patience].append(requests[-1])
        for request in leaving.pop(step, []):
            server.cancel(request)
        server.advance()
        report.update()
        step += 1
    return requests


def loss_of_requests(server: Server, requests: Sequence[Request], count: int) -> str:
    """Describe a request that did not end, or a page that was not released; empty if all is well."""
    if len(requests) != count:
        return f"{len(requests)} of {count} requests arrived"
    for request in requests:
        is_whole = request.status is Status.FINISHED and len(request.text) == request.goal
        if not is_whole and request.status is not Status.CANCELLED:
            return f"request {request.number} is {request.status.name} with {len(request.text)} of {request.goal} bytes"
    pool = server.scheduler.pool
    if pool.in_use or any(pool.owners):
        return f"{pool.in_use} pages are in use without a request"
    return ""


@nnx.jit
def _margins(model: LanguageModel, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Return by how much the most likely byte exceeds the byte that follows, in logits."""
    logits = model(tokens)[:, :-1]
    following = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.max(logits, axis=-1) - following


class Comparison(NamedTuple):
    """Generated bytes beside those that are most likely without a cache.

    Attributes:
        margin: largest difference of logits between the most likely byte and the generated one; 0 if all are the same.
        place: the byte with this difference, in words.
    """

    margin: float
    place: str


def compare_bytes(model: LanguageModel, settings: Settings, requests: Sequence[Request]) -> Comparison:
    """Compare texts with greedy decoding without a cache.

    Byte t must be the most likely one after bytes 0 to t - 1. If this holds for every t after the prompt, the text is
    the result of greedy decoding without a cache. Because the model is causal, one call checks all t.
    """
    rows, worst = 64, Comparison(0.0, "no byte")
    for first in range(0, len(requests), rows):
        part = requests[first : first + rows]
        tokens = np.zeros((rows, settings.sequence_length), np.int32)
        for row, request in enumerate(part):
            tokens[row, : len(request.text)] = list(request.text)
        margins = np.asarray(_margins(model, jnp.asarray(tokens)))
        for row, request in enumerate(part):
            for place in range(request.prompt_length, len(request.text)):
                margin = float(margins[row, place - 1])
                # Written so that NaN is the largest difference.
                if not margin <= worst.margin:
                    worst = Comparison(margin, f"request {request.number}, byte {place}: {request.text[place]}")
    return worst


def cached_bits_per_byte(step: StepFunction, settings: Settings, batch: Int[np.ndarray, "B T"], dtype: str) -> float:
    """Return the mean cross entropy of text int32 [B, T], in bits, if every layer attends to a cache of a dtype."""
    slots, length = batch.shape[0], batch.shape[1] - 1
    per_sequence = -(-length // PAGE_SIZE)
    cache = make_cache(settings, num_pages=slots * per_sequence, dtype=dtype)
    table = np.random.default_rng(0).permutation(slots * per_sequence).reshape(slots, per_sequence).astype(np.int32)
    losses = []
    for begin in range(0, length, CHUNK):
        end = min(begin + CHUNK, length)
        tokens, used = np.zeros(slots * CHUNK, np.int32), slots * (end - begin)
        tokens[:used] = batch[:, begin:end].reshape(-1)
        offsets = np.arange(slots + 1, dtype=np.int32) * (end - begin)
        found, cache = step(cache, tokens, offsets, np.full(slots, end, np.int32), table, CHUNK)
        labels = batch[:, begin + 1 : end + 1].reshape(-1)
        losses.append(np.asarray(optax.softmax_cross_entropy_with_integer_labels(found.logits[:used], labels)))
    return float(np.concatenate(losses).mean()) / math.log(2.0)


def run(settings: Settings, load: Load, console: Console) -> str:
    """Train, serve and measure; return which check failed, empty if none did."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    training = language_model.train(settings, causal_attention(settings))
    say(f"trained for {settings.steps} steps: {training.bits_per_byte:.3f} bits per byte of held-out text")
    step = make_step(training.model, settings)
    arrivals, requests = draw_arrivals(settings, load), []
    for dtype in load.caches:
        uncached = language_model.with_attention(training.model, settings, causal_attention(settings, dtype))
        for drafts in sorted({0, load.drafts}):
            name = f"cache of {dtype}, " + (f"up to {drafts} drafts" if drafts else "greedy")
            server = Server(
                step,
                settings,
                slots=load.slots,
                budget=load.budget,
                num_pages=load.pages(settings),
                drafts=drafts,
                dtype=dtype,
            )
            with Report(server.scheduler, console, name) as report:
                requests = serve(server, arrivals, report)
            lost = loss_of_requests(server, requests, load.requests)
            compared = compare_bytes(uncached, settings, requests)
            if lost:
                return f"{name}: {lost}"
            if not compared.margin <= TIES[dtype]:
                return f"{name}: {compared.place}, but another is more likely without a cache, by {compared.margin:.2g}"
            ties = f", or ties with it within {compared.margin:.2g}" if compared.margin else ""
            say(f"{name}: no request and no page is lost; every byte equals that of the model without a cache{ties}")
    finished = [request for request in requests if request.status is Status.FINISHED]
    if finished:
        shortest = min(finished, key=lambda request: request.prompt_length)
        prompt, text = bytes(shortest.text[: shortest.prompt_length]), bytes(shortest.text[shortest.prompt_length :])
        say(f"the shortest finished prompt, {prompt!r}, continues: {text!r}")
    return _measure_caches(training.model, step, settings, console)


def _measure_caches(model: LanguageModel, step: StepFunction, settings: Settings, console: Console) -> str:
    """Print bits per byte by dtype of the cache; return the difference if a float32 cache changes the result."""
    _, text = language_model.split_text(language_model.english_text())
    (batch,) = language_model.batches(text, settings, count=1, seed=settings.seed + 2)
    plain = float(language_model.evaluation_step(model, jnp.asarray(batch))) / math.log(2.0)
    found = {dtype: cached_bits_per_byte(step, settings, batch, dtype) for dtype in CACHES}
    console.print(f"held-out text without a cache: {plain:.5f} bits per byte", highlight=False)
    for dtype, bits in found.items():
        console.print(f"  cache of {dtype}: {bits:.5f}, {bits - plain:+.5f}", highlight=False)
    if not abs(found["float32"] - plain) < 1e-4:
        return f"held-out text: {found['float32']} bits per byte with a cache of float32, {plain} without"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description="Serve text through a paged cache, and check every byte of it.")
    parser.add_argument("--model", choices=list(MODELS), default="small", help="size of the model")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--new-tokens", type=int, help="most bytes to generate for a request; 3/8 of the context")
    parser.add_argument("--requests", type=int, default=Load.requests, help="number of requests")
    parser.add_argument("--arrivals", type=float, default=Load.arrivals, help="mean number of arrivals in a step")
    parser.add_argument("--cancelled", type=float, default=Load.cancelled, help="share of requests to cancel")
    parser.add_argument("--slots", type=int, default=Load.slots, help="most requests in a step")
    parser.add_argument("--pages", type=int, help="size of the pool; a fifth of what all slots may need")
    parser.add_argument("--drafts", type=int, default=Load.drafts, help="most drafted tokens of a request in a step")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=Load.caches, help="dtypes of the cache")
    options = parser.parse_args(arguments)
    settings = dataclasses.replace(MODELS[options.model], steps=options.steps)
    most = settings.sequence_length - 2
    new_tokens = settings.sequence_length * 3 // 8 if options.new_tokens is None else options.new_tokens
    if options.steps < 2 or not 1 <= new_tokens <= most:
        parser.error(f"--steps must be at least 2, --new-tokens 1 to {most}; got {options}")
    if not 0 <= options.cancelled <= 1:
        parser.error(f"--cancelled must be a share from 0 to 1; got {options}")
    if min(options.requests, options.slots) < 1 or options.drafts < 0 or not options.arrivals > 0:
        parser.error(
            f"--requests and --slots must be at least 1, --arrivals positive, --drafts 0 or more; got {options}"
        )
    # The last byte of a text is never processed, so a text of full length needs pages for all of it but one.
    fewest = -(-(settings.sequence_length - 1) // PAGE_SIZE)
    if options.pages is not None and options.pages < fewest:
        parser.error(f"--pages must be at least {fewest}, the pages of the longest request; got {options.pages}")
    load = Load(
        requests=options.requests,
        arrivals=options.arrivals,
        cancelled=options.cancelled,
        new_tokens=new_tokens,
        slots=options.slots,
        num_pages=options.pages,
        drafts=options.drafts,
        caches=tuple(options.cache),
    )
    # By default, float32 products on a GPU use fewer bits, and round differently with and without a cache.
    with jax.default_matmul_precision("highest"):
        difference = run(settings, load, Console())
    if difference:
        sys.exit(f"the check failed: {difference}")


if __name__ == "__main__":
    main(sys.argv[1:])
