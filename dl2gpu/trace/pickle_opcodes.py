"""Opcodes that a Flight Recorder pickle can hold (FORMATS.md 2.4), by their names in pickletools.

PyTorch writes protocol 2; the last lines are what Python's own pickler puts in when a tool has
saved a dump again. No opcode that imports, calls or builds is among them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

PROTO: Final = 0x80
STOP: Final = 0x2E
MARK: Final = 0x28
EMPTY_DICT: Final = 0x7D
EMPTY_LIST: Final = 0x5D
SETITEMS: Final = 0x75
APPENDS: Final = 0x65
TUPLE2: Final = 0x86
BINUNICODE: Final = 0x58
BINPUT: Final = 0x71
LONG_BINPUT: Final = 0x72
BINGET: Final = 0x68
LONG_BINGET: Final = 0x6A
BININT1: Final = 0x4B
BININT2: Final = 0x4D
BININT: Final = 0x4A
LONG1: Final = 0x8A
BINFLOAT: Final = 0x47
NONE: Final = 0x4E
NEWTRUE: Final = 0x88
NEWFALSE: Final = 0x89

FRAME: Final = 0x95
MEMOIZE: Final = 0x94
SHORT_BINUNICODE: Final = 0x8C
BINUNICODE8: Final = 0x8D
SETITEM: Final = 0x73
APPEND: Final = 0x61
EMPTY_TUPLE: Final = 0x29
TUPLE: Final = 0x74
TUPLE1: Final = 0x85
TUPLE3: Final = 0x87
LONG4: Final = 0x8B

OPERANDS: Final = np.zeros(256, dtype=np.int64)
"""Bytes of the operand of each opcode; what a length in it announces comes on top."""
OPERANDS[[PROTO, BINGET, BINPUT, BININT1, SHORT_BINUNICODE, LONG1]] = 1
OPERANDS[BININT2] = 2
OPERANDS[[LONG_BINGET, LONG_BINPUT, BININT, BINUNICODE, LONG4]] = 4
OPERANDS[[BINFLOAT, FRAME, BINUNICODE8]] = 8
