"""`BlockDiagonalSelfAttention` compared with JAX and plain torch, and its behaviour as a torch module."""

import copy
import io
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import blockdiag
from blockdiag.torch import BlockDiagonalSelfAttention, rotary_tables

WIDTH, HEADS = 24, 4


def make(seed=0, **options):
    """Return a small module with random biases."""
    torch.manual_seed(seed)
    defaults = {"embed_dim": WIDTH, "num_heads": HEADS, "block_size": 8}
    module = BlockDiagonalSelfAttention(**(defaults | options))
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return module


def tokens(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def block_mask(length, block_size, is_causal):
    block = torch.arange(length) // block_size
    mask = block[:, None] == block[None, :]
    return mask.tril() if is_causal else mask


def rotate(x, cos, sin, is_interleaved):
    """Rotate pairs by multiplying complex numbers by cos + i sin; x is [B, T, heads, H] and tables are [T, H/2]."""
    axis = -1 if is_interleaved else -2
    shape = (-1, 2) if is_interleaved else (2, -1)
    first, second = x.unflatten(-1, shape).unbind(axis)
    turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    return torch.stack((turned.real, turned.imag), dim=axis).flatten(-2)


def plain_attention(module, x):
    """Compute the output of `module` for x [B, T, D] in plain torch with a dense mask."""
    buffer = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    query_heads, key_heads = module.num_heads, module.num_key_heads
    buffer = buffer.unflatten(-1, (query_heads + 2 * key_heads, module.head_dim))
    parts = list(buffer.split((query_heads, key_heads, key_heads), dim=2))
    if module.rotary_max_position is not None:
        tables = rotary_tables(x.shape[1], module.head_dim, module.rotary_theta, x.dtype)
        for index, name in enumerate(("query", "key", "value")):
            if name in module.rotary_apply_to:
                parts[index] = rotate(parts[index], *tables, module.rotary_interleaved)
    query, key, value = (part.transpose(1, 2) for part in parts)
    mask = block_mask(x.shape[1], module.block_size, module.is_causal)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=module.scale, enable_gqa=True
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


REFERENCE_CASES = {
    "batch": ({}, (2, 20), {}),
    "grouped": ({"num_key_heads": 2, "head_dim": 10, "is_causal": True, "bias": False, "scale": 0.7}, (2, 20), {}),
    "rotary": ({"rotary_max_position": 20, "rotary_theta": 100.0, "is_causal": True}, (2, 20), {}),
    "interleaved": (
        {"rotary_max_position": 30, "rotary_interleaved": True, "rotary_apply_to": ("query", "key", "value")},
        (2, 20),
        {},
    ),
    "positions": ({"rotary_max_position": 9}, (2, 20), {"positions": torch.arange(40).remainder(9).view(2, 20)}),
    "packed": ({"rotary_max_position": 16}, (30,), {"sequence_offsets": torch.tensor([0, 13, 13, 28])}),
    "lengths": ({"is_causal": True}, (30,), {"block_lengths": torch.tensor([5, 8, 0, 7, 8])}),
}


@pytest.mark.parametrize(("options", "shape", "call"), REFERENCE_CASES.values(), ids=REFERENCE_CASES)
def test_forward_matches_the_jax_reference(options, shape, call):
    module, x = make(**options), tokens(*shape, WIDTH)
    call = {name: value.to(torch.int32) for name, value in call.items()}
    in_weight, in_bias = module.in_proj_weight.detach().numpy(), module.in_proj_bias
    arrays = {name: jnp.asarray(value.numpy()) for name, value in call.items()}
    positions = arrays.pop("positions", None)
    rotary = None
    if module.rotary_max_position is not None:
        rotary = blockdiag.Rotary(
            *blockdiag.rotary_tables(module.rotary_max_position, module.head_dim, theta=module.rotary_theta),
            positions=positions,
            interleaved=module.rotary_interleaved,
            apply_to=module.rotary_apply_to,
        )
    attended = blockdiag.fused_qkv_block_attention(
        jnp.asarray(x.numpy()),
        jnp.asarray(in_weight.T),
        None if in_bias is None else jnp.asarray(in_bias.detach().numpy()),
        query_heads=module.num_heads,
        key_heads=module.num_key_heads,
        head_dim=module.head_dim,
        block_size=module.block_size,
        rotary=rotary,
        scale=module.scale,
        is_causal=module.is_causal,
        implementation="reference",
        **arrays,
    )
    out_bias = 0.0 if module.out_proj.bias is None else module.out_proj.bias.detach().numpy()
    flat = np.asarray(attended).reshape(*shape, -1)
    expected = flat @ module.out_proj.weight.detach().numpy().T + out_bias
    output = module(x, **call)
    assert output.shape == x.shape
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_heads": 2, "head_dim": 10, "is_causal": True, "scale": 0.3},
        {"rotary_max_position": 20, "is_causal": True},
        {"rotary_max_position": 20, "rotary_interleaved": True, "rotary_apply_to": ("query", "key", "value")},
    ],
    ids=["plain", "grouped", "rotary", "interleaved"],
)
def test_gradients_match_plain_torch(options):
    module = make(dtype=torch.float64, **options)
    x = tokens(2, 20, WIDTH, dtype=torch.float64)
    ours = value_and_gradients(module, module, x)
    plain = value_and_gradients(module, lambda x: plain_attention(module, x), x)
    assert_all_close(ours, plain, rtol=1e-9, atol=1e-10)


