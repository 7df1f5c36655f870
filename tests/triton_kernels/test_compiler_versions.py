"""Configurations that differ by Triton's version."""

import dataclasses

import pytest

from blockdiag.triton_kernels.block_diagonal import configs as block_diagonal_configs
from blockdiag.triton_kernels.launch import compiler_versions
from blockdiag.triton_kernels.launch.compiler_versions import Adjustment, adjusted
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.moba import configs as moba_configs
from blockdiag.triton_kernels.moba.configs import Config
from blockdiag.triton_kernels.moba.plans import MoBALaunch
from blockdiag.triton_kernels.paged import configs as paged_configs
from blockdiag.triton_kernels.parts import tile_table
from tests.triton_kernels.test_moba_plans import BASE, PROBLEMS, launches

TABLES = [x.ADJUSTMENTS for x in (block_diagonal_configs, moba_configs, paged_configs, tile_table)]


@pytest.fixture
def with_version(monkeypatch):
    def install(*numbers):
        monkeypatch.setattr(compiler_versions, "installed_version", lambda: numbers)

    return install


@pytest.mark.parametrize(
    ("version", "warps"), [((3, 6, 0), 4), ((3, 7, 1), 4), ((3, 8, 0), 8), ((3, 8, 2), 8), ((4, 0, 0), 8)]
)
def test_adjusted_changes_configurations_from_a_version_on(version, warps, with_version):
    with_version(*version)
    table = (Adjustment(since=(3, 8), kinds=("choose",), archs=(90,), change={"num_warps": 8}),)
    config = Config(num_warps=4)
    assert adjusted(config, table, BASE, "choose", 90) == dataclasses.replace(config, num_warps=warps)
    # Other launches, architectures and problems keep their configurations.
    assert adjusted(config, table, BASE, "count", 90) is config
    assert adjusted(config, table, BASE, "choose", 100) is config
    (row,) = table
    elsewhere = dataclasses.replace(row, applies=lambda problem, config: problem.head_dim == 64)
    assert adjusted(config, (elsewhere,), BASE, "choose", 90) is config


def test_adjustments_apply_only_after_the_measured_version():
    assert TABLES and all(row.since > (3, 6, 99) for table in TABLES for row in table)


def test_plans_follow_the_installed_version(with_version):
    launch = MoBALaunch(BASE, "merge_forward", heads=(0, 8))
    warps = {}
    for version in ((3, 6, 0), (3, 8, 0)):
        with_version(*version)
        warps[version] = [launch.plan(Target.for_arch(arch)).options.num_warps for arch in (80, 90, 100)]
    assert warps == {(3, 6, 0): [4, 4, 4], (3, 8, 0): [4, 4, 8]}


def test_plans_of_the_measured_version_have_the_measured_configurations(with_version, monkeypatch):
    """Tables of other versions do not change sizes, warps, stages or registers."""

    def described():
        return [
            (plan.grid, plan.options, [x for x in plan.arguments.items() if not hasattr(x[1], "role")])
            for problem in PROBLEMS.values()
            for arch in (80, 90, 100)
            for plan in (launch.plan(Target.for_arch(arch)) for launch in launches(problem))
        ]

    with_version(3, 6, 0)
    found = described()
    monkeypatch.setattr("blockdiag.triton_kernels.moba.plans.adjusted", lambda config, *_: config)
    assert found == described()
