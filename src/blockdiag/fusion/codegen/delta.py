"""Triton source of the kernel that computes delta, rowsum(output * cotangent), for a region's backward pass."""

import math

from blockdiag.fusion.codegen.kernels import Output, Source
from blockdiag.fusion.ir.layout import flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.tile_program import value_columns
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

# The number of elements in a tile of the result.
_TILE = 4096


def delta_source(region: Region) -> Source:
    """Return the kernel that computes delta, float32 [batch.., q], from "output" and "cotangent".

    Args:
        region: an arranged region, whose result columns are one axis.
    """
    columns, sizes = value_columns(region), region.sizes
    layout = layout_of(shape_of(region.out_dims, sizes), region.out_dims, sizes)
    stride = flat_stride(layout, columns, sizes)
    assert stride is not None, "such results are arranged before"
    count, rows = math.prod(sizes[x] for x in columns), sizes["q"]
    wide = next_power_of_2(max(16, count))
    size = min(max(16, _TILE // wide), next_power_of_2(max(16, rows)))
    tiles = -(-rows // size)
    lines = [
        "# One program: some rows of one batch index.",
        f"cell = tl.program_id(0).to(tl.int64) // {tiles}",
        f"rows = (tl.program_id(0) % {tiles}) * {size} + tl.arange(0, {size})",
        f"columns = tl.arange(0, {wide})",
    ]
    rest = "cell"
    for place, label in enumerate(reversed(region.batch)):
        is_last = place == len(region.batch) - 1
        lines.append(f"i_{label} = {rest}" + ("" if is_last else f" % {sizes[label]}"))
        if not is_last:
            lines.append(f"rest_{place} = {rest} // {sizes[label]}")
            rest = f"rest_{place}"
    lines += [
        f"at = {layout.base(region.batch)} + rows[:, None].to(tl.int64) * {layout.stride('q')}",
        f"at += columns[None, :] * {stride}",
        f"mask = (rows < {rows})[:, None] & (columns < {count})[None, :]",
        "output = tl.load(p_output + at, mask=mask, other=0).to(tl.float32)",
        "cotangent = tl.load(p_cotangent + at, mask=mask, other=0).to(tl.float32)",
        f"tl.store(p_delta + cell * {rows} + rows, tl.sum(output * cotangent, 1), mask=rows < {rows})",
    ]
    body = "".join(f"    {line}\n" for line in lines)
    text = f"@triton.jit\ndef fused_delta(p_output, p_cotangent, p_delta):\n{body}"
    labels = (*region.batch, "q")
    delta = Output("delta", tuple((x,) for x in labels), tuple(sizes[x] for x in labels), "float32")
    grid = (tiles * math.prod(sizes[x] for x in region.batch), 1, 1)
    return Source(
        "import triton\nimport triton.language as tl\n\n\n" + text,
        "fused_delta",
        ("output", "cotangent"),
        (delta,),
        grid,
    )
