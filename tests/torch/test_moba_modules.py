"""`MoBASelfAttention` compared with JAX and plain torch, and its behaviour as a torch module."""

import copy
import io
import re

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import blockdiag  # noqa: E402
from blockdiag.torch import MoBASelfAttention, Routing, moba_routing, rotary_tables  # noqa: E402

WIDTH, HEADS = 24, 4


def make(seed=0, **options):
    """Return a small module with random biases and convolution weights."""
    torch.manual_seed(seed)
    defaults = {"embed_dim": WIDTH, "num_heads": HEADS, "block_size": 16, "top_k": 2}
    module = MoBASelfAttention(**(defaults | options))
    for parameter in (module.in_proj_bias, module.out_proj.bias, module.key_convolution_weight):
        if parameter is not None:
            nn.init.normal_(parameter)
    return module


def tokens(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def everything(length):
    """Return a routing that selects all blocks."""
    num_blocks = -(-length // 16)
    return Routing.from_pattern(torch.ones(2, length, HEADS, num_blocks, dtype=torch.bool), block_size=16)


def rotate(x, cos, sin, is_interleaved):
    """Rotate pairs by multiplying complex numbers by cos + i sin; x is [B, T, heads, H] and tables are [T, H/2]."""
    axis = -1 if is_interleaved else -2
    first, second = x.unflatten(-1, (-1, 2) if is_interleaved else (2, -1)).unbind(axis)
    turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    return torch.stack((turned.real, turned.imag), dim=axis).flatten(-2)


def plain_attention(module, x):
    """Compute the output of `module` for x [B, T, D] in plain torch, with every block selected."""
    buffer = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    heads = (module.num_heads, module.num_key_heads, module.num_key_heads)
    query, key, value = buffer.unflatten(-1, (sum(heads), module.head_dim)).split(heads, dim=2)
    if module.key_convolution_weight is not None:
        size = module.key_convolution_size
        taps = module.key_convolution_weight.flatten(1).t()[:, None]
        channels = nn.functional.pad(key.flatten(2).transpose(1, 2), (size - 1, 0))
        mixed = nn.functional.conv1d(channels, taps, groups=taps.shape[0]).transpose(1, 2).unflatten(2, key.shape[2:])
        key = key + nn.functional.silu(mixed)
    if module.rotary is not None:
        tables = rotary_tables(x.shape[1], module.head_dim, module.rotary.theta, x.dtype)
        query, key = (rotate(one, *tables, module.rotary.interleaved) for one in (query, key))
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=module.is_causal, scale=module.scale, enable_gqa=True
    )
    return module.out_proj(output.transpose(1, 2).flatten(-2))


def value_and_gradients(module, function, x):
    """Return the output and the gradients of the input and all parameters, for a fixed cotangent."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    output = function(x)
    output.backward(tokens(*output.shape, seed=2).to(torch.bfloat16).to(output.dtype))
    return {"output": output.detach(), "x": x.grad} | {name: one.grad for name, one in module.named_parameters()}


def assert_all_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, one in actual.items():
        torch.testing.assert_close(one, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


FULL = {"key_convolution_size": 3, "rotary_max_position": 48}
REFERENCE_CASES = {
    "batch": ({}, (2, 40), {}),
    "grouped, not causal": (
        {"num_key_heads": 2, "head_dim": 10, "is_causal": False, "bias": False, "scale": 0.7},
        (2, 40),
        {},
    ),
    "convolution, rotary, mask": (FULL, (2, 40), {"key_mask": torch.arange(80).view(2, 40).remainder(3) > 0}),
    "packed": (
        FULL | {"rotary_interleaved": True, "num_key_heads": 1},
        (60,),
        {"sequence_offsets": offsets(0, 37, 37, 55)},
    ),
    "positions": ({"rotary_max_position": 9}, (2, 20), {"positions": torch.arange(40).remainder(9).view(2, 20).int()}),
}


def expected_output(module, x, call):
    """Compute the output of `module` for `x` with the JAX functions."""
    arrays = {name: jnp.asarray(value.numpy()) for name, value in call.items()}
    positions = arrays.pop("positions", None)
    packing = {name: value for name, value in arrays.items() if name == "sequence_offsets"}
    buffer = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).detach().numpy()
    heads = (module.num_heads, module.num_heads + module.num_key_heads)
    query, key, value = np.split(buffer.reshape(*x.shape[:-1], -1, module.head_dim), heads, axis=-2)
    key = jnp.asarray(key)
    if module.key_convolution_weight is not None:
        weights = jnp.asarray(module.key_convolution_weight.detach().numpy())
        key = blockdiag.key_convolution(key, weights, **packing)
    if module.rotary is not None:
        if positions is None:
            positions = np.arange(x.shape[-2])
            for start in packing.get("sequence_offsets", np.zeros(0, int)).tolist():
                positions[start:] = np.arange(x.shape[-2] - start)
        options = {"theta": module.rotary.theta}
        tables = blockdiag.rotary_tables(module.rotary.max_position, module.head_dim, **options)
        cos, sin = (table[positions] for table in tables)
        query, key = (
            blockdiag.apply_rotary(jnp.asarray(one), cos, sin, interleaved=module.rotary.interleaved)
            for one in (query, key)
        )
    attended = blockdiag.moba_attention(
        query,
        key,
        value,
        block_size=module.block_size,
        top_k=module.top_k,
        scale=module.scale,
        is_causal=module.is_causal,
        **arrays,
    )
    return module.out_proj(torch.from_numpy(np.array(attended)).flatten(-2))


@pytest.mark.parametrize("name", REFERENCE_CASES)
def test_forward_matches_the_jax_functions(name):
    options, shape, call = REFERENCE_CASES[name]
    module, x = make(**options), tokens(*shape, WIDTH)
    output = module(x, **call)
    assert output.shape == x.shape
    torch.testing.assert_close(output, expected_output(module, x, call), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"num_key_heads": 2, "scale": 0.3}, FULL, FULL | {"rotary_interleaved": True, "is_causal": False}],
    ids=["grouped", "convolution, rotary", "interleaved, not causal"],
)
def test_gradients_match_plain_torch(options):
    module = make(dtype=torch.float64, top_k=3, **options)
    x = tokens(2, 40, WIDTH, dtype=torch.float64)
    ours = value_and_gradients(module, module, x)
    plain = value_and_gradients(module, lambda x: plain_attention(module, x), x)
    assert_all_close(ours, plain, rtol=1e-9, atol=1e-9)


def test_given_routing_decides_which_blocks_are_seen():
    module, x = make(), tokens(2, 40, WIDTH)
    plain = plain_attention(module, x)
    assert (module(x) - plain).abs().max() > 1e-2
    routing = everything(40)
    wide = make(top_k=3)
    torch.testing.assert_close(wide(x, routing=routing), plain, rtol=1e-4, atol=1e-5)
    query, key, _ = module._project(x)
    own = moba_routing(query, key, block_size=16, top_k=2)
    torch.testing.assert_close(module(x, routing=own), module(x), rtol=1e-5, atol=1e-6)


def test_training_reduces_the_loss_and_changes_every_parameter():
    """The target is another module's output. The convolution weights start at 0 and must change too."""
    x = tokens(3, 40, WIDTH)
    target = make(seed=3, **FULL)(x).detach()
    torch.manual_seed(0)
    module = MoBASelfAttention(WIDTH, HEADS, block_size=16, top_k=2, **FULL)
    before = copy.deepcopy(module.state_dict())
    assert not before["key_convolution_weight"].any()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_loads_the_state_of_torch_multihead_attention():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = MoBASelfAttention(WIDTH, HEADS, block_size=16, top_k=3)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 40, WIDTH)
    mask = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


