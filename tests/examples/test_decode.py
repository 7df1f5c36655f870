"""examples/decode.py at a small size: served text equals that of the model without a cache."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.demo import language_model
from blockdiag.demo.language_model import LanguageModel, Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = Settings(batch_size=2, sequence_length=56, width=16, heads=2, layers=2)
PROMPTS = [b"the value of the value of the value", b"a", b"import sys; import sys; imp", b"def f(x):\n    return "]


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def decode():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import decode
    finally:
        sys.path.remove(str(EXAMPLES))
    return decode


@pytest.fixture(scope="module")
def served(decode):
    """Return the model, its step, a server with guesses, and the texts that it serves."""
    model = LanguageModel(TINY, decode.causal_attention(TINY))
    step = decode.make_step(model, TINY)
    # There are slots for three requests, but pages for only the first two.
    server = decode.Server(step, TINY, slots=3, num_pages=8, guessed=decode.GUESSED)
    return model, step, server, server.serve(PROMPTS, 20)


def test_served_bytes_match_the_model_without_a_cache(decode, served):
    model, _, server, texts = served
    assert [len(text) for text in texts] == [len(prompt) + 20 for prompt in PROMPTS]
    assert all(text.startswith(prompt) for prompt, text in zip(PROMPTS, texts, strict=True))
    assert decode.differing_byte(model, TINY, PROMPTS, texts) == ""
    # An untrained model repeats itself, so guesses are right and save steps.
    assert 0 < server.num_steps < server.num_written


def test_greedy_text_with_other_slots_and_pages_is_the_same(decode, served):
    _, step, _, texts = served
    assert decode.Server(step, TINY, slots=3, num_pages=8).serve(PROMPTS, 20) == texts


def test_differing_byte_reports_a_wrong_byte(decode, served):
    model, _, _, texts = served
    wrong = bytearray(texts[1])
    wrong[5] ^= 1
    assert "request 1, byte 5" in decode.differing_byte(model, TINY, PROMPTS, [texts[0], bytes(wrong), *texts[2:]])


def test_cached_bits_per_byte_match_the_model(decode, served):
    model, step, _, _ = served
    _, text = language_model.split_text(language_model.english_text())
    (batch,) = language_model.batches(text, TINY, count=1, seed=5)
    plain = float(language_model.evaluation_step(model, jnp.asarray(batch))) / np.log(2)
    found = {dtype: decode.cached_bits_per_byte(step, TINY, batch, dtype) for dtype in ("float32", "float8_e4m3fn")}
    assert abs(found["float32"] - plain) < 1e-5
    assert 0 < abs(found["float8_e4m3fn"] - plain) < 0.02


def test_request_longer_than_the_pool_raises_value_error(decode, served):
    with pytest.raises(ValueError, match="`num_pages` is 1"):
        decode.Server(served[1], TINY, slots=1, num_pages=1).serve(PROMPTS[:1], 20)


def test_pages_are_handed_out_once(decode):
    allocator = decode.PageAllocator(5)
    first, second = allocator.take(33), allocator.take(17)
    assert sorted(first + second) == [0, 1, 2, 3, 4] and allocator.take(1) is None
    allocator.give_back(first)
    assert sorted(allocator.take(48)) == sorted(first)


def test_guess_continues_the_last_repeated_text(decode):
    assert decode.guess(b"one two three; one two", 6) == b" three"
    assert decode.guess(b"abab", 5) == b"ab"
    assert decode.guess(b"abcd", 3) == decode.guess(b"", 3) == decode.guess(b"abab", 0) == b""


def test_program_exits_with_an_error_when_bytes_differ(decode, served, monkeypatch):
    model, step, _, _ = served
    trained = language_model.Training(model=model, losses=[], held_out_loss=1.0, tokens_per_second=1.0)
    monkeypatch.setattr(language_model, "train", lambda *_: trained)
    monkeypatch.setattr(decode, "make_step", lambda *_: step)
    said: list[str] = []
    assert decode.run(TINY, new_tokens=12, requests=4, say=said.append) == ""
    assert sum("every byte equals that of the model without a cache" in line for line in said) == 2
    assert sum("float8" in line for line in said) == 2
    monkeypatch.setattr(decode, "differing_byte", lambda *_: "request 0")
    monkeypatch.setattr(decode.Server, "serve", lambda *_: [b""])
    assert decode.run(TINY, new_tokens=4, say=said.append) == "greedy: request 0"
    monkeypatch.setattr(decode, "run", lambda *_, **__: "greedy: request 0")
    with pytest.raises(SystemExit, match="the text differs from that of the model without a cache: greedy: request 0"):
        decode.main(["--steps", "2"])
    with pytest.raises(SystemExit):
        decode.main(["--new-tokens", "400"])
