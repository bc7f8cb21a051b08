"""Descriptors of wgmma that do not point to shared memory, in the disassembly of a kernel (nvdisasm, sm_90).

A product of tensor cores finds its factors in shared memory by descriptors of 64 bits, in pairs of uniform registers:
the lower word has the address, the upper word is constant. ptxas of CUDA 12.8 can lose the registers of an address to
which it adds several constants, if one of them is negative. The descriptors are then made of other registers. Constants
are negative if a row of the factor has 32 or 64 bytes in shared memory."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from functools import reduce
from typing import NamedTuple

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?(U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_REGISTER, _PREDICATE = re.compile(r"\b(U?R)(\d+)\b"), re.compile(r"!?U?P(T|\d+)$")
_STACK, _WORD = re.compile(r"\[R1(?:\+(-?0x[0-9a-f]+))?\]$"), re.compile(r"(U?R|L)-?\d+$")
_PRODUCTS, _ATOMS = ("HGMMA", "QGMMA", "IGMMA"), ("ATOM", "ATOMG", "ATOMS")
_OPAQUE = (*_PRODUCTS, *_ATOMS, "LDG", "LDS", "LDSM", "LD", "LDC", "ULDC")  # what they write is no address


class _Bits(NamedTuple):
    """Where the bits of a register come from."""

    sources: frozenset[str] = frozenset()  # names of special registers and of instructions; none of constants
    is_shared: bool = False  # an address of shared memory is among them, whichever way was taken
    factors: tuple[_Bits, ...] = ()  # of an exclusive or: ptxas swaps two registers by three of them


class _Instruction(NamedTuple):
    is_conditional: bool
    name: str
    kind: str  # the first part of the name
    operands: list[str]
    written: list[str]  # registers; "L16" is the word at byte 16 of the stack


def lost(disassembly: str) -> tuple[int, list[str]]:
    """Return the number of descriptors, and a line per descriptor whose lower word is no address of shared memory or
    whose upper word is not constant."""
    flow = _Flow(disassembly)
    words = []
    for at, each in enumerate(flow.code):
        if each.kind in _PRODUCTS:
            position, text = next((i, text) for i, text in enumerate(each.operands) if text.startswith("gdesc"))
            first = int(_REGISTER.findall(text)[0][1])
            words += [(at, first + 2)] + ([] if position == 2 else [(at, first)])  # the left factor is in registers, or
    found = flow.before([(at, f"UR{low + i}") for at, low in words for i in (0, 1)])
    lines = []
    for at, low in words:
        address, constant = found[at, f"UR{low}"], found[at, f"UR{low + 1}"]
        if not address.is_shared or constant.sources:
            sources = f"UR{low} of {sorted(address.sources)}, UR{low + 1} of {sorted(constant.sources)}"
            lines.append(f"{flow.code[at].name} {', '.join(flow.code[at].operands)}: {sources}")
    return len(words), lines


class _Flow:
    """The instructions of a kernel, and the ways between them."""

    def __init__(self, disassembly: str) -> None:
        self.code: list[_Instruction] = []
        labels: dict[str, int] = {}
        for line in disassembly.splitlines():
            if line.startswith((".L_x_", "$")):
                labels[line.split(":")[0]] = len(self.code)
            elif match := _LINE.match(line):
                self.code.append(_instruction(*match.groups()))
        self._ways: list[list[int]] = [[] for _ in range(len(self.code) + 1)]  # the instructions before each
        for at, each in enumerate(self.code):
            if each.kind in ("BRA", "CALL") and (target := labels.get(each.operands[-1].strip("`()"))) is not None:
                self._ways[target].append(at)
            if each.is_conditional or not (each.kind in ("EXIT", "RET", "BRA") and len(each.operands) < 2):
                self._ways[at + 1].append(at)
        self._begins: list[int] = []  # of the straight part that each instruction is in
        self._writes: dict[str, list[int]] = defaultdict(list)
        for at, each in enumerate(self.code):
            self._begins.append(self._begins[-1] if self._ways[at] == [at - 1] else at)
            for word in each.written:
                self._writes[word].append(at)

    def before(self, wanted: list[tuple[int, str]]) -> dict[tuple[int, str], _Bits]:
        """Return what registers hold before instructions. Begins with nothing known and adds each way's bits."""
        keys = {key: self._since(*key) for key in wanted}
        found: dict[tuple[int, str], _Bits | None] = dict.fromkeys(keys.values())
        users: dict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
        work = list(found)
        while work:
            place, word = key = work.pop()
            bits = None if self._ways[place] else _Bits(frozenset({"undefined"}))
            for at in self._ways[place]:
                each = self.code[at]
                names = _read(each, each.written.index(word)) if word in each.written else []
                keeps = word not in each.written or each.is_conditional
                needs = [self._since(at, name) for name in (*names, *([word] if keeps else [])) if _WORD.match(name)]
                for need in needs:
                    users[need].add(key)
                    if need not in found:
                        found[need] = None
                        work.append(need)
                known = [found[need] for need in needs]
                kept = known.pop() if keeps else None
                if word in each.written and None not in known:
                    made = [bits for bits in known if bits is not None]
                    made += [_Bits(frozenset({name}), name == "SR_CgaCtaId") for name in names if not _WORD.match(name)]
                    bits = _either(bits, _result(each, made))
                bits = _either(bits, kept)
            if bits != found[key]:
                found[key] = bits
                work.extend(users[key])
        return {key: found[since] or _Bits() for key, since in keys.items()}

    def _since(self, at: int, word: str) -> tuple[int, str]:
        """Return the first place from which to the instruction `at` nothing writes the word."""
        last = bisect_left(self._writes[word], at) - 1
        return max(self._begins[at], self._writes[word][last] + 1 if last >= 0 else 0), word