def test_saved_and_loaded_state_gives_equal_output():
    module = make(**FULL)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "in_proj_weight": (3 * WIDTH, WIDTH),
        "in_proj_bias": (3 * WIDTH,),
        "key_convolution_weight": (3, HEADS, 6),
        "out_proj.weight": (WIDTH, WIDTH),
        "out_proj.bias": (WIDTH,),
    }
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = make(seed=5, **FULL)
    x = tokens(2, 40, WIDTH)
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), module(x))


def test_rotary_tables_survive_casts_and_copies():
    module = make(**FULL)
    cos = module.rotary.cos.clone()
    module.to(torch.bfloat16)
    assert module.in_proj_weight.dtype == module.key_convolution_weight.dtype == torch.bfloat16
    assert module.rotary.cos.dtype == module.rotary.sin.dtype == torch.float32
    module.double()
    wide = rotary_tables(48, module.head_dim, dtype=torch.float64)
    assert torch.equal(module.rotary.cos, wide[0])
    assert torch.equal(module.rotary.sin, wide[1])
    assert torch.equal(module.float().rotary.cos, cos)
    other = copy.deepcopy(module)
    other.rotary.cos.zero_()
    assert torch.equal(module.rotary.cos, cos)


@pytest.mark.parametrize("assign", [False, True])
def test_module_made_on_the_meta_device_loads_state(assign):
    module, x = make(**FULL), tokens(2, 40, WIDTH)
    with torch.device("meta"):
        hollow = MoBASelfAttention(WIDTH, HEADS, block_size=16, top_k=2, **FULL)
    assert hollow.in_proj_weight.is_meta and hollow.rotary.cos.is_meta
    if not assign:
        hollow.to_empty(device="cpu")
    hollow.load_state_dict(module.state_dict(), assign=assign)
    assert torch.equal(hollow(x), module(x))


