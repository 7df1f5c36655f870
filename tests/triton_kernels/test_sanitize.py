"""The calls that compute-sanitizer runs reach every kernel, and the driver reports what a tool finds."""

import dataclasses
import importlib
import linecache
import pkgutil
import re
import stat

import jax
import numpy as np
import pytest
import triton

from blockdiag import triton_kernels
from tests.gpu_scripts import false_alarms, sanitize
from tests.gpu_scripts.sanitize_calls import FAMILIES, Call, difference, launched_kernels
from tests.gpu_scripts.sanitize_known import DROPPED, KNOWN, explain, lines_in, parse_reports

# Only torch launches these kernels, in packed calls and gradients of `fuse`. Its families cannot be traced.
OF_TORCH = {"tile_table", "paged_tiles", "fused_delta"}
# Templates, which generated kernels call.
TEMPLATES = {
    "one_pass_backward", "resident_forward", "resident_pairs", "resident_pairs_wide", "resident_sides",
    "streamed_forward", "streamed_eight_bit_forward",
}  # fmt: skip
GENERATED = {
    "fused_backward_one_pass",
    "fused_columns",
    "fused_columns_resident",
    "fused_diagonals",
    "fused_forward",
    "fused_forward_resident",
    "fused_forward_streamed",
    "fused_pairs",
    "fused_rows",
    "fused_rows_and_pairs_resident",
    "fused_rows_resident",
}
# These families together have all generated kernels. Every sixth of their calls is enough.
TRACED = [
    name for name, family in FAMILIES.items() if family.framework == "jax" and name != "pallas" and "fuse" not in name
]
TRACED += ["fuse_distances", "fuse_resident_1", "fuse_streamed_1", "fuse_one_pass"]


def written_kernels():
    """Return the names of the library's kernels: functions that take pointers or groups and that no other one calls."""
    functions = {}
    for module in pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        loaded = importlib.import_module(module.name)
        own = {name: x for name, x in vars(loaded).items() if isinstance(x, triton.JITFunction)}
        functions |= {(module.name, name): x for name, x in own.items() if x.fn.__module__ == loaded.__name__}
    # Partitions of a warp-specialised kernel are named in tuples. Other functions are called.
    uses = " ".join(re.sub(r"^def \w+", "", x.src, flags=re.MULTILINE) for x in functions.values())
    return {
        name
        for (_, name), x in functions.items()
        if name not in TEMPLATES
        and any(argument.startswith("p_") or argument in ("arrays", "scalars") for argument in x.arg_names)
        and not re.search(rf"\b{name}[(,]", uses)
    }


@pytest.mark.slow
def test_families_launch_every_kernel_of_hopper():
    calls = [call for name in TRACED for call in list(FAMILIES[name].calls())[:: 6 if "fuse" in name else 1]]
    launched = {kernel for call in calls for kernel in launched_kernels(call, 90)}
    missing = (written_kernels() | GENERATED) - launched - OF_TORCH
    assert not missing, "kernels that no family launches"


def test_written_kernels_finds_kernels_and_no_helpers():
    kernels = written_kernels()
    assert {"moba_hopper_backward", "tile_table", "paged_splits", "block_diagonal_forward"} <= kernels
    assert not kernels & {"tile_rows_at", "load_tile", "carry"}


