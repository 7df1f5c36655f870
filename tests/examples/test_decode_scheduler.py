"""The scheduler of examples/decode.py under load, with a device that checks what every request reads from its pages."""

import collections
import dataclasses
import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTORS = np.random.default_rng(1).integers(1, 1 << 62, 512).astype(np.uint64) | np.uint64(1)
PLACES = np.arange(len(FACTORS))
MIX, ZERO = np.uint64(0x9E3779B97F4A7C15), np.uint64(0)


@pytest.fixture(scope="module")
def decode():
    """Return the modules of the example that need no JAX."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return SimpleNamespace(
            scheduler=importlib.import_module("decode_scheduler"), pages=importlib.import_module("decode_pages")
        )
    finally:
        sys.path.remove(str(EXAMPLES))


def hash_prefixes(text: bytes, first: int = 0, before: np.uint64 = ZERO) -> np.ndarray:
    """Return a hash of each prefix of a text, uint64, from its position and the hash of the text before it."""
    places = FACTORS[first : first + len(text)]
    return before + np.cumsum(np.frombuffer(text, np.uint8).astype(np.uint64) * places, dtype=np.uint64)


def next_bytes(hashes: np.ndarray) -> np.ndarray:
    """Return the byte that follows each prefix of a text: 97 or 98, by the hash of the prefix."""
    return 97 + ((hashes * MIX) >> np.uint64(63)).astype(np.int32)


def generate(prompt: bytes, count: int) -> bytes:
    """Return the prompt, followed by `count` bytes that are generated one by one, without pages."""
    text, factors, size = bytearray(prompt), FACTORS.tolist(), 1 << 64
    total = sum(byte * factor for byte, factor in zip(text, factors, strict=False))
    for place in range(len(prompt), len(prompt) + count):
        text.append(97 + (total * int(MIX) % size >> 63))
        total += text[-1] * factors[place]
    return bytes(text)


class FakeDevice:
    """A device whose pages hold a hash of all text up to each token, as the keys of a model depend on all of it.

    New hashes and predictions are computed from the hashes that a request reads from its pages.
    """

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        self.page_size = scheduler.pool.page_size
        self.pages = np.zeros((len(scheduler.pool.owners), self.page_size), np.uint64)
        self.wanted: dict[object, np.ndarray] = {}

    def wanted_hashes(self, request) -> np.ndarray:
        """Return the hashes of the whole text of a request, as it is without pages."""
        if request not in self.wanted:
            prompt = bytes(request.text[: request.prompt_length])
            self.wanted[request] = hash_prefixes(generate(prompt, request.goal - len(prompt)))
        return self.wanted[request]

    def run(self, batch) -> np.ndarray:
        """Write the new tokens of a batch, check what every request reads, and return the predictions of all rows."""
        written, owners = [], self.scheduler.pool.owners
        predictions = np.zeros(len(batch.tokens), np.int32)
        for row, (request, begin, end) in enumerate(self.rows(batch)):
            length = int(batch.lengths[row])
            first = length - (end - begin)
            assert batch.page_table[row, : len(request.pages)].tolist() == request.pages
            pages, places = PLACES[:length] // self.page_size, PLACES[:length] % self.page_size
            pages = batch.page_table[row, pages]
            read = self.pages[pages[:first], places[:first]]
            new = bytes(batch.tokens[begin:end].tolist())
            hashes = hash_prefixes(new, first, read[-1] if first else ZERO)
            self.pages[pages[first:], places[first:]] = hashes
            written += set(pages[first:].tolist())
            predictions[begin:end] = next_bytes(hashes)
            assert first == request.cached and request.text[first : first + batch.known[row]] == new[: batch.known[row]]
            is_own = (read == self.wanted_hashes(request)[:first]).all()
            assert is_own, f"request {request.number} reads pages of other text"
        assert len(written) == len(set(written)), "two requests write to one page"
        assert all(owners[page] == 1 for page in written), "a request writes to a shared page"
        return predictions

    @staticmethod
    def rows(batch):
        return zip(batch.requests, batch.offsets, batch.offsets[1:], strict=False)


@dataclasses.dataclass
class Drawn:
    """A drawn request: when it arrives and is cancelled, counted in steps, and what it asks for."""

    arrives: int
    cancelled: int | None
    prompt: bytes
    new_tokens: int


def draw(seed: int, count: int, *, max_length: int, arrivals: float) -> list[Drawn]:
    """Draw requests, of which two thirds begin with one of a few common texts."""
    generator = np.random.default_rng(seed)
    common = [generator.integers(97, 99, int(length)).astype(np.uint8).tobytes() for length in (9, 17, 20, 32)]
    drawn = []
    for arrives in np.cumsum(generator.exponential(1 / arrivals, count)).astype(int).tolist():
        prefix = common[generator.integers(4)] if generator.random() < 0.67 else b""
        prefix = prefix[: max_length // 2]
        longest = max_length - len(prefix) - 1
        # Many short requests and a few long ones.
        length = 1 + int(min(generator.geometric(0.12), longest - 1))
        prompt = prefix + generator.integers(97, 99, length).astype(np.uint8).tobytes()
        new_tokens = int(min(generator.geometric(0.08), max_length - len(prompt)))
        cancelled = arrives + int(generator.geometric(0.1)) - 1 if generator.random() < 0.15 else None
        drawn.append(Drawn(arrives, cancelled, prompt, new_tokens))
    return drawn


def check_pool(scheduler) -> None:
    """Check that the owners of pages are the running requests, and that every page is in exactly one state."""
    pool = scheduler.pool
    owners = collections.Counter(itertools.chain.from_iterable(request.pages for request in scheduler.running))
    assert pool.owners == [owners[page] for page in range(len(pool.owners))]
    assert pool.in_use == len(owners) and pool.available + len(owners) == len(pool.owners)
    assert not any(request.pages or request.cached for request in scheduler.waiting)


def serve(decode, drawn: list[Drawn], *, checks_pool: bool = True, **sizes):
    """Serve requests with all checks; return the scheduler, the requests, and the numbers of those that ended."""
    ticks = itertools.count()
    scheduler = decode.scheduler.Scheduler(**sizes, clock=lambda: float(next(ticks)))
    device, requests, finished = FakeDevice(scheduler), [], []
    arriving, leaving = collections.deque(drawn), collections.defaultdict(list)
    for step in itertools.count():
        if not arriving and scheduler.is_idle:
            break
        assert step < 100 * len(drawn) + 1000, "the scheduler makes no progress"
        while arriving and arriving[0].arrives <= step:
            one = arriving.popleft()
            requests.append(scheduler.submit(one.prompt, one.new_tokens))
            if one.cancelled is not None:
                leaving[one.cancelled].append(requests[-1])
        for request in leaving.pop(step, []):
            scheduler.cancel(request)
        batch = scheduler.plan()
        if batch is None:
            assert scheduler.is_idle
            continue
        assert batch.requests and batch.offsets[len(batch.requests)] == batch.offsets[-1] <= len(batch.tokens)
        assert len(batch.tokens) in (sizes["budget"], sizes["slots"] * (1 + sizes["drafts"]))
        assert np.diff(batch.offsets)[: len(batch.requests)].min() >= 1
        assert np.diff(batch.offsets).max() <= batch.most_tokens
        assert len(set(batch.requests)) == len(batch.requests) <= len(scheduler.running) <= sizes["slots"]
        # The oldest requests run, even after preemptions.
        numbers = [request.number for request in (*scheduler.running, *scheduler.waiting)]
        assert numbers == sorted(numbers)
        # No request that decodes waits for a prompt.
        assert all(request in batch.requests for request in scheduler.running if request.pending == 1)
        finished += scheduler.complete(batch, device.run(batch))
        if checks_pool and (step % 16 == 0 or len(drawn) < 1000):
            check_pool(scheduler)
    return scheduler, requests, finished


def check_outcome(decode, drawn, scheduler, requests, finished) -> None:
    """Check that no request and no page is lost, and all bytes."""
    status, counters = decode.scheduler.Status, scheduler.counters
    assert [request.number for request in requests] == list(range(len(drawn)))
    assert len({request.number for request in finished}) == len(finished) == counters.finished
    assert {request.number for request in finished} == {
        request.number for request in requests if request.status is status.FINISHED
    }
    assert counters.finished + counters.cancelled == counters.submitted == len(drawn)
    for one, request in zip(drawn, requests, strict=True):
        assert request.status in (status.FINISHED, status.CANCELLED)
        assert one.cancelled is not None or request.status is status.FINISHED
        wanted = generate(one.prompt, one.new_tokens)
        assert len(one.prompt) <= len(request.text) <= len(wanted)
        assert bytes(request.text) == wanted[: len(request.text)]
        assert request.status is status.CANCELLED or len(request.text) == len(wanted)
    assert counters.generated == sum(len(request.text) - request.prompt_length for request in requests)
    check_pool(scheduler)
    assert scheduler.pool.owners == [0] * len(scheduler.pool.owners) and scheduler.pool.in_use == 0
    # Every page can be taken again.
    taken = [scheduler.pool.take() for _ in scheduler.pool.owners]
    assert sorted(taken) == list(range(len(taken))) and scheduler.pool.take() is None


@pytest.mark.parametrize("drafts", [0, 3])
def test_ten_thousand_requests_lose_no_request_and_no_page(decode, drafts):
    drawn = draw(drafts, 10_000, max_length=96, arrivals=1.0)
    sizes = dict(slots=16, budget=96, num_pages=40, page_size=8, max_length=96, drafts=drafts)
    scheduler, requests, finished = serve(decode, drawn, **sizes)
    check_outcome(decode, drawn, scheduler, requests, finished)
    # The load reaches every part of the scheduler.
    counters = scheduler.counters
    assert counters.cancelled > 500 and counters.preempted > 100 and counters.shared_tokens > 10_000
    assert counters.most_pages == 40 and counters.decode_steps < counters.steps
    assert (counters.drafted > counters.accepted > 1000) == (drafts > 0)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(slots=1, budget=1, num_pages=12, page_size=4, max_length=48, drafts=0),
        dict(slots=5, budget=30, num_pages=47, page_size=1, max_length=48, drafts=5),
        dict(slots=6, budget=25, num_pages=16, page_size=3, max_length=48, drafts=2),
        dict(slots=8, budget=64, num_pages=1, page_size=48, max_length=48, drafts=7),
        dict(slots=4, budget=200, num_pages=100, page_size=5, max_length=48, drafts=1),
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
def test_load_with_other_sizes(decode, sizes):
    drawn = draw(7, 200, max_length=48, arrivals=0.5)
    check_outcome(decode, drawn, *serve(decode, drawn, **sizes))


def test_fake_device_detects_a_page_that_is_released_early(decode, monkeypatch):
    pool, drawn = decode.pages.PagePool, draw(3, 200, max_length=48, arrivals=1.0)
    sizes = dict(slots=8, budget=32, num_pages=16, page_size=4, max_length=48, drafts=0)
    share = pool.share

    def share_without_owner(self, prefix, text):
        found = share(self, prefix, text)
        if found is not None and self.owners[found.page] > 1:
            self.owners[found.page] -= 1
        return found

    monkeypatch.setattr(pool, "share", share_without_owner)
    with pytest.raises(AssertionError, match=r"to a shared page|to one page|of other text"):
        serve(decode, drawn, checks_pool=False, **sizes)


def test_fake_device_detects_a_page_that_is_shared_after_another_prefix(decode, monkeypatch):
    pool, drawn = decode.pages.PagePool, draw(3, 200, max_length=48, arrivals=1.0)
    sizes = dict(slots=8, budget=32, num_pages=16, page_size=4, max_length=48, drafts=0)
    share, finish = pool.share, pool.finish
    monkeypatch.setattr(pool, "share", lambda self, prefix, text: share(self, 0, text))
    monkeypatch.setattr(pool, "finish", lambda self, page, prefix, text: finish(self, page, 0, text))
    with pytest.raises(AssertionError, match="reads pages of other text"):
        serve(decode, drawn, checks_pool=False, **sizes)


def new_scheduler(decode, **sizes):
    defaults = dict(slots=2, budget=8, num_pages=8, page_size=4, max_length=24, drafts=0)
    return decode.scheduler.Scheduler(**defaults | sizes)


def run_steps(scheduler, device, count: int) -> list:
    """Run some steps; return the batches."""
    batches = []
    for _ in range(count):
        batches.append(scheduler.plan())
        scheduler.complete(batches[-1], device.run(batches[-1]))
    return batches


def test_prompt_is_read_in_chunks_beside_a_request_that_decodes(decode):
    scheduler = new_scheduler(decode)
    device = FakeDevice(scheduler)
    first = scheduler.submit(b"abc", 10)
    run_steps(scheduler, device, 1)
    second = scheduler.submit(b"abba" * 4, 2)
    batches = run_steps(scheduler, device, 3)
    assert [batch.known for batch in batches] == [[1, 7], [1, 7], [1, 2]]
    assert [batch.requests for batch in batches] == [[first, second]] * 3
    assert (len(first.text), len(second.text)) == (7, 17)


def test_equal_prefix_is_read_once(decode):
    scheduler = new_scheduler(decode, budget=24)
    device = FakeDevice(scheduler)
    first = scheduler.submit(b"abbaabab" + b"a", 8)
    run_steps(scheduler, device, 1)
    second = scheduler.submit(b"abbaabab" + b"b", 8)
    third = scheduler.submit(b"bbbaabab" + b"b", 8)
    (batch,) = run_steps(scheduler, device, 1)
    # The third request must wait for a slot.
    assert batch.known == [1, 1] and second.pages[:2] == first.pages[:2] and not third.pages
    assert [scheduler.pool.owners[page] for page in second.pages] == [2, 2, 1]
    scheduler.cancel(first)
    (batch,) = run_steps(scheduler, device, 1)
    # It has equal text in its second page, but not before it.
    assert batch.known == [1, 9] and not set(third.pages) & set(second.pages)


def test_prompt_that_is_wholly_cached_still_processes_its_last_token(decode):
    scheduler = new_scheduler(decode)
    device = FakeDevice(scheduler)
    first = scheduler.submit(b"abba" * 2, 1)
    run_steps(scheduler, device, 1)
    second = scheduler.submit(b"abba" * 2, 1)
    (batch,) = run_steps(scheduler, device, 1)
    assert batch.known == [4] and first.text == second.text
    assert scheduler.counters.shared_tokens == 4 and scheduler.pool.idle == 2


def test_newest_request_is_preempted_and_continues_later(decode):
    scheduler = new_scheduler(decode, num_pages=5)
    device = FakeDevice(scheduler)
    requests = [scheduler.submit(prompt, 12) for prompt in (b"aba", b"bab")]
    sizes = []
    while not scheduler.is_idle:
        run_steps(scheduler, device, 1)
        sizes.append(len(scheduler.running))
    assert scheduler.counters.preempted == 1 and sizes[0] == 2 and 1 in sizes
    assert [bytes(request.text) for request in requests] == [generate(b"aba", 12), generate(b"bab", 12)]


def test_cancelled_requests_keep_their_text_and_release_their_pages(decode):
    scheduler = new_scheduler(decode, slots=1)
    device, status = FakeDevice(scheduler), decode.scheduler.Status
    running, waiting = scheduler.submit(b"ab", 9), scheduler.submit(b"ab", 9)
    run_steps(scheduler, device, 3)
    for request in (running, waiting, running):
        scheduler.cancel(request)
    assert scheduler.plan() is None and scheduler.is_idle
    assert running.status is waiting.status is status.CANCELLED and scheduler.counters.cancelled == 2
    assert bytes(running.text) == generate(b"ab", 3) and bytes(waiting.text) == b"ab"
    assert scheduler.pool.in_use == 0
    finished = scheduler.submit(b"ab", 1)
    run_steps(scheduler, device, 1)
    scheduler.cancel(finished)
    assert scheduler.plan() is None and finished.status is status.FINISHED and scheduler.counters.cancelled == 2


def test_drafts_are_kept_up_to_the_first_wrong_one(decode):
    scheduler = new_scheduler(decode, slots=1, drafts=3)
    request = scheduler.submit(b"abcdabc", 6)
    batch = scheduler.plan()
    assert bytes(batch.tokens[batch.offsets[0] : batch.offsets[1]].tolist()) == b"abcdabcd" and batch.known == [7]
    scheduler.complete(batch, np.array([0, 0, 0, 0, 0, 0, ord("d"), ord("x")], np.int32))
    assert request.text == b"abcdabcdx" and request.cached == 8
    batch = scheduler.plan()
    assert batch.known == [1] and batch.offsets[-1] == 1
    scheduler.complete(batch, np.array([ord("a"), 0, 0, 0], np.int32))
    assert request.text == b"abcdabcdxa"
    batch = scheduler.plan()
    assert batch.offsets[-1] == 1, "only one occurrence of the last two bytes"
    scheduler.complete(batch, np.array([ord("b"), 0, 0, 0], np.int32))
    batch = scheduler.plan()
    # Two bytes are missing, and the step itself predicts one.
    assert bytes(batch.tokens[:2].tolist()) == b"bc" and batch.offsets[-1] == 2
    (ended,) = scheduler.complete(batch, np.array([ord("c"), ord("y"), 0, 0], np.int32))
    assert ended is request and request.text == b"abcdabcdxabcy"


def test_least_recently_used_pages_are_reused_first_and_ends_of_texts_before_beginnings(decode):
    pool = decode.pages.PagePool(4, 2)
    pages = [pool.take() for _ in range(4)]
    old, new = pages[:2], pages[2:]
    prefix = pool.finish(old[0], decode.pages.START, b"ab")
    pool.finish(old[1], prefix, b"cd")
    assert pool.finish(new[0], decode.pages.START, b"ab") == prefix, "equal text has one number"
    pool.finish(new[0], prefix + 100, b"ef")
    pool.release(old)
    pool.release(new)
    assert pool.idle == 3 and pool.in_use == 0
    assert pool.share(decode.pages.START, b"ab") == (old[0], prefix) and pool.in_use == 1
    # First the page without finished text, then the end of the older text.
    assert [pool.take(), pool.take(), pool.take(), pool.take()] == [new[1], old[1], new[0], None]
    assert pool.share(prefix, b"cd") is None


def test_page_is_not_found_after_other_text_in_the_place_of_its_predecessor(decode):
    pool, start = decode.pages.PagePool(3, 2), decode.pages.START
    first, own, end = (pool.take() for _ in range(3))
    prefix = pool.finish(first, start, b"ab")
    assert pool.finish(own, start, b"ab") == prefix
    pool.finish(end, prefix, b"cd")
    # The page that the index has for the beginning is reused, while the text with its own copy goes on.
    pool.release([first])
    assert pool.take() == first
    other = pool.finish(first, start, b"xy")
    assert pool.share(other, b"cd") is None
    assert pool.share(start, b"ab") is None and pool.finish(own, start, b"ab") not in (prefix, other)


def test_draft_continues_the_last_repeated_text(decode):
    draft = decode.scheduler.draft
    assert draft(b"one two three; one two", 6) == b" three"
    assert draft(b"abab", 5) == b"ab"
    assert draft(b"abcd", 3) == draft(b"", 3) == draft(b"abab", 0) == b""


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        (b"", 4, "needs a prompt and new tokens, got 0 and 4"),
        (b"a", 0, "needs a prompt and new tokens, got 1 and 0"),
        (b"a" * 20, 5, "`max_length` is 24: too small for a request of 25 bytes"),
        (b"a" * 10, 4, "`num_pages` is 3: too few for a request of 14 bytes"),
    ],
)
def test_request_that_can_never_be_served_raises_value_error(decode, prompt, new_tokens, message):
    scheduler = new_scheduler(decode, num_pages=3)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(prompt, new_tokens)
    assert scheduler.is_idle and scheduler.counters.submitted == 0


def test_scheduler_imports_neither_jax_nor_the_library():
    program = "import sys, decode_scheduler; sys.exit(bool({'jax', 'blockdiag'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, check=False).returncode == 0


def test_budget_below_the_rows_of_decoding_raises_value_error(decode):
    with pytest.raises(ValueError, match="`budget` is 8, but 3 slots with 2 drafts need 9"):
        new_scheduler(decode, slots=3, drafts=2)
