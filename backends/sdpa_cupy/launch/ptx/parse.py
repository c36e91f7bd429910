"""The text of PTX as kernels of instructions, by the PTX ISA's syntax as far as NVRTC writes it."""

import re
from collections.abc import Iterator
from typing import NamedTuple

INTEGERS = {f"{letter}{8 * size}": size for letter in "bus" for size in (1, 2, 4, 8)}
SIZES = INTEGERS | {"pred": 1, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TARGET = re.compile(r"\.target\s+sm_(\d+)")
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{")
_VARIABLE = re.compile(r"\.(param|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[\d*\])?")
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$]+):|(?P<text>[^;{}][^;]*);)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_NAME = re.compile(r"[%$\w]+")
_RANGE = re.compile(r"(.+)<(\d+)>")


class Instruction(NamedTuple):
    """One instruction: its dotted name in parts, its operands as written, and the predicate that guards it."""

    text: str
    guard: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]


class Kernel(NamedTuple):
    """One entry: where its variables lie in their spaces, the types of its registers, and its code.

    Attributes
    ----------
    target : int
        The architecture that the module is for, as in 80.
    offsets : dict
        Of each parameter and variable within its space; memory that a launch adds to `shared` begins where that ends.
    sizes : dict
        Bytes of the spaces param, shared and local.
    registers : dict
        The type of each.
    labels : dict
        The index of the instruction that each stands before.
    targets : dict
        The labels in each table of branch targets.
    """

    name: str
    target: int
    offsets: dict[str, int]
    sizes: dict[str, int]
    registers: dict[str, str]
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    targets: dict[str, tuple[str, ...]]


def kernels(ptx: str) -> dict[str, Kernel]:
    """Return the kernels of a module by name."""
    ptx = _COMMENT.sub("", ptx)
    entries = list(_ENTRY.finditer(ptx))
    module = ptx[: entries[0].start()] if entries else ""
    target = int(found[1]) if (found := _TARGET.search(module)) else 0
    return {entry[1]: _kernel(entry[1], target, module + entry[2], ptx[entry.end() :]) for entry in entries}


def braced(operand: str) -> list[str]:
    """Return the registers of ``{a, b}``, or the operand itself as the only one."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def _kernel(name: str, target: int, declared: str, rest: str) -> Kernel:
    kernel = Kernel(name, target, {}, {"param": 0, "shared": 0, "local": 0}, {}, (), {}, {})
    code: list[Instruction] = []
    label = ""
    for text, is_label in _statements(rest, kernel.registers):
        if is_label:
            label = text
            kernel.labels[label] = len(code)
        elif text.startswith(".branchtargets"):
            kernel.targets[label] = tuple(_NAME.findall(text)[1:])
        elif text.startswith("."):
            declared += text
        else:
            code.append(_instruction(text))
    _place(kernel, declared)
    return kernel._replace(code=tuple(code))


def _statements(rest: str, registers: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield labels and statements of the body, and note its registers; those of inner blocks get names of their own."""
    scopes: list[dict[str, str]] = [{}]
    position = inner = 0
    while scopes:
        match = _STATEMENT.match(rest, position)
        if match is None:
            raise SyntaxError(f"PTX that is not understood: {rest[position : position + 80]!r}")
        position = match.end()
        if match["brace"] == "{":
            inner += 1
            scopes.append(dict(scopes[-1]))
        elif match["brace"] == "}":
            scopes.pop()
        elif match["label"]:
            yield match["label"], True
        elif match["text"].startswith(".reg"):
            _, kind, several = match["text"].split(None, 2)
            for name in _names(several):
                scopes[-1][name] = f"{name}.{inner}" if len(scopes) > 1 else name
                registers[scopes[-1][name]] = kind[1:]
        else:
            yield _renamed(match["text"].strip(), scopes[-1] if len(scopes) > 1 else {}), False


def _renamed(text: str, names: dict[str, str]) -> str:
    return _NAME.sub(lambda name: names.get(name[0], name[0]), text) if names else text


def _names(names: str) -> Iterator[str]:
    for name in names.split(","):
        if several := _RANGE.fullmatch(name.strip()):
            yield from (f"{several[1]}{n}" for n in range(int(several[2])))
        else:
            yield name.strip()


def _place(kernel: Kernel, declarations: str) -> None:
    """Give declared variables their places, last those of no size, which are what a launch adds."""
    variables = sorted(_VARIABLE.findall(declarations), key=lambda variable: variable[-1] == "[]")
    for space, alignment, kind, name, count in variables:
        step = int(alignment or SIZES[kind])
        kernel.offsets[name] = -(-kernel.sizes[space] // step) * step
        kernel.sizes[space] = kernel.offsets[name] + SIZES[kind] * int(count.strip("[]") or count == "")


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise SyntaxError(f"PTX that is not understood: {text!r}")
    negated, guard, name, operands = match.groups()
    parts = tuple(name.replace("::", ":").split("."))
    text = " ".join(text.split())
    return Instruction(text, guard, bool(negated), parts, tuple(each.strip() for each in _OPERAND.findall(operands)))