@pytest.mark.parametrize("name", ["projection_torch", "key_convolution"])
def test_dry_run_of_a_family_runs_every_call(name, capsys):
    sanitize.run_family(name, is_dry=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == sanitize.FINISHED
    assert len(lines) - 1 == len(list(FAMILIES[name].calls())) and all(line.startswith("ran ") for line in lines[:-1])


def test_run_call_with_a_wrong_result_raises_arithmetic_error():
    wrong = Call("wrong", lambda who: [np.ones(3, np.float32) * (2 if who == "triton" else 1)])
    with pytest.raises(ArithmeticError, match=r"result 0 differs from the CPU's by 1 "):
        sanitize.run_call(wrong, is_dry=False)
    right = Call("right", lambda who: [jax.numpy.ones(3)])
    assert sanitize.run_call(right, is_dry=False) == "0.0e+00"


def rounding(who):
    """Return results of which the second is 0 except for rounding, and the third is not."""
    errors = {"triton": (0, 3e-3, 0.1), "xla": (0, 1e-3, 0), "plain": (0, 8e-3, 0.2)}[who]
    return [np.ones(4, np.float32) * x for x in (1, errors[1], 1 + errors[2])]


def test_rounding_errors_may_equal_those_of_a_plain_computation():
    call = Call("rounding", lambda who: rounding(who)[:2], plain="plain")
    assert sanitize.run_call(call, is_dry=False) == "2.0e+00"
    with pytest.raises(ArithmeticError, match=r"result 1 differs from the CPU's by 2 "):
        sanitize.run_call(dataclasses.replace(call, plain=None), is_dry=False)


def test_errors_beyond_rounding_raise_arithmetic_error():
    call = Call("rounding", rounding, plain="plain")
    with pytest.raises(ArithmeticError, match=r"result 2 differs from the CPU's by 0.1 "):
        sanitize.run_call(call, is_dry=False)


def test_allowed_differences_are_larger_only_for_gradients_summed_over_rows():
    (call,) = [call for call in FAMILIES["fuse_resident_2"].calls() if call.name == "terms"]
    allowed = sanitize.allowed_differences(call, sanitize.expected_results(call, None))
    names = ("output", "query", "key", "value", "pair", "offset", "slope")
    assert [name for name, x in zip(names, allowed, strict=True) if x != sanitize.TOLERANCE] == ["offset", "slope"]


def test_expected_results_are_computed_once(tmp_path):
    turns = []

    def compute(who):
        turns.append(who)
        return [np.ones(3, np.float32), np.arange(4)]

    call = Call("one, two: three", compute)
    for _ in range(2):
        first, second = sanitize.expected_results(call, tmp_path)
        np.testing.assert_array_equal(first, np.ones(3, np.float32))
        np.testing.assert_array_equal(second, np.arange(4))
    assert turns == ["xla"]


@pytest.mark.parametrize(
    ("found", "expected", "largest"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, 2.0], [1.0, np.nan], np.inf),
        ([3.0, 4.0], [3.0, 9.0], 5 / np.hypot(3, 9)),
        ([1, 2, 3, 5], [1, 2, 3, 4], 0.25),
        ([1.0], [1.0, 1.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_difference_is_relative_for_floats_and_a_share_for_integers(found, expected, largest):
    assert difference(np.asarray(found), np.asarray(expected)) == pytest.approx(largest)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at moba_offsets+0x110 in lists.py:42
=========     by thread (0,0,0) in block (0,0,0)
ran batch (1.0 s, 0.0e+00)
all ran
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= Error: Race reported between Write access at moba_hopper_backward+0x910
=========     and Write access at moba_hopper_backward+0x28b0 [8 hazards]
========= 
ran batch (1.0 s, 0.0e+00)
all ran
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""
CLEAN = "ran batch (1.0 s, 0.0e+00)\nall ran\n========= ERROR SUMMARY: 0 errors\n"


def line_with(file, text):
    """Return how a report names the line of a file that begins with a text."""
    paths = [path for folder in ("src", "tests/gpu_scripts") for path in (sanitize.ROOT / folder).rglob(file)]
    lines = (enumerate(path.read_text().splitlines(), 1) for path in paths)
    return f"{file}:{next(i for own in lines for i, line in own if line.strip().startswith(text))}"


def race(first, *others, call="batch"):
    """Return what racecheck prints for one hazard."""
    rest = "".join(f"=========     and {x} [33 hazards]\n" for x in others)
    return f"========= Error: Race reported between {first}\n{rest}========= \nran {call} (2.7 s, 3.4e-03)\n"


def read(size, where, call="batch"):
    """Return what initcheck prints for one read."""
    return (
        f"========= Uninitialized __global__ memory read of size {size} bytes\n=========     at {where}\n"
        "=========     by thread (32,0,0) in block (8,0,0)\n=========     Address 0x2aa2a07100\n========= \n"
        f"ran {call} (2.7 s, 3.4e-03)\n"
    )


COPY = """========= Host API memory access error at host access to 0x2a9a800000 of size 393,216 bytes
=========     Uninitialized access to 0x2a9a800020 on access by cudaMemcpy source
========= 
ran full tiles (7.5 s, 1.0e-04)
"""
SUM = "void at::native::reduce_kernel<(int)128, (int)4, at::native::ReduceOp<c10::BFloat16, float>>(T3)+0xb0e0"
HOPPER = "hopper_backward.py"
# Of this name there are a kernel of MoBA and a template.
FORWARD = "hopper_forward.py"
BEGIN = line_with(HOPPER, "def moba_hopper_backward(")
WORK = line_with(HOPPER, "b_dk, b_dv = gl.warp_specialize(")
END = line_with(HOPPER, "store_key_tile(arrays.d_value, b_dv.to(dtype), arrays.mask")
CHUNKED = line_with("chunked.py", "tl.store(p_delta + o_statistics, b_delta")
PARTS = line_with("attention.py", "b_part = tl.load(arrays.part +")
RESIDENT = "<blockdiag.fuse fused_rows_and_pairs_resident b55bb522ef055e4a>"
SOURCE = """@gluon.jit
def fused_rows_and_pairs_resident(query, ROUNDS: gl.constexpr):
    resident_pairs(PairsMatrices(query), ROUNDS)
"""
PAIRS = "hopper_resident_pairs.py"
HALF = line_with(PAIRS, "b_sum = b_sum + half.load(")
GRADIENT = "block_diagonal_chunked_query_gradient"
EXPLAINED = [
    (
        "word of warp specialisation",
        "racecheck",
        "moba_torch",
        race(
            f"Read access at moba_hopper_backward+0x110 in {BEGIN}",
            f"Write access at moba_hopper_backward+0x28e0 in {BEGIN}",
            f"Write access at moba_hopper_backward+0x28e0 in {WORK}",
            f"Write access at moba_hopper_backward+0x7440 in {END}",
        ),
    ),
    (
        "word of warp specialisation",
        "racecheck",
        "fuse_resident_1",
        race(
            f"Read access at fused_rows_and_pairs_resident+0x110 in {RESIDENT}:2",
            f"Write access at fused_rows_and_pairs_resident+0x28e0 in {line_with(PAIRS, 'gl.warp_specialize(')}",
            f"Write access at fused_rows_and_pairs_resident+0x7440 in {RESIDENT}:3",
        ),
    ),
    (
        "word of warp specialisation",
        "racecheck",
        "fuse_streamed_1",
        race("Read access at fused_forward_streamed+0x120", "Write access at fused_forward_streamed+0x6c80"),
    ),
    (
        "handed over by an mbarrier",
        "racecheck",
        "fuse_resident_1",
        race("Write access at fused_forward_resident+0x5780", "Read access at fused_forward_resident+0x370"),
    ),
    (
        "handed over by an mbarrier",
        "racecheck",
        "fuse_streamed_1",
        race(*(f"{access} access at fused_forward_streamed+0x7e90" for access in ("Write", "Read", "Read"))),
    ),
    (
        "handed over by an mbarrier",
        "racecheck",
        "fuse_torch",
        race(
            f"Write access at fused_forward_streamed+0x7e90 in {line_with(FORWARD, 'memory.store(gl.full(')}",
            f"Read access at fused_forward_streamed+0x260 in {line_with(FORWARD, 'return gl.max(memory.load(')}",
        ),
    ),
    (
        "handed over by an mbarrier",
        "racecheck",
        "fuse_torch",
        race(
            f"Write access at fused_rows_and_pairs_resident+0x2c20 in {line_with(PAIRS, 'half.store(b_sum)')}",
            f"Read access at fused_rows_and_pairs_resident+0x8670 in {HALF}",
        ),
    ),
    (
        "copies of a sum",
        "racecheck",
        "block_diagonal_torch",
        race(f"Write access at {GRADIENT}+0x2010 in {CHUNKED}", f"Write access at {GRADIENT}+0x2010 in {CHUNKED}"),
    ),
    ("parts that are not there", "initcheck", "paged_torch", read(8, f"paged_merge+0x410 in {PARTS}")),
    ("parts that are not there", "initcheck", "moba_paged", read(8, "moba_paged_blocks+0x1b40")),
    ("copied to the host, written by the copy engine", "initcheck", "pallas", COPY),
    (
        "read by frameworks, written by the copy engine",
        "initcheck",
        "fuse_resident_1",
        read(8, "loop_convert_fusion+0x90"),
    ),
    ("read by frameworks, written by the copy engine", "initcheck", "projection_torch", read(8, SUM)),
    (
        "products of XLA, read by XLA",
        "initcheck",
        "fuse_structures",
        read(2, "loop_slice_fusion+0x250", "invariant_points_frames"),
    ),
    (
        "products of XLA, copied to the host",
        "initcheck",
        "fuse_structures",
        COPY.replace("full tiles", "projected"),
    ),
    ("counter of items", "initcheck", "fuse_streamed_2", read(4, "fused_forward_streamed+0x7170", "padded")),
    ("counter of a loop of XLA", "initcheck", "fuse_masks", read(4, "loop_add_fusion+0x40", "packed_documents")),
]
UNEXPLAINED = {
    "memcheck": ("memcheck", "moba", MEMCHECK),
    "a read after the beginning": (
        "racecheck",
        "moba",
        race("Read access at moba_hopper_backward+0x910", "Write access at moba_hopper_backward+0x28e0"),
    ),
    "a write in between": (
        "racecheck",
        "moba_torch",
        race(
            f"Read access at moba_hopper_backward+0x110 in {BEGIN}",
            f"Write access at moba_hopper_backward+0x7440 in {line_with(HOPPER, 'mbarrier.wait(')}",
        ),
    ),
    "two writes at different places": (
        "racecheck",
        "fuse_resident_1",
        race("Write access at fused_forward_resident+0x5780", "Write access at fused_forward_resident+0x5790"),
    ),
    "memory that is not handed over": (
        "racecheck",
        "fuse_torch",
        race(
            f"Write access at fused_rows_and_pairs_resident+0x2c20 in {line_with('resident_tiles.py', 'ones.store(')}",
            f"Read access at fused_rows_and_pairs_resident+0x8670 in {HALF}",
        ),
    ),
    "a kernel that hands nothing over": (
        "racecheck",
        "block_diagonal",
        race(
            "Write access at block_diagonal_hopper_forward+0x5780", "Read access at block_diagonal_hopper_forward+0x9"
        ),
    ),
    "a store of something else": (
        "racecheck",
        "block_diagonal_torch",
        race(*[f"Write access at {GRADIENT}+0x2010 in {line_with('chunked.py', 'b_delta = ')}"] * 2),
    ),
    "half of a report": ("racecheck", "moba", race("Read access at moba_hopper_backward+0x110")),
    "half of a report of one store": ("racecheck", "moba_paged", race("Write access at moba_paged_blocks+0x1820")),
    "sums of parts": ("initcheck", "paged_torch", read(4, "paged_merge+0x6d0 in attention.py:1")),
    "another line of the merge": ("initcheck", "paged_torch", read(8, "paged_merge+0x6d0 in attention.py:1")),
    "a kernel that reads parts": ("initcheck", "paged", read(16, "paged_splits+0x6d0")),
    "a copy where nothing leaves by the copy engine": ("initcheck", "moba", COPY),
    "a kernel of the library": ("initcheck", "fuse_streamed_1", read(2, "fused_columns+0x80")),
    "a larger read than that of a counter": ("initcheck", "fuse_streamed_1", read(8, "fused_forward_streamed+0x7170")),
    "another call": ("initcheck", "fuse_structures", read(2, "loop_slice_fusion+0x250", "latent")),
    "a second counter": ("initcheck", "fuse_masks", 2 * read(4, "loop_add_fusion+0x40", "packed_documents")),
    "no call": ("initcheck", "fuse_masks", "=========  \n".join(read(4, "loop_add_fusion+0x40").splitlines(True)[:-1])),
}


def explained(tool, family, text, folder):
    (folder / "b55bb522ef055e4a.py").write_text(SOURCE)
    lines = lines_in(sanitize.ROOT / "src", sanitize.ROOT / "tests" / "gpu_scripts", folder)
    return explain(tool, family, parse_reports(text.splitlines()), lines)


@pytest.mark.parametrize(("name", "tool_name", "family", "text"), EXPLAINED)
def test_report_of_a_known_kind_is_explained(tmp_path, name, tool_name, family, text):
    assert explained(tool_name, family, text, tmp_path) == ({name: 1}, {})


def test_every_known_kind_has_a_report_that_it_explains():
    assert {name for name, *_ in EXPLAINED} == set(KNOWN)


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_report_of_another_kind_is_not_explained(tmp_path, name):
    _, rest = explained(*UNEXPLAINED[name], tmp_path)
    assert sum(rest.values()) == 1


OVERFLOW = "========= Warning: Error buffer overflow has been detected. Some records have been dropped\n"
SKIPPED = "========= 768 errors were skipped (error buffer overflow).\n"


def test_dropped_records_are_explained_beside_explained_reports(tmp_path):
    text = OVERFLOW + read(8, "paged_merge+0x410") + SKIPPED
    known, rest = explained("initcheck", "paged", text, tmp_path)
    assert (known, rest) == ({"parts that are not there": 1, DROPPED: 2}, {})


@pytest.mark.parametrize(
    "text",
    [
        OVERFLOW + "ran batch (1.0 s, 0.0e+00)\n" + SKIPPED,
        OVERFLOW + read(8, "paged_merge+0x410").replace("ran batch (2.7 s, 3.4e-03)\n", "")
        + read(8, "paged_splits+0x410") + SKIPPED,
    ],
    ids=["alone", "beside another report"],
)  # fmt: skip
def test_dropped_records_are_not_explained_elsewhere(tmp_path, text):
    known, rest = explained("initcheck", "paged", text, tmp_path)
    assert DROPPED not in known and sum(report.title.count("buffer overflow") for report in rest) == 2


def test_report_without_its_source_is_not_explained(tmp_path):
    name, *given = next(x for x in EXPLAINED if x[2] == "fuse_torch")
    assert explained(*given, tmp_path)[0] == {name: 1}
    (tmp_path / "b55bb522ef055e4a.py").unlink()
    assert not explain(given[0], given[1], parse_reports(given[2].splitlines()), lines_in(tmp_path))[0]


def test_reports_that_differ_in_threads_are_counted_as_one_kind():
    text = read(8, "paged_merge+0x410") + read(8, "paged_merge+0x410").replace("(32,0,0)", "(33,0,0)")
    ((report, count),) = parse_reports(text.splitlines()).items()
    assert (report.title, report.call, count) == ("Uninitialized __global__ memory read of size 8 bytes", "batch", 2)


def test_report_of_a_call_whose_name_has_a_colon_keeps_the_name():
    text = read(8, "paged_merge+0x410").replace("ran batch (2.7 s, 3.4e-03)", "EXC features: keys: ValueError no: not")
    (report,) = parse_reports(text.splitlines())
    assert report.call == "features: keys"


def test_keep_sources_writes_generated_kernels_for_lines_in(tmp_path, monkeypatch):
    name = "<blockdiag.fuse fused_rows_and_pairs_resident b55bb522ef055e4a>"
    lines = SOURCE.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, name, (len(SOURCE), None, lines, name))
    sanitize.keep_sources(tmp_path)
    assert lines_in(tmp_path)(name, 2, "kernel") == "def fused_rows_and_pairs_resident(query, ROUNDS: gl.constexpr):"
    assert lines_in(tmp_path)(name, 4, "kernel") == ""


def test_false_alarm_kernels_contain_the_instructions_that_tools_misread():
    codes = {name: false_alarms.machine_code(plan, 90) for name, plan in false_alarms.plans().items()}
    texts = {name: " ".join(text for _, text in code) for name, code in codes.items()}
    # Near the kernel's start, warps read what they are to run.
    assert any(address < 0x400 and text.startswith("LDS.U8") for address, text in codes["specialised"])
    # Stores are followed by a barrier of these warps and one arrival. Loads follow the wait.
    assert re.search(r" STS\S* .*BAR\.SYNC\S* 0x2, 0x80.*P\d SYNCS\.ARRIVE", texts["handed_over"])
    assert re.search(r"SYNCS\.PHASECHK.* LDS\.64", texts["handed_over"])
    # A thread's own product is added to another thread's rounded product, and every thread stores.
    assert re.search(r"SHFL\.BFLY PT, (R\d+), .* FFMA R\d+, R\d+, R\d+, \1 .* STS ", texts["summed_products"])
    assert not re.search(r"@!?P\d STS", texts["summed_products"])
    assert (
        "UTMASTG" in texts["stored_by_copy_engine"] and "STG." not in texts["stored_by_copy_engine"].split("UTMASTG")[0]
    )


@pytest.fixture
def tool(tmp_path):
    """Return a function that makes a stand-in for compute-sanitizer, which only prints a text."""

    def make(text, wait=0):
        path = tmp_path / "tool"
        (tmp_path / "text").write_text(text)
        path.write_text(f'#!/bin/sh\n[ "$1" = --help ] && exit\ncat {tmp_path / "text"}\nsleep {wait}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return ["--sanitizer", str(path), "--output", str(tmp_path), "--families", "moba"]

    return make


@pytest.mark.parametrize(
    ("name", "text", "row", "reported"),
    [
        ("memcheck", MEMCHECK, r"1 ran +0 failed +1 errors .* LOOK", "moba_offsets+0x110 in lists.py:42"),
        ("racecheck", RACECHECK, r"1 ran +0 failed +1 errors .* LOOK", "Write moba_hopper_backward+0x910"),
        (
            "memcheck",
            CLEAN.replace(" 0 errors", " 70 errors"),
            r"1 ran +0 failed +70 errors .* LOOK",
            "70 errors that are counted, and not printed",
        ),
        ("memcheck", CLEAN.replace("all ran\n", ""), r"1 ran +0 failed +0 errors .* unfinished", ""),
        ("memcheck", CLEAN.replace("ran batch", "EXC batch:"), r"0 ran +1 failed +0 errors .* LOOK", "EXC batch"),
        ("memcheck", "ran batch\nall ran\n", r"1 ran +0 failed uncounted errors .* LOOK", ""),
    ],
)
def test_driver_with_findings_reports_them_and_returns_1(tool, capsys, name, text, row, reported):
    assert sanitize.main([*tool(text), "--tools", name]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"moba +{name} +{row}", printed) and reported in printed


def test_driver_without_findings_returns_0(tool, capsys):
    assert sanitize.main([*tool(CLEAN), "--tools", "memcheck,initcheck"]) == 0
    assert "2 processes, 0 errors, 0 processes to look at" in capsys.readouterr().out


def test_driver_with_explained_reports_prints_the_reason_and_returns_0(tool, capsys):
    text = EXPLAINED[0][3] + "all ran\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    assert sanitize.main([*tool(text), "--tools", "racecheck"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"moba +racecheck +1 ran +0 failed +1 errors .* explained", printed)
    assert "explained: 1 of word of warp specialisation" in printed
    assert KNOWN["word of warp specialisation"].reason in printed
    assert "1 processes, 0 errors, 0 processes to look at" in printed


def test_driver_counts_unexplained_reports_as_errors(tool, capsys):
    text = EXPLAINED[0][3] + RACECHECK.replace("(1 errors", "(2 errors")
    assert sanitize.main([*tool(text), "--tools", "racecheck"]) == 1
    assert "1 processes, 1 errors, 1 processes to look at" in capsys.readouterr().out


def test_driver_runs_the_tools_of_a_family_after_its_plain_run(monkeypatch, capsys, tmp_path):
    turns = []

    def run(family, tool, options, caches):
        turns.append((family, tool))
        return sanitize.Outcome(family, tool, 1, (), True, None if tool == "plain" else 0, {}, {}, 0.0)

    monkeypatch.setattr(sanitize, "run_process", run)
    given = ["--sanitizer", "none", "--output", str(tmp_path), "--families", "moba,paged", "-j", "1"]
    assert sanitize.main(given) == 0
    assert sorted(turns) == sorted((x, y) for x in ("moba", "paged") for y in (sanitize.PLAIN, *sanitize.TOOLS))
    assert all(turns.index((x, "plain")) < turns.index((x, y)) for x in ("moba", "paged") for y in sanitize.TOOLS)


def test_find_sanitizer_prefers_the_package_over_the_path(monkeypatch, tmp_path):
    folders = tmp_path / "site" / "nvidia" / "cu13" / "compute-sanitizer", tmp_path / "bin"
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "compute-sanitizer").write_text("#!/bin/sh\n")
        (folder / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(folders[1]))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert sanitize.find_sanitizer() == str(folders[1] / "compute-sanitizer")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    assert sanitize.find_sanitizer() == str(folders[0] / "compute-sanitizer")


def test_driver_ends_a_process_whose_time_is_up(tool, capsys):
    assert sanitize.main([*tool("ran batch\n", wait=600), "--tools", "memcheck", "--time-limit", "1"]) == 1
    assert "unfinished" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--families", "--tools"])
def test_driver_with_unknown_names_exits_with_an_error(option):
    with pytest.raises(SystemExit, match=f"`{option}` must name some of .*, got 'other'"):
        sanitize.main([option, "other"])
