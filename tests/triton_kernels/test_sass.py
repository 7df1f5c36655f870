"""Finding the loops of disassembled machine code."""

import pytest

from blockdiag.triton_kernels.launch.sass import loop_depths

# The code has a loop within a loop. One wait for a barrier is behind the kernel's end and jumps back into the inner
# loop. A second wait jumps to code outside of loops. The last branch is the padding behind every kernel.
NESTED = """
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_5) ;
.L_x_6:
        /*0020*/                   STL.64 [R1], R2 ;
.L_x_0:
        /*0030*/                   LDL R4, [R1+0x8] ;
        /*0040*/                   BSSY B0, `(.L_x_2) ;
.L_x_1:
        /*0050*/                   FFMA R6, R7, R8, R9 ;
        /*0060*/              @!P1 BRA `(.L_x_3) ;
.L_x_4:
        /*0070*/                   BRA.U UP0, `(.L_x_1) ;
        /*0080*/                   BSYNC B0 ;
.L_x_2:
        /*0090*/              @!P2 CALL.REL.NOINC `(.L_x_7) ;
        /*00a0*/                   BRA `(.L_x_0) ;
.L_x_7:
        /*00b0*/                   LDL.LU.64 R2, [R1] ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R5 ;
        /*00e0*/              @!P1 BRA `(.L_x_3) ;
        /*00f0*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R5 ;
        /*0110*/              @!P0 BRA `(.L_x_5) ;
        /*0120*/                   BRA `(.L_x_6) ;
.L_x_8:
        /*0130*/                   BRA `(.L_x_8);
        /*0140*/                   NOP;
"""

# Warps wait for work, branch to it by its number and wait again.
SPECIALISED = """
.L_x_0:
        /*0000*/                   BAR.SYNC 0x1 ;
        /*0010*/                   BRX R2 -0x20                    (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0020*/                   LDL R2, [R1] ;
        /*0030*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*0040*/                   STL [R1], R2 ;
        /*0050*/                   EXIT ;
"""


def test_loop_depths_follow_control_flow_and_not_positions():
    depths = [(text.split(" ;")[0], depth) for text, depth in loop_depths(NESTED)]
    assert depths == [
        ("MOV R1, c[0x0][0x28]", 0),
        ("@!P0 BRA `(.L_x_5)", 0),
        ("STL.64 [R1], R2", 0),
        ("LDL R4, [R1+0x8]", 1),
        ("BSSY B0, `(.L_x_2)", 1),
        ("FFMA R6, R7, R8, R9", 2),
        ("@!P1 BRA `(.L_x_3)", 2),
        ("BRA.U UP0, `(.L_x_1)", 2),
        ("BSYNC B0", 1),
        ("@!P2 CALL.REL.NOINC `(.L_x_7)", 1),
        ("BRA `(.L_x_0)", 1),
        ("LDL.LU.64 R2, [R1]", 0),
        ("EXIT", 0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R5", 3),
        ("@!P1 BRA `(.L_x_3)", 3),
        ("BRA `(.L_x_4)", 2),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R5", 1),
        ("@!P0 BRA `(.L_x_5)", 1),
        ("BRA `(.L_x_6)", 0),
        ("BRA `(.L_x_8)", 0),
        ("NOP", 0),
    ]


def test_loop_depths_of_indirect_branches_follow_all_targets():
    assert [depth for _, depth in loop_depths(SPECIALISED)] == [1, 1, 1, 1, 0, 0]


def test_loop_depths_of_text_without_instructions_raises_value_error():
    with pytest.raises(ValueError, match="`sass` must be what nvdisasm prints"):
        loop_depths("Fatal   : no code\n")