def test_training_matches_plain_torch():
    """The target is another module's output. Training in float64 keeps the two runs together."""
    x = tokens(3, 20, WIDTH, dtype=torch.float64)
    target = make(seed=3, dtype=torch.float64)(x).detach()

    def losses(function_of):
        module = make(dtype=torch.float64, rotary_max_position=20)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            loss = (function_of(module)(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    ours = list(losses(lambda module: module))
    plain = list(losses(lambda module: lambda x: plain_attention(module, x)))
    assert ours[-1] < 0.2 * ours[0]
    np.testing.assert_allclose(ours, plain, rtol=1e-7)


def test_loads_the_state_of_torch_multihead_attention():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = BlockDiagonalSelfAttention(WIDTH, HEADS, block_size=8)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 20, WIDTH)
    expected, _ = theirs(x, x, x, attn_mask=~block_mask(20, 8, False), need_weights=False)
    torch.testing.assert_close(ours(x), expected)


def test_saved_and_loaded_state_gives_equal_output():
    module = make(rotary_max_position=32)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "in_proj_weight": (3 * WIDTH, WIDTH),
        "in_proj_bias": (3 * WIDTH,),
        "out_proj.weight": (WIDTH, WIDTH),
        "out_proj.bias": (WIDTH,),
    }
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = make(seed=5, rotary_max_position=32)
    x = tokens(2, 20, WIDTH)
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(other(x), module(x))


def test_copies_are_independent():
    module, x = make(rotary_max_position=32), tokens(2, 20, WIDTH)
    before = module(x)
    other = copy.deepcopy(module)
    assert torch.equal(other(x), before)
    nn.init.zeros_(other.in_proj_weight)
    other.rotary_cos.zero_()
    assert torch.equal(module(x), before)


def test_rotary_tables_survive_casts():
    module = make(rotary_max_position=32)
    cos = module.rotary_cos.clone()
    module.to(torch.bfloat16)
    assert module.in_proj_weight.dtype == torch.bfloat16
    assert module.rotary_cos.dtype == module.rotary_sin.dtype == torch.float32
    module.double()
    wide = rotary_tables(32, module.head_dim, dtype=torch.float64)
    assert torch.equal(module.rotary_cos, wide[0])
    assert torch.equal(module.rotary_sin, wide[1])
    assert torch.equal(module.float().rotary_cos, cos)


def test_module_made_on_the_meta_device_loads_state():
    module, x = make(rotary_max_position=32), tokens(2, 20, WIDTH)
    with torch.device("meta"):
        hollow = BlockDiagonalSelfAttention(WIDTH, HEADS, block_size=8, rotary_max_position=32)
    assert hollow.in_proj_weight.is_meta
    assert hollow.rotary_cos.is_meta
    hollow.to_empty(device="cpu")
    hollow.load_state_dict(module.state_dict())
    assert torch.equal(hollow(x), module(x))


def test_reset_parameters_repeats_for_a_seed_and_zeroes_biases():
    module = make()
    torch.manual_seed(7)
    module.reset_parameters()
    first = copy.deepcopy(module.state_dict())
    torch.manual_seed(7)
    module.reset_parameters()
    assert all(torch.equal(value, first[name]) for name, value in module.state_dict().items())
    assert not module.in_proj_bias.any()
    assert not module.out_proj.bias.any()
    bound = math.sqrt(6 / (4 * WIDTH))
    assert 0.9 * bound < module.in_proj_weight.abs().max() <= bound


def test_bfloat16_module_is_accurate():
    module = make(rotary_max_position=32, is_causal=True).to(torch.bfloat16)
    x = tokens(2, 20, WIDTH).to(torch.bfloat16)
    exact_module = copy.deepcopy(module).double()
    exact = value_and_gradients(exact_module, lambda x: plain_attention(exact_module, x), x.double())
    ours = value_and_gradients(module, module, x)
    for name, value in ours.items():
        assert value.dtype == torch.bfloat16, name
        # Allow a few roundings, each of half a unit in the last place of the largest element.
        unit = 2**-8 * exact[name].abs().max()
        assert (value.double() - exact[name]).abs().max() <= 4 * unit, name