def test_bfloat16_and_autocast_are_accurate():
    module, x = make(top_k=3, **FULL), tokens(2, 40, WIDTH)
    expected = value_and_gradients(module, module, x)

    def under_autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    narrow_module = copy.deepcopy(module).to(torch.bfloat16)
    narrow = value_and_gradients(narrow_module, narrow_module, x.bfloat16())
    mixed = value_and_gradients(module, under_autocast, x)
    for results, dtype in ((narrow, torch.bfloat16), (mixed, torch.float32)):
        assert results["output"].dtype == torch.bfloat16
        for name, value in results.items():
            assert value.dtype == dtype or name == "output"
            error = (value.float() - expected[name]).norm() / expected[name].norm()
            # The gradients of key biases nearly cancel, which increases their relative error.
            assert error < (0.1 if name == "in_proj_bias" else 0.05), name


@pytest.mark.parametrize("name", ["convolution, rotary, mask", "packed"])
def test_compiled_module_has_no_graph_breaks(name):
    options, shape, call = REFERENCE_CASES[name]
    module, x = make(**options), tokens(*shape, WIDTH)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    eager = value_and_gradients(module, lambda x: module(x, **call), x)
    assert_all_close(value_and_gradients(module, lambda x: compiled(x, **call), x), eager, rtol=0, atol=0)
    torch._dynamo.reset()


def test_checkpointing_keeps_gradients_bitwise():
    module = nn.Sequential(make(**FULL), nn.GELU(), make(seed=4, is_causal=False))
    x = tokens(2, 40, WIDTH)
    kept = value_and_gradients(module, module, x)
    recomputed = value_and_gradients(module, lambda x: checkpoint(module, x, use_reentrant=False), x)
    assert_all_close(recomputed, kept, rtol=0, atol=0)


def test_repr_shows_non_default_options():
    text = repr(make(scale=0.5, bias=False, **FULL))
    for part in ("num_heads=4", "block_size=16", "top_k=2", "key_convolution_size=3", "max_position=48", "scale=0.5"):
        assert part in text
    assert "rotary" not in repr(make()) and "convolution" not in repr(make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 0}, "`embed_dim` must be a positive integer, got 0"),
        ({"num_heads": 5}, "`embed_dim` must be a multiple of `num_heads` where `head_dim` is None, got 24 and 5"),
        ({"num_key_heads": 3}, "`num_heads` must be a multiple of `num_key_heads`, got 4 and 3; query head"),
        ({"block_size": 8}, "`block_size` must be a multiple of 16 from 16 to 4096, known when tracing, got 8"),
        ({"top_k": 65}, "`top_k` must be an integer of 1..64, known when tracing, got 65"),
        ({"key_convolution_size": 9}, "`key_convolution_size` must be None or an integer of 1..8, got 9"),
        ({"key_convolution_size": 0}, "`key_convolution_size` must be a positive integer, got 0"),
        ({"scale": -1.0}, "`scale` must be a positive number, known when tracing, got -1.0"),
        ({"is_causal": None}, "`is_causal` must be True or False"),
        ({"via": "triton"}, "`via` must be None or 'jax', got 'triton'"),
        ({"dtype": torch.float8_e5m2}, "`dtype` must have one of the dtypes"),
        ({"rotary_max_position": 0}, "`rotary_max_position` must be a positive integer, got 0"),
        ({"rotary_max_position": 8, "rotary_theta": 0.0}, "`rotary_theta` must be positive, got 0.0"),
        ({"rotary_max_position": 8, "head_dim": 5}, "`head_dim` must be even"),
    ],
    ids=str,
)
def test_invalid_options_raise_value_error(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


@pytest.mark.parametrize(
    ("options", "x", "call", "message"),
    [
        ({}, torch.ones(4), {}, "`x` must have shape [B, T, 24] or [T, 24], got (4,); reshape"),
        ({}, torch.ones(4, 23), {}, "`x` must have shape [B, T, 24] or [T, 24], got (4, 23); reshape"),
        ({}, torch.ones(4, WIDTH).double(), {}, "must have the dtype of `x`, torch.float64, got torch.float32; cast"),
        (
            {},
            torch.ones(4, WIDTH),
            {"positions": offsets(0, 1, 2, 3)},
            "but the module has none; create the module with",
        ),
        ({}, torch.ones(4, WIDTH), {"key_mask": torch.ones(3).bool()}, "`key_mask` must have shape (4,)"),
        ({"rotary_max_position": 3}, torch.ones(4, WIDTH), {}, "tables must have a row for every position, got 3 rows"),
        (
            {"rotary_max_position": 3},
            torch.ones(8, WIDTH),
            {"sequence_offsets": offsets(0, 3, 7)},
            "tables must have a row for every position, got 3 rows for a sequence of 4 tokens",
        ),
        (
            {"rotary_max_position": 3},
            torch.ones(4, WIDTH),
            {"positions": offsets(0, 1, 2, 3)},
            "`rotary.positions` must lie in [0, 3)",
        ),
    ],
    ids=["rank", "channels", "dtype", "positions", "mask", "tables", "packed tables", "positions beyond"],
)
def test_invalid_inputs_raise_value_error(options, x, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)(x, **call)
