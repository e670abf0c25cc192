"""Programs written by hand, whose buffers can be counted: aliases, loops, branches, fusions, kernels."""

import pytest

from memjax._core.program.hlo import parse
from memjax._explain.live import live

KIB = 1024
HEAD = "HloModule m, is_scheduled=true, entry_computation_layout={(f32[256]{0})->f32[]}\n\n"


def peak(text):
    found = live(parse(HEAD + text))
    steps = range(2 * len(found.instructions) + 1)
    return max(sum(one.nbytes for one in found.buffers if one.first <= step < one.last) for step in steps)


def test_two_arrays_are_alive_at_once():
    assert (
        peak("""
ENTRY %main (p: f32[256]) -> f32[] {
  %p = f32[256]{0} parameter(0)
  %a = f32[512]{0} fusion(%p), kind=kLoop, calls=%none
  %b = f32[256]{0} reduce(%a, %p), to_apply=%add
  ROOT %c = f32[] reduce(%b, %p), to_apply=%add
}

%none (q: f32[256]) -> f32[512] {
  %q = f32[256]{0} parameter(0)
  ROOT %r = f32[512]{0} concatenate(%q, %q), dimensions={0}
}
""")
        == 3 * KIB
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%b = f32[256]{0} exponential(%a)", 1),
        ("%b = f32[16,16]{1,0} bitcast(%a)", 1),
        ("%b = f32[256]{0} reverse(%a), dimensions={0}", 2),
        ("%b = f32[256]{0} custom-call(%a), custom_call_target=\"f\"", 2),
        ("%b = f32[256]{0} custom-call(%a), custom_call_target=\"f\", output_to_operand_aliasing={{}: (0, {})}", 1),
        ("%t = (f32[256]{0}, s8[1024]{0}) custom-call(%a), custom_call_target=\"f\"\n"
         "  %b = f32[256]{0} get-tuple-element(%t), index=0", 3),
        ("%b = f32[256]{0:T(256)S(5)} copy(%a)", 1),
        ("%s = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%a)\n  %b = f32[256]{0} copy-done(%s)", 2),
    ],
    ids=["in place", "view", "not in place", "kernel", "kernel in place", "workspace", "on the host", "asynchronous"],
)  # fmt: skip
def test_one_after_the_other(line, expected):
    found = peak(f"""
ENTRY %main (p: f32[256]) -> f32[] {{
  %p = f32[256]{{0}} parameter(0)
  %a = f32[256]{{0}} sine(%p)
  {line}
  ROOT %c = f32[] reduce(%b, %p), to_apply=%add
}}
""")
    assert found == pytest.approx(expected * KIB, abs=8)


BODY = """
%fused (x: f32[8,256], y: f32[256], i: s32[]) -> f32[8,256] {
  %x = f32[8,256]{1,0} parameter(0)
  %y = f32[256]{0} parameter(1)
  %v = f32[1,256]{1,0} bitcast(%y)
  %i = s32[] parameter(2)
  %o = s32[] constant(0)
  ROOT %u = f32[8,256]{1,0} dynamic-update-slice(%x, %v, %i, %o)
}

%body (s: (s32[], f32[8,256], f32[256])) -> (s32[], f32[8,256], f32[256]) {
  %s = (s32[], f32[8,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,256]{1,0} get-tuple-element(%s), index=1
  %w = f32[256]{0} get-tuple-element(%s), index=2
  %y = f32[256]{0} reverse(%w), dimensions={0}
  %z = f32[8,256]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8,256]{1,0}, f32[256]{0}) tuple(%j, %z, /*index=2*/%w)
}

%condition (s: (s32[], f32[8,256], f32[256])) -> pred[] {
  %s = (s32[], f32[8,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(8)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}
"""


def test_a_loop_writes_into_its_state():
    text = (
        BODY
        + """
ENTRY %main (p: f32[256]) -> f32[] {
  %p = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %i = s32[] copy(%zero)
  %x = f32[8,256]{1,0} broadcast(%zero), dimensions={}
  %t = (s32[], f32[8,256]{1,0}, f32[256]{0}) tuple(%i, %x, %p)
  %w = (s32[], f32[8,256]{1,0}, f32[256]{0}) while(%t), condition=%condition, body=%body
  %r = f32[8,256]{1,0} get-tuple-element(%w), index=1
  ROOT %c = f32[] reduce(%r, %p), to_apply=%add
}
"""
    )
    # The stack of eight, once, and what one turn makes; the argument goes round and is no temporary.
    assert peak(text) == pytest.approx(9 * KIB, abs=16)


def test_branches_take_turns():
    branch = """
%{name} (q: f32[256]) -> f32[256] {{
  %q = f32[256]{{0}} parameter(0)
  %a = f32[{size}]{{0}} broadcast(%q), dimensions={{}}
  ROOT %b = f32[256]{{0}} slice(%a), slice={{[0:256]}}
}}
"""
    text = (
        branch.format(name="small", size=256)
        + branch.format(name="large", size=1024)
        + """
ENTRY %main (p: f32[256]) -> f32[] {
  %p = f32[256]{0} parameter(0)
  %which = pred[] constant(true)
  %r = f32[256]{0} conditional(%which, %p, %p), branch_computations={%small, %large}
  ROOT %c = f32[] reduce(%r, %p), to_apply=%add
}
"""
    )
    assert peak(text) == 5 * KIB


def test_a_temporary_is_where_the_result_will_be():
    text = """
ENTRY %main (p: f32[256]) -> (f32[256]) {
  %p = f32[256]{0} parameter(0)
  %a = f32[256]{0} reverse(%p), dimensions={0}
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %c = f32[256]{0} reverse(%b), dimensions={0}
  ROOT %t = (f32[256]{0}) tuple(%c)
}
"""
    assert peak(text) == KIB


def test_frames_lead_to_the_innermost_line():
    text = (
        HEAD
        + """
FileNames
1 "/home/me/model.py"

FunctionNames
1 "loss"
2 "Block.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=25 end_column=38}
2 {file_name_id=1 function_name_id=2 line=7 end_line=7 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  ROOT %a = f32[256]{0} sine(%p), metadata={op_name="jit(loss)/jvp(M)/sin" stack_frame_id=2}
}
"""
    )
    module = parse(text)
    last = module.computations["main"].instructions["a"]
    assert last.op_name == "jit(loss)/jvp(M)/sin"
    assert [(frame.function, frame.line) for frame in module.frames[last.frame]] == [
        ("loss", 11),
        ("Block.__call__", 7),
    ]
    assert module.is_scheduled


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["%a = f32[256]{0} custom-call(%p)"], 1),
        (["%a = f32[256]{0} custom-call(%p)", "%v = f32[256]{0} bitcast(%a)"], 2),
        (["%t = (f32[256]{0}) custom-call(%p)", "%v = f32[256]{0} get-tuple-element(%t), index=0"], 2),
    ],
    ids=["itself", "a view", "an element of a tuple"],
)
def test_what_is_read_through_a_name_is_not_written_over(lines, expected):
    """A result shares the memory of an operand only where this is the instruction that made it, as in XLA."""
    last = lines[-1].split()[0]
    text = [
        "ENTRY %main (p: f32[256]) -> f32[] {",
        "%p = f32[256]{0} parameter(0)",
        *lines,
        f"%b = f32[256]{{0}} exponential({last})",
        "ROOT %c = f32[] reduce(%b, %p), to_apply=%add",
    ]
    assert peak("\n  ".join(text) + "\n}\n") == expected * KIB