def test_autocast_behind_another_layer_is_accurate():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(rotary_max_position=32))
    x = tokens(2, 20, WIDTH)
    expected = value_and_gradients(model, model, x)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected["output"], rtol=0.05, atol=0.05)
    model.zero_grad()
    output.backward(tokens(*output.shape, seed=2).to(torch.bfloat16))
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < 0.05, name


@pytest.mark.parametrize(
    ("options", "shape", "call"), [REFERENCE_CASES["rotary"], REFERENCE_CASES["packed"]], ids=["batch", "packed"]
)
def test_compiled_module_has_no_graph_breaks(options, shape, call):
    module, x = make(**options), tokens(*shape, WIDTH)
    call = {name: value.to(torch.int32) for name, value in call.items()}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    eager = value_and_gradients(module, lambda x: module(x, **call), x)
    assert_all_close(value_and_gradients(module, lambda x: compiled(x, **call), x), eager, rtol=0, atol=0)


def test_checkpointing_keeps_gradients_bitwise():
    module = nn.Sequential(make(rotary_max_position=32), nn.GELU(), make(seed=4, is_causal=True))
    x = tokens(2, 20, WIDTH)
    kept = value_and_gradients(module, module, x)
    recomputed = value_and_gradients(module, lambda x: checkpoint(module, x, use_reentrant=False), x)
    assert_all_close(recomputed, kept, rtol=0, atol=0)


def test_repr_shows_non_default_options():
    text = repr(make(rotary_max_position=32, rotary_interleaved=True, scale=0.5, bias=False))
    for part in (
        "num_heads=4",
        "block_size=8",
        "rotary_max_position=32",
        "interleaved=True",
        "scale=0.5",
        "bias=False",
    ):
        assert part in text
    assert "rotary" not in repr(make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 0}, "`embed_dim` must be a positive integer, got 0"),
        ({"num_heads": 2.0}, "`num_heads` must be a positive integer, got 2.0"),
        (
            {"num_heads": 5},
            "`embed_dim` must be a multiple of `num_heads` where `head_dim` is None, got 24 and 5; pass",
        ),
        ({"num_key_heads": 3}, "`num_heads` must be a multiple of `num_key_heads`, got 4 and 3; query head"),
        ({"head_dim": -1}, "`head_dim` must be a positive integer, got -1"),
        ({"block_size": -1}, "`block_size` must be a positive integer, known when tracing, got -1"),
        ({"scale": -1.0}, "`scale` must be a positive number, known when tracing, got -1.0"),
        ({"is_causal": None}, "`is_causal` must be True or False"),
        ({"via": "triton"}, "`via` must be None or 'jax', got 'triton'"),
        ({"dtype": torch.float8_e5m2}, "`dtype` must have one of the dtypes"),
        ({"rotary_max_position": 0}, "`rotary_max_position` must be a positive integer, got 0"),
        ({"rotary_theta": 0.0}, "`rotary_theta` must be positive, got 0.0"),
        ({"rotary_max_position": 8, "head_dim": 5}, "`head_dim` must be even"),
        ({"rotary_max_position": 8, "rotary_apply_to": ("keys",)}, '`apply_to` must name one or more of "query"'),
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
        ({}, torch.ones(4, WIDTH), {"positions": torch.arange(4)}, "but the module has none; create the module with"),
        ({"rotary_max_position": 3}, torch.ones(4, WIDTH), {}, "tables must have a row for every position, got 3 rows"),
    ],
    ids=["rank", "channels", "dtype", "positions", "tables"],
)
def test_invalid_inputs_raise_value_error(options, x, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)(x, **call)


def sharded_training_step(rank, processes, rendezvous):
    """Run one process's batch rows through a sharded model and compare its gradients with those of the whole model."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes)
    whole = nn.Sequential(make(rotary_max_position=32, is_causal=True), nn.GELU(), make(seed=4, num_key_heads=2))
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (processes,))
    for layer in model:
        if isinstance(layer, BlockDiagonalSelfAttention):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = tokens(2 * processes, 20, WIDTH)
    whole(x).square().mean().backward()
    output = model(x.chunk(processes)[rank])
    output.square().mean().backward()
    torch.testing.assert_close(output, whole(x).chunk(processes)[rank])
    for name, parameter in model.named_parameters():
        assert parameter.to_local().numel() < whole.get_parameter(name).numel()
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    torch.distributed.destroy_process_group()


def test_fully_sharded_training_step_matches_one_process(tmp_path, monkeypatch):
    # XLA's optimizations of programs that run once would take most of the time.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    torch.multiprocessing.spawn(sharded_training_step, args=(2, f"file://{tmp_path}/rendezvous"), nprocs=2)
