# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # JAX and PyTorch side by side
#
# Arrays and tensors can be passed between the frameworks through DLPack without a copy, and functions of one framework
# can be called from the other. The library's operators exist in both, and compute the same.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import torch

import blockdiag
import blockdiag.torch
from blockdiag.interop import to_jax, to_torch, wrap_jax, wrap_torch

jax.config.update("jax_default_matmul_precision", "highest")
torch.manual_seed(0)

# Colours that colour-blind readers can tell apart.
BLUE, ORANGE = "#0072B2", "#E69F00"

# %% [markdown]
# ## Shared memory
#
# `to_jax` and `to_torch` pass the memory itself, so both sides have the same address. Dimensions may be stored in any
# order. On a GPU, an event between the frameworks' streams keeps the order of work, without waiting on the host.

# %%
tensor = torch.randn(2, 4, 64, 32)  # [B, N, T, H], the usual layout in torch
array = to_jax(tensor.transpose(1, 2))  # [B, T, N, H]
assert array.unsafe_buffer_pointer() == tensor.data_ptr()
back = to_torch(array)
assert back.data_ptr() == tensor.data_ptr()
print(f"{type(array).__name__} {array.shape} and tensor {tuple(tensor.shape)} at address {tensor.data_ptr():#x}")

# %% [markdown]
# A tensor that cannot be shared raises an error that says what to do. A slice of a projection has gaps between its
# rows, which JAX arrays cannot represent; `copy=True` makes one copy.

# %%
projected = torch.randn(2, 64, 3, 4, 32)
try:
    to_jax(projected[:, :, 0])
except ValueError as refusal:
    message = str(refusal)
print(message)
assert "copy=True" in message
assert to_jax(projected[:, :, 0], copy=True).shape == (2, 64, 4, 32)

# %% [markdown]
# ## The same operator in both
#
# `blockdiag.torch` has operators with the same names and arguments. On CUDA both frameworks launch the same Triton
# kernels, and torch does not need JAX. On a CPU, torch's calls go through JAX. Results and gradients are equal.

# %%
query, key, value = torch.randn(3, 2, 48, 4, 32).unbind()  # [B, T, N, H] each
for operand in (query, key, value):
    operand.requires_grad_()
cotangent = torch.randn(2, 48, 4, 32)
in_torch = blockdiag.torch.block_diagonal_attention(query, key, value, block_size=16, is_causal=True)
in_torch.backward(cotangent)


@jax.jit
def attend_with_gradients(query, key, value, cotangent):
    def attend(*operands):
        return blockdiag.block_diagonal_attention(*operands, block_size=16, is_causal=True)

    output, pull_back = jax.vjp(attend, query, key, value)
    return output, pull_back(cotangent)


in_jax, gradients = attend_with_gradients(*(to_jax(x.detach()) for x in (query, key, value, cotangent)))
torch.testing.assert_close(to_torch(in_jax), in_torch.detach())
for operand, gradient in zip((query, key, value), gradients, strict=True):
    torch.testing.assert_close(to_torch(gradient), operand.grad)
print("output and three gradients agree")

# %% [markdown]
# ## Your own variant in both
#
# `fuse` takes attention written in plain `jax.numpy`. `blockdiag.torch.fuse` turns the same source into a function of
# tensors with autograd. Here scores have a learned bias for each distance, which the small model below uses too.

# %%
TOKENS, HEADS, HEAD_DIM = 64, 2, 16


