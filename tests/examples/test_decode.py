"""examples/decode.py at a small size: served text equals that of the model without a cache."""

import importlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from blockdiag.demo import language_model
from blockdiag.demo.language_model import LanguageModel, Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = Settings(batch_size=2, sequence_length=56, width=16, heads=2, layers=2)
# For the load tests. With one layer, inputs of the convolution do not depend on cached keys; `TINY` covers that.
FLAT = Settings(batch_size=2, sequence_length=64, width=16, heads=2, layers=1)
PROMPTS = [b"the value of the value of the value", b"a", b"import sys; import sys; imp", b"def f(x):\n    return "]
SIZES = dict(slots=3, budget=24, num_pages=7)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example():
    """Return the modules of the example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        names = ("pages", "scheduler", "model", "server", "table")
        modules = {name: importlib.import_module(f"decode_{name}") for name in names}
        return SimpleNamespace(main=importlib.import_module("decode"), **modules)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def models(example):
    """Return each model with its step."""
    models = {settings: LanguageModel(settings, example.model.causal_attention(settings)) for settings in (TINY, FLAT)}
    return {settings: (model, example.model.make_step(model, settings)) for settings, model in models.items()}


def uncached(example, model, settings, dtype):
    """Return the model without a cache, with keys and values rounded as in a cache of a dtype."""
    return language_model.with_attention(model, settings, example.model.causal_attention(settings, dtype))


def serve_all(server, prompts, new_tokens):
    requests = [server.submit(prompt, new_tokens) for prompt in prompts]
    while not server.scheduler.is_idle:
        server.advance()
    return requests


@pytest.fixture(scope="module")
def served(example, models):
    """Return a server with drafts, and the requests that it served."""
    server = example.server.Server(models[TINY][1], TINY, **SIZES, drafts=7)
    return server, serve_all(server, PROMPTS, 20)


def test_served_bytes_match_the_model_without_a_cache(example, models, served):
    server, requests = served
    assert [len(request.text) for request in requests] == [len(prompt) + 20 for prompt in PROMPTS]
    assert all(request.text.startswith(prompt) for prompt, request in zip(PROMPTS, requests, strict=True))
    assert example.main.compare_bytes(models[TINY][0], TINY, requests).margin == 0
    counters = server.scheduler.counters
    # An untrained model repeats itself, so some drafts are right and save steps.
    assert counters.generated == 80 and 0 < counters.accepted <= counters.drafted
    assert counters.preempted > 0 and counters.cancelled == 0


def test_greedy_text_with_other_slots_and_pages_is_the_same(example, models, served):
    server = example.server.Server(models[TINY][1], TINY, slots=2, budget=5, num_pages=4)
    requests = serve_all(server, PROMPTS, 20)
    assert [request.text for request in requests] == [request.text for request in served[1]]


def test_shared_prefix_with_other_dtypes_gives_the_same_bytes(example, models):
    model, step = models[TINY]
    server = example.server.Server(step, TINY, **SIZES, dtype="float8_e4m3fn")
    prompts = [PROMPTS[0] + end for end in (b"s", b" of", b"")]
    requests = serve_all(server, prompts[:1], 2) + serve_all(server, prompts[1:], 12)
    # Two whole pages of the first prompt, for each of the others.
    assert server.scheduler.counters.shared_tokens == 64
    assert example.main.compare_bytes(uncached(example, model, TINY, "float8_e4m3fn"), TINY, requests).margin < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_load_loses_nothing_and_bytes_match(example, models, dtype):
    model, step = models[FLAT]
    drafts = 3 if dtype == "float32" else 0
    load = example.main.Load(requests=100, arrivals=0.8, cancelled=0.2, new_tokens=20, slots=6, drafts=drafts)
    server = example.server.Server(step, FLAT, slots=6, budget=40, num_pages=10, drafts=drafts, dtype=dtype)
    arrivals = example.main.draw_arrivals(FLAT, load)
    with example.table.Report(server.scheduler, Console(file=io.StringIO()), "load") as report:
        requests = example.main.serve(server, arrivals, report)
    assert example.main.loss_of_requests(server, requests, 100) == ""
    assert [bytes(request.text[: request.prompt_length]) for request in requests] == [one.prompt for one in arrivals]
    # Other processors may round a key that lies between two numbers of a smaller cache to the other one.
    tie = 0.0 if dtype == "float32" else 1e-3
    assert example.main.compare_bytes(uncached(example, model, FLAT, dtype), FLAT, requests).margin <= tie
    if "float8" in dtype:
        assert example.main.compare_bytes(model, FLAT, requests).margin > 0.01, "rounding must change some bytes"
    counters = server.scheduler.counters
    assert counters.cancelled > 5 and counters.preempted > 0 and counters.shared_tokens > 100
    assert counters.finished == 100 - counters.cancelled and counters.generated > 500


def test_compare_bytes_reports_a_wrong_byte(example, models, served):
    requests = served[1]
    requests[1].text[5] ^= 1
    try:
        compared = example.main.compare_bytes(models[TINY][0], TINY, requests)
    finally:
        requests[1].text[5] ^= 1
    assert compared.margin > 0 and "request 1, byte 5" in compared.place


def test_model_without_a_cache_rounds_as_the_cache_does(example, models):
    model, step = models[TINY]
    _, text = language_model.split_text(language_model.english_text())
    (batch,) = language_model.batches(text, TINY, count=1, seed=5)
    plain = float(language_model.evaluation_step(model, jnp.asarray(batch))) / np.log(2)
    for dtype in ("float32", "float8_e4m3fn"):
        rounded = uncached(example, model, TINY, dtype)
        wanted = float(language_model.evaluation_step(rounded, jnp.asarray(batch))) / np.log(2)
        found = example.main.cached_bits_per_byte(step, TINY, batch, dtype)
        assert abs(found - wanted) < 1e-5
        assert (1e-5 < abs(found - plain) < 0.02) == (dtype != "float32")


def test_lost_requests_and_pages_are_reported(example, models):
    server = example.server.Server(models[FLAT][1], FLAT, slots=6, budget=40, num_pages=10)
    requests = [server.submit(b"abc", 3)]
    assert example.main.loss_of_requests(server, requests, 2) == "1 of 2 requests arrived"
    server.advance()
    assert "request 0 is RUNNING with 4 of 6 bytes" in example.main.loss_of_requests(server, requests, 1)
    server.cancel(requests[0])
    server.advance()
    assert example.main.loss_of_requests(server, requests, 1) == ""
    server.scheduler.pool.take()
    assert "1 pages are in use without a request" in example.main.loss_of_requests(server, requests, 1)


def test_report_is_a_table_in_a_terminal_and_lines_elsewhere(example):
    seconds = iter(range(100))
    scheduler = example.scheduler.Scheduler(
        slots=2, budget=8, num_pages=4, page_size=4, max_length=16, drafts=1, clock=lambda: float(next(seconds))
    )
    scheduler.submit(b"ab", 2)
    scheduler.submit(b"cd", 2)
    batch = scheduler.plan()
    scheduler.complete(batch, np.full(8, 97, np.int32))
    for is_terminal in (True, False):
        file, now = io.StringIO(), iter((0.0, 0.0, 0.1, 10.0, 10.0, 20.0, 20.0))
        console = Console(file=file, force_terminal=is_terminal, width=100)
        with example.table.Report(scheduler, console, "title", clock=lambda now=now: next(now)) as report:
            report.update()
            first = file.getvalue()
            report.update()
        text = file.getvalue()
        assert "title" not in first and "title" in text
        assert ("│" in text) == is_terminal and ("title: requests: 0 waiting" in text) == (not is_terminal)
        for figure in ("2 running, 0 finished, 0 cancelled", "2 of 4, 2 at most", "1,500.0 ms median", "4 processed"):
            assert figure in text
        assert "0 generated" in text


def test_program_exits_with_an_error_when_a_check_fails(example, models, monkeypatch):
    main, file = example.main, io.StringIO()
    model, step = models[FLAT]
    trained = language_model.Training(model=model, losses=[], held_out_loss=1.0, tokens_per_second=1.0)
    monkeypatch.setattr(language_model, "train", lambda *_: trained)
    monkeypatch.setattr(main, "make_step", lambda *_: step)
    load = main.Load(requests=8, arrivals=1.0, new_tokens=12, slots=6, drafts=3, caches=("float32",))
    assert main.run(FLAT, load, Console(file=file)) == ""
    assert file.getvalue().count("every byte equals that of the model without a cache\n") == 2
    assert file.getvalue().count("cache of float8") == 2
    assert "the shortest finished prompt" in file.getvalue()
    monkeypatch.setattr(main, "compare_bytes", lambda *_: main.Comparison(float("nan"), "request 3, byte 4: 5"))
    assert "cache of float32, greedy: request 3, byte 4: 5, but another" in main.run(FLAT, load, Console(file=file))
    monkeypatch.setattr(main, "loss_of_requests", lambda *_: "a page is lost")
    assert main.run(FLAT, load, Console(file=file)) == "cache of float32, greedy: a page is lost"
    monkeypatch.setattr(main, "run", lambda *_: "a page is lost")
    with pytest.raises(SystemExit, match="the check failed: a page is lost"):
        main.main(["--steps", "2"])


@pytest.mark.parametrize("arguments", ["--new-tokens 400", "--steps 1", "--requests 0", "--arrivals 0", "--cache int8"])
def test_wrong_option_ends_the_program(example, arguments, capsys):
    with pytest.raises(SystemExit):
        example.main.main(arguments.split())
    assert "error: " in capsys.readouterr().err