def _instruction(predicate: str | None, name: str, text: str) -> _Instruction:
    operands = re.split(r",\s*(?![^\[]*\])", text.replace(".reuse", ""))
    kind, wide = name.split(".")[0], 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    if kind in _PRODUCTS:
        wide = int(re.findall(r"64x(\d+)x", name)[0]) // (4 if ".F16" in name.split("x")[-1][:7] else 2)
    elif kind in ("HMMA", "IMMA", "LDSM", "CS2R", "DADD", "DMUL", "DFMA"):
        wide = {"HMMA": 4, "IMMA": 4, "LDSM": int(name[-1]) if name[-1] in "24" else 1}.get(kind, 2)
    first = operands[bool(_PREDICATE.match(operands[0])) and kind in ("SHFL", "MATCH", "LOP3", "ULOP3", *_ATOMS)]
    written = [f"{match[1]}{int(match[2]) + i}" for i in range(wide)] if (match := _REGISTER.fullmatch(first)) else []
    if kind == "STL" and (match := _STACK.match(first)):
        written = [f"L{int(match[1] or '0', 16) + 4 * i}" for i in range(wide)]
    return _Instruction(predicate not in (None, "PT", "UPT"), name, kind, operands, written)


def _read(each: _Instruction, word: int) -> list[str]:
    """Return what a written word depends on: registers, words of the stack, and names of other sources."""
    if each.kind == "LDL" and (match := _STACK.match(each.operands[1])):
        return [f"L{int(match[1] or '0', 16) + 4 * word}"]
    if each.kind in (*_OPAQUE, "LDL"):
        return [each.kind]
    step = word if each.name == "UIADD3.64" or each.kind == "STL" else 0
    names = []
    for operand in each.operands[1:]:
        names += [f"{kind}{int(number) + step}" for kind, number in _REGISTER.findall(operand)]
        names += [operand.split(".")[0].split("[")[0]] if operand.startswith(("SR_", "c[")) else []
    return names


def _result(each: _Instruction, made: list[_Bits]) -> _Bits:
    if each.kind in ("SEL", "USEL"):
        return reduce(_either, made, None) or _Bits()
    is_xor = each.kind in ("LOP3", "ULOP3") and "0x3c" in each.operands and len(made) == 2
    alone = tuple(bits._replace(factors=()) for bits in made) if is_xor else ()
    for bits, other in zip(made, alone[::-1], strict=False):
        if other in bits.factors:
            return bits.factors[1 - bits.factors.index(other)]
    sources = frozenset[str]().union(*(bits.sources for bits in made))
    return _Bits(sources, any(bits.is_shared for bits in made), alone)


def _either(one: _Bits | None, other: _Bits | None) -> _Bits | None:
    if one is None or other is None or one == other:
        return one or other
    return _Bits(one.sources | other.sources, one.is_shared and other.is_shared)