def biased_attention(query, key, value, bias):
    """query, key, value [B, T, N, H], bias [N, T] for each distance -> [B, T, N, H]; causal."""
    position = jnp.arange(query.shape[1])
    distance = position[:, None] - position[None, :]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = scores + bias[:, jnp.maximum(distance, 0)][None]
    weights = jax.nn.softmax(jnp.where((distance >= 0)[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


fused_in_jax = jax.jit(blockdiag.fuse(biased_attention))
fused_in_torch = blockdiag.torch.fuse(biased_attention)
operands = [*torch.randn(3, 4, TOKENS, HEADS, HEAD_DIM).unbind(), torch.randn(HEADS, TOKENS)]
torch.testing.assert_close(to_torch(fused_in_jax(*map(to_jax, operands))), fused_in_torch(*operands))

# %% [markdown]
# ## The same training in both
#
# The task is to predict the token seven positions earlier. The contents of other tokens do not help; only the distance
# does, so the bias must find the seven. A model with one layer is written twice, with the same initial weights and
# batches: once in JAX with optax, and once in torch. Both use the one attention function above.

# %%
STEPS, BATCH, VOCABULARY, WIDTH, LAG = 40, 8, 16, HEADS * HEAD_DIM, 7
generator = np.random.default_rng(0)
batches = generator.integers(0, VOCABULARY, size=(STEPS, BATCH, TOKENS))
initial = {
    "embedding": generator.normal(size=(VOCABULARY, WIDTH)),
    "qkv": generator.normal(size=(WIDTH, 3 * WIDTH)) * WIDTH**-0.5,
    "head": generator.normal(size=(WIDTH, VOCABULARY)) * WIDTH**-0.5,
    "bias": np.zeros((HEADS, TOKENS)),
}
initial = {name: array.astype(np.float32) for name, array in initial.items()}


def loss_in_jax(weights, tokens):
    """Return the mean cross entropy of the tokens LAG positions earlier, in nats; tokens int [B, T]."""
    projected = (weights["embedding"][tokens] @ weights["qkv"]).reshape(*tokens.shape, 3, HEADS, HEAD_DIM)
    attended = fused_in_jax(projected[:, :, 0], projected[:, :, 1], projected[:, :, 2], weights["bias"])
    logits = attended[:, LAG:].reshape(BATCH, TOKENS - LAG, WIDTH) @ weights["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, :-LAG]).mean()


def loss_in_torch(weights, tokens):
    """Return the same loss in torch."""
    projected = (weights["embedding"][tokens] @ weights["qkv"]).unflatten(-1, (3, HEADS, HEAD_DIM))
    attended = fused_in_torch(*(x.contiguous() for x in projected.unbind(2)), weights["bias"])
    logits = attended[:, LAG:].flatten(2) @ weights["head"]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-LAG].flatten())


def train_in_jax():
    weights, optimizer = {name: jnp.asarray(array) for name, array in initial.items()}, optax.adam(0.05)

    @jax.jit
    def step(weights, state, tokens):
        loss, gradients = jax.value_and_grad(loss_in_jax)(weights, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, loss

    state, losses = optimizer.init(weights), []
    for tokens in batches:
        weights, state, loss = step(weights, state, jnp.asarray(tokens, jnp.int32))
        losses.append(float(loss))
    return weights, losses


def train_in_torch():
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in initial.items()}
    optimizer, losses = torch.optim.Adam(weights.values(), lr=0.05), []
    for tokens in batches:
        optimizer.zero_grad()
        loss = loss_in_torch(weights, torch.from_numpy(tokens))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return weights, losses


(jax_weights, jax_losses), (torch_weights, torch_losses) = train_in_jax(), train_in_torch()
print(f"loss {jax_losses[0]:.4f} at first, then {jax_losses[-1]:.4f} in JAX and {torch_losses[-1]:.4f} in torch")

# %% [markdown]
# The losses differ only by accumulated rounding, and both biases have found the distance.

# %%
np.testing.assert_allclose(jax_losses[:20], torch_losses[:20], rtol=1e-3)
jax_bias, torch_bias = np.asarray(jax_weights["bias"]), torch_weights["bias"].detach().numpy()
assert jax_losses[-1] < 0.5 * jax_losses[0] and torch_losses[-1] < 0.5 * torch_losses[0]
assert LAG in jax_bias.argmax(axis=1) and (jax_bias.argmax(axis=1) == torch_bias.argmax(axis=1)).all()

figure, (losses, bias) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
losses.plot(jax_losses, color=BLUE, linewidth=4, alpha=0.4, label="JAX")
losses.plot(torch_losses, color=ORANGE, linewidth=1.2, label="PyTorch")
losses.axhline(np.log(VOCABULARY), color="grey", linestyle=":", label="blind guessing")
losses.set(xlabel="step", ylabel="nats", title="loss")
losses.legend(frameon=False)
for head, marker in zip(range(HEADS), "os", strict=True):
    bias.plot(jax_bias[head, :16], marker, color=BLUE, markersize=8, alpha=0.4, label=f"JAX, head {head}")
    bias.plot(torch_bias[head, :16], marker, color=ORANGE, markersize=4, label=f"PyTorch, head {head}")
bias.axvline(LAG, color="grey", linestyle=":")
bias.set(xlabel="distance", title="learned bias")
bias.legend(frameon=False, fontsize=8)
for axes in (losses, bias):
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Functions of one framework in the other
#
# `wrap_jax` turns any JAX function into a torch function with autograd, here the loss of the model, so a torch
# optimizer could train with it. Its gradients match those of the torch model.

# %%
wrapped_loss = wrap_jax(loss_in_jax)
weights = {name: torch.tensor(array, requires_grad=True) for name, array in initial.items()}
others = {name: torch.tensor(array, requires_grad=True) for name, array in initial.items()}
tokens = torch.from_numpy(batches[0])
wrapped_loss(weights, tokens.int()).backward()
loss_in_torch(others, tokens).backward()
differences = []
for name, weight in weights.items():
    torch.testing.assert_close(weight.grad, others[name].grad, rtol=1e-4, atol=1e-6)
    differences.append(float((weight.grad - others[name].grad).norm() / others[name].grad.norm()))

figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
axes.barh(list(weights), differences, color=BLUE)
axes.set(xlabel="relative difference", title="gradients of the wrapped loss and of torch's own")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# `wrap_torch` works the other way round, for notebooks and tests: each call copies its arguments to the host and runs
# torch there. It works in jitted functions, and has gradients.

# %%
huber = wrap_torch(lambda x: torch.nn.functional.huber_loss(x, torch.zeros_like(x), reduction="none"))
points = jnp.array([0.5, 3.0])
assert jax.jit(huber)(points).tolist() == [0.125, 2.5]
assert jax.grad(lambda x: huber(x).sum())(points).tolist() == [0.5, 1.0]

# %% [markdown]
# The page on bridges describes memory, versions and streams when both frameworks share a process. `examples/` has
# several programs in a JAX and a torch version.

# %%
plt.show()  # as a script with a screen; a notebook has shown the pictures already
