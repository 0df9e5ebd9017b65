"""train_gpt.py as a text: what can be promised about its form, and what a program can check of that.

A rule is a function check_x(src) -> findings, each 'line N: what, found, wanted'. Every rule runs on the
real file and must find nothing. Every rule also runs on GOOD, a trainer in small that keeps them all, and on
copies of GOOD with one planted fault each (FAULTS), of which exactly the rule in question must complain.

  1  Reading a source     Text: comments, docstrings, sections, names, taken apart once for all rules
  2  Layout               banners, contents, prose, invariants, citations, ceiling, limits, density
  3  Layering             order, may-use table, the door to the outside, import without effect, compiler
  4  Content              numbers, words, dead code, characters, kernels, topology, settings, names
  5  GOOD and FAULTS      the rules rule, and each of them can fail
  6  The real file        all rules, budgets as warnings, import in a bare process, paths in the repository
"""
import ast
import bisect
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import tokenize
import warnings
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"

TITLES = {1: "Config", 2: "Host", 3: "Numbers", 4: "Kernels", 5: "Ops", 6: "Model", 7: "Optimizers",
          8: "Data", 9: "Schedules", 10: "Graphs", 11: "Train"}
SECTIONS = set(TITLES)


# ======== 1. Reading a source ===============================================================================

BANNER = re.compile(r"# ={8} (?P<number>\d+)\. (?P<title>\S.*?) =+ budget (?P<budget>[\d,]+) ={4}")
SUBBANNER = re.compile(r"# -{4} (?P<section>\d+)\.(?P<number>\d+) (?P<name>[^:]+): (?P<what>\S.*?) -{2,}")
CONTENTS = re.compile(r" +(?P<number>\d+) +(?P<title>[A-Z]\w*) +(?P<budget>\d[\d,]*)(?:  +\S.*)?")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTION)
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Section(NamedTuple):
    number: int   # 0 is the header: docstring and imports
    title: str
    budget: int
    first: int    # its banner's line
    last: int


class Comment(NamedTuple):
    line: int
    text: str
    alone: bool   # nothing else stands on its line


class Use(NamedTuple):
    """One use of a name from module level."""
    line: int
    name: str     # first part of the chain as written: np
    path: str     # the whole chain, imports resolved: numpy.memmap
    owner: int    # position in tree.body of the statement in which it stands


class Text:
    """A source, taken apart once for all rules."""

    def __init__(self, src):
        self.lines, self.tree = src.splitlines(), ast.parse(src)
        self.nodes = sorted(ast.walk(self.tree), key=lambda node: getattr(node, "lineno", 0))
        tokens = tokenize.generate_tokens(io.StringIO(src).readline)
        self.comments = [Comment(n, words, self.lines[n - 1].lstrip() == words)
                         for kind, words, (n, _), _, _ in tokens if kind == tokenize.COMMENT]
        self.banners = [comment for comment in self.comments
                        if is_banner(comment.text) and self.lines[comment.line - 1][0] == "#"]
        self.docs = [(node, node.body[0]) for node in self.nodes if isinstance(node, DOCUMENTED)
                     and node.body and is_string(node.body[0])]
        self.doc_lines = {n for _, doc in self.docs for n in range(doc.lineno, doc.end_lineno + 1)}
        self.sections = self._sections()
        self._starts = [section.first for section in self.sections]
        self.imports = {}
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports |= imported(node)
        self.home = {}   # name -> position in tree.body of the statement that first binds it
        for i, statement in enumerate(self.tree.body):
            for name in bound([statement]):
                self.home.setdefault(name, i)
        self.uses = [Use(node.lineno, dotted(node).split(".")[0], self.resolve(node), i)
                     for i, statement in enumerate(self.tree.body) for node in global_reads(statement)]

    def _sections(self):
        starts = [(1, 0, "Header", 0)]
        for line, text, _ in self.banners:
            if match := re.match(r"# =+ (\d+)\. (\w+)", text):
                budget = re.search(r"budget ([\d,]+)", text)
                starts.append((line, int(match[1]), match[2], number(budget[1]) if budget else 0))
        ends = [start[0] - 1 for start in starts[1:]] + [len(self.lines)]
        return [Section(n, title, budget, first, last)
                for (first, n, title, budget), last in zip(starts, ends, strict=True)]

    def section_of(self, line):
        """Number of the section in which a line stands."""
        return self.sections[bisect.bisect_right(self._starts, line) - 1].number

    def functions(self):
        return [node for node in self.nodes if isinstance(node, FUNCTION)]

    def resolve(self, node):
        """Full dotted path of an expression such as `np.memmap`, '' if it is none."""
        name, *rest = dotted(node).split(".")
        return ".".join([self.imports.get(name, name), *rest])

    def is_kernel(self, function):
        return "triton.jit" in [self.resolve(getattr(mark, "func", mark)) for mark in function.decorator_list]

    def prose(self):
        """(first line, text) of each docstring and each block of comments without its '#'; no banners."""
        for _, doc in self.docs:
            yield doc.lineno, "\n".join(self.lines[doc.lineno - 1:doc.end_lineno])
        block, start = [], 0
        for line, text, alone in self.comments + [Comment(0, "", False)]:
            if block and not (alone and line == start + len(block)):
                yield start, "\n".join(block)
                block = []
            if text and not is_banner(text):
                block, start = [*block, text.lstrip("#")], start if block else line


read = lru_cache(maxsize=None)(Text)


def number(text):
    return int(text.replace(",", ""))


def at(line, what, found, wanted):
    return f"line {line}: {what}, found {found}, wanted {wanted}"


def is_string(statement):
    return (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str))


def is_banner(comment):
    return re.match(r"#\s*[=-]{2,}", comment) is not None


def is_int(node):
    """An integer literal, with or without a sign."""
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and type(node.value) is int


def imported(node):
    """{name that an import binds: what it stands for}"""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    tops = {alias.name.split(".")[0] for alias in node.names if not alias.asname}
    return {alias.asname: alias.name for alias in node.names if alias.asname} | dict(zip(tops, tops))


def parameters(function):
    a = function.args
    return a.posonlyargs + a.args + a.kwonlyargs + [arg for arg in (a.vararg, a.kwarg) if arg]


def dotted(node):
    """'os.environ.get' for that chain of attributes; '' for an expression that does not start at a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def bound(body):
    """Names that these statements bind in their own scope."""
    names, released, todo = set(), set(), list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= set(imported(node))
        elif isinstance(node, ast.Global):
            released |= set(node.names)
        elif isinstance(node, ast.Name):
            names |= {node.id} if not isinstance(node.ctx, ast.Load) else set()
        elif not isinstance(node, (ast.Lambda, *COMPREHENSION)):
            names |= {name for name in (getattr(node, "name", None), getattr(node, "rest", None)) if name}
            todo += ast.iter_child_nodes(node)
    return names - released


def global_reads(node, local=frozenset()):
    """All chains `a.b.c` in a node whose `a` is read from module level, not from a scope in between."""
    if isinstance(node, (*FUNCTION, ast.Lambda)):
        body = node.body if isinstance(node.body, list) else [node.body]
        inner = local | {arg.arg for arg in parameters(node)} | bound(body)
        scopes = [(child, inner if child in body else local) for child in ast.iter_child_nodes(node)]
    elif isinstance(node, ast.ClassDef):   # its names are seen by its own statements, not inside its methods
        inner = local | bound(node.body)
        scopes = [(child, inner if child in node.body and not isinstance(child, FUNCTION) else local)
                  for child in ast.iter_child_nodes(node)]
    elif isinstance(node, COMPREHENSION):
        inner = local | bound([generator.target for generator in node.generators])
        scopes = [(child, inner) for child in ast.iter_child_nodes(node)]
    elif path := dotted(node):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if path.split(".")[0] not in local and not stored:
            yield node
        return
    else:
        scopes = [(child, local) for child in ast.iter_child_nodes(node)]
    for child, names in scopes:
        yield from global_reads(child, names)


# ======== 2. Layout =========================================================================================

FILE_LINES, KERNEL_LINES, OTHER_LINES, KERNEL_PART_LINES = 4500, 2000, 2500, 130
COLUMNS, FUNCTION_LINES, JIT_LINES, TRAIN_LINES, POSITIONAL = 110, 60, 90, 120, 6
DENSITY, KERNEL_DENSITY = (0.25, 0.35), 0.20
HEADER = (("a command", r"torchrun|run\.sh"), ("the contents", CONTENTS.pattern + "$"),
          ("the letters", r"\s*T\s.*tokens"), ("the bibliography", r"\s*\[1\] "))


def check_banners(src):
    """Banners have one form and ascending numbers: sections with the plan's titles, subsections in theirs."""
    bad, last = [], (0, 0)
    for line, comment, _ in read(src).banners:
        if match := BANNER.fullmatch(comment):
            here, title = (int(match["number"]), 0), match["title"]
            if TITLES.get(here[0]) != title:
                bad.append(at(line, "section title", title, TITLES.get(here[0], "number 1 to 11")))
        elif match := SUBBANNER.fullmatch(comment):
            here = int(match["section"]), int(match["number"])
            if here[0] != last[0]:
                bad.append(at(line, "subsection", f"{here[0]}.{here[1]}", f"one of section {last[0]}"))
        else:
            bad.append(at(line, "banner", comment, "# ======== 6. Model ==== budget 380 ==== "
                                                   "or # ---- 6.1 name: what ----"))
            continue
        if here <= last:
            bad.append(at(line, "number of a section", here, f"more than {last}"))
        last = here
    return bad


def check_contents(src):
    """The header's table of contents has the plan's titles and the same budgets as the banners."""
    text, rows, bad = read(src), {}, []
    for n, row in header_rows(text, CONTENTS):
        rows[int(row["number"])] = number(row["budget"])
        title = TITLES.get(int(row["number"]), "Header")
        if row["title"] != title:
            bad.append(at(n, "title in the contents", row["title"], title))
    if list(rows) != sorted(rows):
        bad.append(at(1, "numbers in the contents", list(rows), "ascending"))
    return bad + [at(section.first, f"budget of section {section.number}", section.budget,
                          f"{rows.get(section.number, 'a row')} as in the contents")
                  for section in text.sections[1:] if rows.get(section.number) != section.budget]


def check_header(src):
    """The header docstring has its parts in order: claim, commands, contents, letters, bibliography."""
    text, bad, last = read(src), [], 0
    if not text.docs or text.docs[0][0] is not text.tree or not text.lines[0].strip('" '):
        return [at(1, "header", "no docstring", "a claim on line 1")]
    for what, pattern in HEADER:
        n = next((n for n, _ in header_rows(text, re.compile(pattern), whole=False)), 0)
        if n <= last:
            bad.append(at(n or 1, f"{what} in the header", n or "none", f"after line {last}"))
        last = max(n, last)
    return bad


def header_rows(text, pattern, whole=True):
    """(line, match) for each line of the module docstring that the pattern matches."""
    doc = next((doc for node, doc in text.docs if node is text.tree), None)
    for n in range(doc.lineno, doc.end_lineno + 1) if doc else ():
        if match := pattern.fullmatch(text.lines[n - 1]) if whole else pattern.search(text.lines[n - 1]):
            yield n, match


def opening(text, section):
    """The comment lines that follow a section's banner without a gap."""
    lines = text.lines[section.first:section.last]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#") or is_banner(line)), len(lines))
    return lines[:end]


def check_prose(src):
    """A section opens with 3 to 12 lines: what is here, what it promises, what it does not know.

    Its invariants may make up the 3, but are not counted against the 12.
    """
    bad = []
    for section in read(src).sections[1:]:
        lines = [line for line in opening(read(src), section) if line.strip("# ")]
        prose = next((i for i, line in enumerate(lines) if line.startswith("# (1) ")), len(lines))
        if len(lines) < 3 or prose > 12:
            bad.append(at(section.first, f"opening of section {section.number}", len(lines), "3 to 12 lines"))
    return bad


def check_invariants(src):
    """Sections 7, 10 and 11 open with invariants (1), (2), ...; 'by (n)' cites one of its own section."""
    text, bad, known = read(src), [], {}
    for section in text.sections[1:]:
        marks = [re.match(r"# \((\d+)\) ", line) for line in opening(text, section)]
        numbers = [int(mark[1]) for mark in marks if mark]
        known[section.number] = numbers
        if numbers != list(range(1, len(numbers) + 1)) or not numbers and section.number in (7, 10, 11):
            bad.append(at(section.first, "invariants of the section", numbers, "(1), (2), ..."))
    for start, block in text.prose():
        for match in re.finditer(r"\bby \((\d+)\)", block):
            line = start + block[:match.start()].count("\n")
            if int(match[1]) not in known.get(text.section_of(line), ()):
                bad.append(at(line, "citation", match[0], "an invariant of its section"))
    return bad


def check_citations(src):
    """Sources are [n]: the bibliography counts from 1 without gaps, and comments cite only what it has."""
    text = read(src)
    entries = {int(match[1]): n for n, match in header_rows(text, re.compile(r"^\s*\[(\d+)\] "), whole=False)}
    bad = [at(n, "bibliography", f"[{i}]", "no gaps") for i, n in entries.items() if i > len(entries)]
    for start, block in text.prose():
        for match in re.finditer(r"(?:^|[\s(])\[([1-9]\d?)\](?=$|[\s.,;:)])", block, re.MULTILINE):
            if int(match[1]) not in entries:
                line = start + block[:match.start(1)].count("\n")
                bad.append(at(line, "source", f"[{match[1]}]", "a number of the bibliography"))
    return bad


def check_ceiling(src):
    """4,500 lines in all: section 4 at most 2,000, the rest at most 2,500; and so do the budgets promise."""
    text = read(src)
    kernels = sum(s.last - s.first + 1 for s in text.sections if s.number == 4)
    rows = {int(row["number"]): number(row["budget"]) for _, row in header_rows(text, CONTENTS)}
    kernel_rows = rows.pop(4, 0)
    limits = [("lines of the file", len(text.lines), FILE_LINES),
              ("lines of section 4", kernels, KERNEL_LINES),
              ("lines outside section 4", len(text.lines) - kernels, OTHER_LINES),
              ("budget of section 4", kernel_rows, KERNEL_LINES),
              ("budgets outside section 4", sum(rows.values()), OTHER_LINES)]
    return [at(1, what, found, f"at most {limit}") for what, found, limit in limits if found > limit]


def over_budget(src):
    """Notes, not faults: sections over their budget, a kernel with its reference over 130 lines."""
    text = read(src)
    notes = [at(s.first, f"section {s.number} {s.title}", f"{s.last - s.first + 1} lines", f"{s.budget}")
             for s in text.sections[1:] if s.last - s.first + 1 > s.budget]
    edges = [banner.line for banner in text.banners]
    for first, end in zip(edges, [*edges[1:], len(text.lines) + 1], strict=True):
        if text.section_of(first) == 4 and end - first > KERNEL_PART_LINES:
            notes.append(at(first, "part of section 4", f"{end - first} lines", f"{KERNEL_PART_LINES}"))
    return notes


def check_lengths(src):
    """60 lines per function, 90 for a kernel, 120 for train; what is nested counts for its parent too."""
    text, bad = read(src), []
    for function in text.functions():
        lines = function.end_lineno - function.lineno + 1
        limit = TRAIN_LINES if function.name == "train" else FUNCTION_LINES
        limit = JIT_LINES if text.is_kernel(function) else limit
        if lines > limit:
            bad.append(at(function.lineno, f"lines of {function.name}", lines, f"at most {limit}"))
    return bad


def check_positional(src):
    """At most 6 positional parameters, self and ctx aside; the rest is keyword-only. Kernels are exempt."""
    text, bad = read(src), []
    for function in text.functions():
        names = [arg.arg for arg in function.args.posonlyargs + function.args.args]
        names = names[1:] if names[:1] in (["self"], ["cls"], ["ctx"]) else names
        if len(names) > POSITIONAL and not text.is_kernel(function):
            bad.append(at(function.lineno, f"positional parameters of {function.name}", len(names),
                          f"at most {POSITIONAL}"))
    return bad


def check_columns(src):
    """No line is longer than 110 columns, ends in blanks or holds a tab."""
    return ([at(n, "line", f"{len(line)} columns", f"at most {COLUMNS}")
             for n, line in enumerate(read(src).lines, 1) if len(line) > COLUMNS]
            + [at(n, "line", "a tab or blanks at its end", "neither")
               for n, line in enumerate(read(src).lines, 1) if "\t" in line or line != line.rstrip()])


def check_density(src):
    """25 to 35% of the non-blank lines carry a comment or docstring; in section 4 at least 20%."""
    text, bad = read(src), []
    worded = {comment.line for comment in text.comments} | text.doc_lines
    filled = [n for n, line in enumerate(text.lines, 1) if line.strip()]
    kernels = [n for n in filled if text.section_of(n) == 4]
    for what, lines, low, high in (("the file", filled, *DENSITY), ("section 4", kernels, KERNEL_DENSITY, 1)):
        share = sum(n in worded for n in lines) / len(lines) if lines else low
        if not low <= share <= high:
            bad.append(at(lines[0], f"density of {what}", f"{share:.1%}", f"{low:.0%} to {high:.0%}"))
    return bad


# ======== 3. Layering =======================================================================================

MAY_USE = {0: set(), 1: set(), 2: {1}, 3: set(), 4: {3}, 5: {3, 4}, 6: {1, 3, 5}, 7: {3, 4, 5}, 8: {1, 2},
           9: {1}, 10: {1, 2, 6, 7, 8}, 11: {1, 2, 6, 7, 8, 9, 10}}
MAY_USE_NAMES = {7: {"Comm"}, 10: {"FAST", "references"}}   # 10 alone may compile what FAST names
IGNORES = {4: {"cfg", "world", "rank", "step"}, 5: {"cfg", "world", "rank", "step"},
           6: {"world", "rank", "step", "clock"}, 7: {"cfg"}, 9: {"world", "rank"}}   # words it must not know
DOOR = {   # what leads outside: the sections that may use it
    **dict.fromkeys(("os.environ", "os.getenv", "os.putenv", "torch.distributed", "time", "subprocess",
                     "signal", "socket", "sys.stdout", "sys.stderr", ".write_text", ".write_bytes"), {2}),
    **dict.fromkeys(("open", "os.open", "io.open", ".read_text", ".read_bytes", "threading", "queue"),
                    {2, 8}),
    **dict.fromkeys(("numpy.memmap", "numpy.fromfile"), {8}),
    **dict.fromkeys(("torch.compile", "torch.cuda.CUDAGraph", "torch.cuda.graph", "torch.cuda.graphs",
                     "torch.cuda.make_graphed_callables"), {10}),
    "torch._inductor.config": set(),
    "torch": SECTIONS - {1, 9},
}
TORCHRUN = re.compile("'((LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_[A-Z_]+)'")
HARMLESS = re.compile(r"""   # calls that an import may make
    [A-Z]\w*                 # a class of this file; its arguments are looked at too
  | dataclasses\.(dataclass|replace|field) | functools\.(lru_cache|cache|cached_property|partial)
  | property | staticmethod | classmethod | \w+\.setter | contextlib\.contextmanager
  | dict | tuple | frozenset | set | list | range | float | int | bool | str | bytes | round | max | min | sum
  | len | abs | zip | enumerate | sorted
  | math\.\w+ | re\.(compile|sub) | pathlib\.Path | collections\.namedtuple | struct\.(Struct|calcsize)
  | torch\.(finfo|iinfo|device|no_grad|inference_mode|library\.\w+) | [A-Z]\w*\.define
  | torch\.autograd\.function\.once_differentiable | triton\.(jit|heuristics)
""", re.VERBOSE)
MAIN = ['if __name__ == "__main__":', "    main()"]


def check_order(src):
    """A line uses only names defined above it: functions, classes and constants alike."""
    text, bad = read(src), []
    for use in text.uses:
        home = text.home.get(use.name, -1)
        if home > use.owner:
            bad.append(at(use.line, use.name, f"defined at line {text.tree.body[home].lineno}", "above"))
    return bad


def check_layers(src):
    """A section uses names only of the sections granted to it in MAY_USE, and some words not at all."""
    text, bad = read(src), []
    for use in text.uses:
        if use.name not in text.home:
            continue
        here = text.section_of(use.line)
        there = text.section_of(text.tree.body[text.home[use.name]].lineno)
        if there not in {0, here} | MAY_USE[here] and use.name not in MAY_USE_NAMES.get(here, ()):
            bad.append(at(use.line, f"in section {here}", f"{use.name} of section {there}",
                               f"names of {sorted(MAY_USE[here])} only"))
    for node in text.nodes:
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        if name in IGNORES.get(here := text.section_of(getattr(node, "lineno", 1)), ()):
            bad.append(at(node.lineno, f"in section {here}", name, "a section that does not know it"))
    return bad


def check_door(src):
    """The outside has one door: environment, processes, clock, files and compiler, each in its sections."""
    text, bad = read(src), []
    paths = [(use.line, use.path) for use in text.uses
             if use.name in text.imports or use.name not in text.home]
    paths += [(node.lineno, f".{node.attr}") for node in text.nodes if isinstance(node, ast.Attribute)]
    for line, path in paths:
        here = text.section_of(line)
        bad += [at(line, f"in section {here}", path, f"section {sorted(allowed)}")
                for door, allowed in DOOR.items()
                if f"{path}.".startswith(f"{door}.") and here not in {0} | allowed]
    for use in text.uses:
        inside = text.section_of(use.line) == 2 and getattr(text.tree.body[use.owner], "name", "") == "Log"
        if use.path == "print" and not inside:
            bad.append(at(use.line, "print", "outside of Log", "Log of section 2"))
    for node in text.nodes:
        if (isinstance(node, ast.Call) and text.resolve(node.func) == "open"
                and text.section_of(node.lineno) == 8):
            modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
            bad += [at(node.lineno, "open in section 8", ast.unparse(mode), "reading")
                    for mode in modes if ast.unparse(mode) not in ("'r'", "'rb'")]
    return bad


def check_environment(src):
    """No environment switch but torchrun's: all else that a run can change is a field of Config."""
    text, bad = read(src), []
    for node in text.nodes:
        key = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice if text.resolve(node.value) == "os.environ" else None
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            key = node.left if text.resolve(node.comparators[0]) == "os.environ" else None
        elif (isinstance(node, ast.Call) and node.args
              and text.resolve(node.func) in ("os.environ.get", "os.getenv", "os.environ.pop")):
            key = node.args[0]
        if isinstance(key, ast.Constant) and not TORCHRUN.fullmatch(ast.unparse(key)):
            bad.append(at(node.lineno, "environment", ast.unparse(key), "torchrun's or a field of Config"))
    return bad


def check_one_rank(src):
    """One rank is no special case: outside section 2 nothing compares the world size with 1."""
    bad = []
    for node in read(src).nodes:
        if isinstance(node, ast.Compare) and read(src).section_of(node.lineno) != 2:
            sides = [node.left, *node.comparators]
            if any(map(is_int, sides)) and any(dotted(side).split(".")[-1] == "world" for side in sides):
                bad.append(at(node.lineno, "special case", ast.unparse(node), "Comm of 1 that does nothing"))
    return bad


def check_statements(src):
    """Module level holds the docstring, imports, assignments, functions, classes and, last, main()."""
    text, bad = read(src), []
    if text.lines[-2:] != MAIN:
        bad.append(at(len(text.lines), "last lines", text.lines[-2:], MAIN))
    for i, node in enumerate(text.tree.body):
        if i == 0 and is_string(node) or is_main(node) and node is text.tree.body[-1]:
            continue
        if text.section_of(node.lineno) == 0 and not isinstance(node, (ast.Import, ast.ImportFrom, ast.Try)):
            bad.append(at(node.lineno, "definition", "above section 1", "a section"))
        inner = [node]
        if isinstance(node, ast.Try) and all(map(is_import_error, node.handlers)):
            inner = [*node.body, *node.orelse, *node.finalbody, *(n for h in node.handlers for n in h.body)]
        bad += [at(n.lineno, "statement at module level", type(n).__name__, "imports and definitions")
                for n in inner if not isinstance(n, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign,
                                                     ast.AugAssign, ast.ClassDef, *FUNCTION))]
    for node in text.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and text.section_of(node.lineno):
            if {name.split(".")[0] for name in imported(node).values()} != {"triton"}:
                bad.append(at(node.lineno, ast.unparse(node), "below the header", "imports on top"))
    return bad


def is_main(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def is_import_error(handler):
    return dotted(handler.type) in ("ImportError", "ModuleNotFoundError") if handler.type else False


def check_import_calls(src):
    """What an import evaluates (values, defaults, decorators, class bodies) calls only what has no effect."""
    text, bad = read(src), []
    todo = [node for node in text.tree.body if not is_main(node)]
    while todo:
        node = todo.pop()
        marks = getattr(node, "decorator_list", [])
        called = [mark for mark in marks if not isinstance(mark, ast.Call)]
        called += [node.func] if isinstance(node, ast.Call) else []
        if isinstance(node, (*FUNCTION, ast.Lambda)):
            todo += [*marks, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        else:
            todo += ast.iter_child_nodes(node)
        bad += [at(node.lineno, "call at import", ast.unparse(function), "none with an effect")
                for function in called if not is_harmless(text, function)]
    return bad


def is_harmless(text, function):
    of_a_literal = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant)
    return of_a_literal or HARMLESS.fullmatch(text.resolve(function)) is not None


# ======== 4. Content ========================================================================================

CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
PLAIN_NUMBERS = {0, 1, 2, 0.5}
FORMULA_SIGNS = set("\u00b2\u00b3\u00b7\u221a\u2264\u2265\u2192\u00d7\u2212")   # 2 3 dot root <= >= -> x -
HISTORY = re.compile(r"\b(previously|no\s+longer(?!\s+than)|used\s+to\s+be|was\s+changed|formerly)\b", re.I)
MARKS = ("TO" "DO", "FIX" "ME", "XX" "X", "HA" "CK", "@@")   # in pieces, so that this file has none
MARKER = re.compile("|".join(mark if mark == "@@" else rf"\b{mark}\b" for mark in MARKS))
LABELS = ["math", "shapes", "dtypes", "tiling", "kind", "source"]
KINDS = ("bitwise", "reorder", "approx")
BAD_NAME = re.compile(r"args|info|data|tmp|idx2|cu_seqlens|.*_t|_[a-zA-Z]")
LETTERS = {"B": (), "S": (), "M": (4, 5), "K": (4, 5)}   # where a shape letter with one meaning may stand


def check_numbers(src):
    """Numbers other than 0, 1, 2, 0.5 have a name: UPPER_CASE in a module or class, or stand in section 1."""
    text, exempt = read(src), set()
    for owner in text.nodes:
        if isinstance(owner, (ast.Module, ast.ClassDef, ast.Try)):
            exempt |= {part for node in owner.body if is_constant(node) for part in ast.walk(node)}
        elif isinstance(owner, ast.keyword) and owner.arg == "dim":
            exempt |= set(ast.walk(owner))
    return [at(node.lineno, "number", node.value, "a named constant") for node in text.nodes
            if isinstance(node, ast.Constant) and type(node.value) in (int, float, complex)
            and node.value not in PLAIN_NUMBERS and node not in exempt and text.section_of(node.lineno) != 1]


def is_constant(statement):
    """An assignment to UPPER_CASE, or to an item of it."""
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    names = [part.id for target in targets if target for part in ast.walk(target)
             if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
             or isinstance(target, ast.Subscript) and part is target.value]
    return isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and bool(names) and all(
        CONSTANT.fullmatch(name) for name in names)


def check_markers(src):
    """No marker of unfinished work."""
    return [at(n, "marker", match[0], "finished work") for n, line in enumerate(read(src).lines, 1)
            if (match := MARKER.search(line))]


def check_history(src):
    """Comments and docstrings say what is, not what was: git and records/ hold that."""
    return [at(start + block[:match.start()].count("\n"), "history", " ".join(match[0].split()), "what is")
            for start, block in read(src).prose() for match in HISTORY.finditer(block)]


def check_dead_code(src):
    """No code in comments or loose strings.

    A comment is code if its line parses as a statement that does something, unless it goes on with a sentence
    of the line above, or is a formula: set in by two blanks below prose, or at the end of a line of code.
    """
    text, prose, bad = read(src), {}, []   # prose: line -> comment that stands alone there and is no code
    for line, words, alone in text.comments:
        above = prose.get(line - 1, "#.")
        in_sentence = above.rstrip()[-1] not in ".:;?!#"
        formula = line - 1 in prose and words.startswith("#  ")
        if not (in_sentence or formula) and is_code(words.lstrip("# "), alone):
            bad.append(at(line, "comment", words, "prose"))
        elif alone and not is_banner(words):
            prose[line] = words
    docs = [doc for _, doc in text.docs]
    return bad + [at(node.lineno, "loose string", ast.unparse(node)[:40], "a comment")
                  for node in text.nodes if is_string(node) and node not in docs]


def is_code(words, alone):
    """The text of a comment parses as one statement, and not as one that is as likely to be prose."""
    if words.startswith("@"):
        words += "\ndef f():"
    try:
        node, = ast.parse(words + " pass" if words.endswith(":") else words).body
    except (SyntaxError, ValueError):
        return False
    if isinstance(node, (ast.If, ast.While)):    # 'if needed:' is prose, 'if x > 1:' is not
        return not isinstance(node.test, ast.Name)
    if isinstance(node, ast.With):
        return isinstance(node.items[0].context_expr, ast.Call)
    if isinstance(node, (ast.For, ast.Return, ast.Import, ast.ImportFrom, ast.Raise, *FUNCTION)):
        return True
    if isinstance(node, ast.AnnAssign):          # 'Trap: a = b' is prose, 'width: int = 3' is not
        return alone and node.value is not None and not words[0].isupper()
    return alone and (isinstance(node, (ast.Assign, ast.AugAssign))
                      or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def check_characters(src):
    """ASCII everywhere; docstrings may also have the signs of formulae and Greek letters."""
    text = read(src)
    return [at(n, "character", ascii(c), "ASCII, or in a docstring a sign of formulae")
            for n, line in enumerate(text.lines, 1) for c in line
            if not c.isascii() and not (n in text.doc_lines and (c in FORMULA_SIGNS or is_greek(c)))]


def is_greek(character):
    return 0x370 <= ord(character) < 0x400


def check_kernels(src):
    """A launcher's docstring has the six labels; a kernel is called _x_kernel and has at most one flag."""
    text, bad = read(src), []
    jitted = {f.name: f for f in text.functions() if text.is_kernel(f)}
    defined = {f.name for f in text.functions()}
    for name, kernel in jitted.items():
        if text.section_of(kernel.lineno) != 4:
            bad.append(at(kernel.lineno, "kernel", name, "section 4"))
        tests = [node.test for node in ast.walk(kernel) if isinstance(node, (ast.If, ast.IfExp))]
        asked = {part.id for test in tests for part in ast.walk(test) if isinstance(part, ast.Name)}
        flags = asked & {arg.arg for arg in parameters(kernel) if "constexpr" in ast.unparse(arg)}
        if len(flags) > 1:
            bad.append(at(kernel.lineno, f"flags of {name}", sorted(flags), "at most one"))
    for function in text.functions():
        launched = {part.id for node in ast.walk(function) if isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Subscript) for part in ast.walk(node.func.value)
                    if isinstance(part, ast.Name)} & set(jitted)
        bad += [at(function.lineno, "launched kernel", kernel, "a name like _x_kernel")
                for kernel in sorted(launched) if not re.fullmatch(r"_\w+_kernel", kernel)]
        if launched:
            bad += kernel_docstring(function, defined)
    return bad


def kernel_docstring(function, defined):
    """Findings on one launcher's docstring."""
    doc = ast.get_docstring(function) or ""
    rows = re.findall(rf"^({'|'.join(LABELS)})\s{{2,}}(\S.*)$", doc, re.MULTILINE)
    line, what = function.lineno, f"docstring of {function.name}"
    if [label for label, _ in rows] != LABELS:
        return [at(line, what, [label for label, _ in rows], LABELS)]
    kind, source = re.search(r"^kind\s+(.*)^source\s+(.*)", doc, re.MULTILINE | re.DOTALL).groups()
    wanted = [("what it computes, first", not doc.startswith("math")),
              (" | ".join(KINDS), kind.startswith(KINDS)),
              ("the reference it is compared with", set(re.findall(r"\w+_ref\b", kind)) & defined),
              ("source: [n], ours or records/NNN", re.match(r"\[\d+\]|ours\b|records/\d", source))]
    return [at(line, what, "none", want) for want, met in wanted if not met]


def check_topology(src):
    """In section 6 no code but LAYERS has the number of a layer: no `i == 3`, `i in (1, 2)`, `blocks[3]`."""
    text, bad = read(src), []
    for node in text.nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            numbers = [s for s in sides if is_int(s) or getattr(s, "elts", ()) and all(map(is_int, s.elts))]
            named = any(isinstance(side, ast.Name) for side in sides)
            equal = any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops)
            found = named and equal and numbers
        else:
            found = (isinstance(node, ast.Subscript) and is_int(node.slice)
                     and re.search(r"(s|\bLAYERS)$", dotted(node.value)))
        if found and text.section_of(node.lineno) == 6:
            bad.append(at(node.lineno, "layer number", ast.unparse(node), "a column of LAYERS"))
    return bad


def check_settings(src):
    """There is a frozen Config, and each of its fields is read somewhere: no dead settings."""
    text = read(src)
    config = next((n for n in text.tree.body if isinstance(n, ast.ClassDef) and n.name == "Config"), None)
    if config is None or "frozen=True" not in "".join(map(ast.unparse, config.decorator_list)):
        return [at(config.lineno if config else 1, "Config", "none that is frozen", "dataclass(frozen=True)")]
    known = {node.attr for node in text.nodes if isinstance(node, ast.Attribute)
             and isinstance(node.ctx, ast.Load) and re.search(r"\b(cfg|config|self)$", dotted(node.value))}
    return [at(field.lineno, "setting", f"no use of {field.target.id}", "one") for field in config.body
            if isinstance(field, ast.AnnAssign) and field.target.id not in known]


def check_names(src):
    """No empty names (args, info, data, tmp, x_t, _x, ...), and the shape letters keep their one meaning."""
    text, bad = read(src), []
    for node in text.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if dotted(node.value) in ("self", "cls", "ctx") else None   # p.data is torch's
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            name = node.name if isinstance(node, ast.ExceptHandler) else getattr(node, "asname", None)
        if name and BAD_NAME.fullmatch(name):
            bad.append(at(node.lineno, "name", name, "one that says what it is"))
        elif name in LETTERS and text.section_of(node.lineno) not in LETTERS[name]:
            bad.append(at(node.lineno, "letter", name, f"sections {LETTERS[name]}"))
    return bad


def check_docstrings(src):
    """Public functions and classes of more than 12 lines have a docstring, unless nested in a function."""
    bad, todo = [], [(node, "") for node in read(src).tree.body]
    for node, owner in todo:                       # grows while it is read
        if not isinstance(node, (ast.ClassDef, *FUNCTION)) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            todo += [(inner, f"{node.name}.") for inner in node.body]
        lines = node.end_lineno - node.lineno + 1
        if lines > 12 and not ast.get_docstring(node):
            bad.append(at(node.lineno, f"{owner}{node.name}", f"{lines} lines, no docstring", "one"))
    return bad


RULES = [rule for name, rule in list(globals().items()) if name.startswith("check_")]


# ======== 5. GOOD and FAULTS ================================================================================

GOOD = '''"""A trainer in small: no time on no GPU, to no loss.

  torchrun --nproc_per_node=8 train_gpt.py

contents, with budgets in lines
   1  Config         150   Stage, Config
   2  Host           140   Comm, Log
   3  Numbers         80
   4  Kernels        850   doubling
   6  Model          380   LAYERS
   7  Optimizers     360   descend
   8  Data           200   shards
  10  Graphs         190   compile
  11  Train          220   train, main

letters
  T  tokens          D  width

sources
  [1]  A. Author, On doubling.
"""
import functools
import math
import os
import queue
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

# ======== 1. Config ================ budget 150 ====
# What is trained, and for how long.
# A second line.
# A third line.


@dataclass(frozen=True)
class Stage:
    until: float
    lr: float


STAGES = (
FILLER)


@dataclass(frozen=True)
class Config:
    n_steps: int = 1285
    stages: tuple = STAGES

    @property
    def n_stages(self):
        return len(self.stages)


# ======== 2. Host ================== budget 140 ====
# Ranks, clock and log.
# A second line.
# A third line.


class Comm:
    def __init__(self):
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group()


class Log:
    def line(self, text):
        print(f"{time.perf_counter():8.3f} {text}")


# ======== 3. Numbers =============== budget 80 ====
# Types and their limits.
# A second line.
# A third line.

F8_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
FAST = {}

# ======== 4. Kernels =============== budget 850 ====
# One kernel with its reference.
# A second line.
# A third line.

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

# ---- 4.1 double: twice x in one pass ----


def double_ref(x):
    return 2 * x


DOUBLE_TILES = ((1024, 128), (65536, 512))   # (up to N, block)


@triton.jit
def _double_kernel(x_ptr, y_ptr, N, stride, first, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        n = n % N
    tl.store(y_ptr + n, 2 * tl.load(x_ptr + n))


def double(x):
    """Twice x.

    math     y = 2 \u00b7 x
    shapes   x, y: (T, D), contiguous
    dtypes   any
    tiling   one block of the table per program
    kind     bitwise; double_ref
    source   [1]
    """
    y, block = torch.empty_like(x), DOUBLE_TILES[0][1]
    _double_kernel[(x.numel() // block,)](x, y, x.numel(), 1, 0, BLOCK=block, MASKED=False)
    return y


# ---- 4.2 triple: not here ----

FAST["double"] = (double_ref, double, 2**-7)

# ======== 6. Model ================= budget 380 ====
# The table of layers and what reads it.
# A second line.
# A third line.

LAYERS = (("long", 768), ("short", 384))


class Model:
    def forward(self, x, y=0.5, *, scale):
        for i, (kind, window) in enumerate(LAYERS):
            x = x * scale if kind == "long" and x.shape[0] > window else x
            y = y + i
        return x.sum(dim=3)


# ======== 7. Optimizers ============ budget 360 ====
# One step downhill.
# A second line.
# A third line.
# (1) The decay comes first.

LR_MIN = 1e-3


def descend(comm: Comm, p, g, *, lr):
    p.mul_(1 - lr)                   # by (1), see [1]
    p.sub_(max(lr, LR_MIN) * g)


# ======== 8. Data ================== budget 200 ====
# Shards of tokens.
# A second line.
# A third line.


def shard(path, cfg: Config):
    with open(path, "rb") as file:
        head = file.read(cfg.n_steps)
    return head, np.memmap(path, dtype=np.uint16), queue.Queue()


# ======== 10. Graphs =============== budget 190 ====
# The compiler is called here.
# A second line.
# A third line.
# (1) Addresses never change.


def compiled(model: Model):
    return torch.compile(model.forward)


# ======== 11. Train ================ budget 220 ====
# All of it together.
# A second line.
# A third line.
# (1) The clock runs in here.


def train(cfg: Config):
    """Train once."""
    return compiled(Model()), cfg.n_stages


def main():
    train(Config())


if __name__ == "__main__":
    main()
'''.replace("FILLER", "    Stage(0.25, 1.5),\n" * 80)

PADDING = "    # Why.\n    x = 1\n    x = 2\n"   # three lines of a body, in keeping with the density
MAIN_BODY = "    train(Config())\n"
EMPTY = "# ---- 4.2 triple: not here ----\n"
MODULE = "\nFAST = {}\n"
METHOD = "        return x.sum(dim=3)\n"
STEP = "    p.mul_(1 - lr) "
IMPORT = "import time\n"

FAULTS = [   # (rule, what it must say, {text of GOOD: what is planted in its place})
    (check_banners, "banner", {EMPTY: "# ---- triple ----\n"}),
    (check_banners, "banner", {EMPTY: "# ---------------\n"}),
    (check_banners, "banner", {"budget 190 ====": "budget 190 =="}),
    (check_banners, "number of a section", {"# ---- 4.2": "# ---- 4.1"}),
    (check_banners, "number of a section", {"def main():": "# ======== 11. Train == budget 220 ====\n"
                                                           "# A.\n# B.\n# (1) C.\n\n\ndef main():"}),
    (check_banners, "subsection", {"# ---- 4.2": "# ---- 5.2"}),
    (check_banners, "section title", {"# ======== 8. Data =": "# ======== 8. Shards ="}),
    (check_contents, "budget of section 6", {"budget 380": "budget 390"}),
    (check_contents, "budget of section 8", {"   8  Data           200   shards\n": ""}),
    (check_contents, "title in the contents", {"  10  Graphs    ": "  10  Captures  "}),
    (check_contents, "numbers in the contents", {"   3  Numbers         80\n": "",
                                                 "width\n": "width\n   3  Numbers         80\n"}),
    (check_header, "a claim on line 1", {"A trainer in small: no time on no GPU, to no loss.": ""}),
    (check_header, "a command in the header", {"  torchrun --nproc_per_node=8": "  python"}),
    (check_header, "the letters in the header", {"  T  tokens          D": "  D"}),
    (check_header, "the bibliography in the header", {"  T  tokens          D  width\n": "",
                                                 "On doubling.\n": "On doubling.\n  T  tokens\n"}),
    (check_prose, "opening of section 8, found 2", {"# Shards of tokens.\n": ""}),
    (check_prose, "opening of section 8, found 2", {"# Shards of tokens.\n": "#\n"}),
    (check_prose, "opening of section 8, found 1", {"# Shards of tokens.": "# A.\n# ---- 8.1 a: b ----"}),
    (check_prose, "opening of section 7, found 2", {"# One step downhill.\n# A second line.\n": ""}),
    (check_prose, "opening of section 8, found 13", {"# Shards of tokens.\n": "# Shards of tokens.\n" * 11}),
    (check_invariants, "invariants of the section, found []", {"# (1) Addresses never change.\n": ""}),
    (check_invariants, "invariants of the section, found []", {"# (1) The clock runs in here.\n": ""}),
    (check_invariants, "invariants of the section, found []", {"# (1) The decay comes first.\n": ""}),
    (check_invariants, "invariants of the section, found [2]", {"# (1) Addresses": "# (2) Addresses"}),
    (check_invariants, "by (3)", {"by (1)": "by (3)"}),
    (check_citations, "[4]", {"see [1]": "see [4]"}),
    (check_citations, "[3]", {"On doubling.\n": "On doubling.\n  [3]  B. Author, On tripling.\n"}),
    (check_ceiling, "lines of section 4", {EMPTY: "\n" * 1960 + EMPTY}),
    (check_ceiling, "lines outside section 4", {"# ======== 8.": "\n" * 2300 + "# ======== 8."}),
    (check_ceiling, "lines of the file", {"# ======== 8.": "\n" * 4300 + "# ======== 8."}),
    (check_ceiling, "budget of section 4", {"850 ": "2,001 "}),
    (check_ceiling, "budgets outside section 4", {"380 ": "1,380 "}),
    (check_lengths, "lines of main, found 62", {MAIN_BODY: '    """Run."""\n' + PADDING * 20}),
    (check_lengths, "lines of train, found 123", {"once.\"\"\"\n": "once.\"\"\"\n" + PADDING * 40}),
    (check_lengths, "lines of _double_kernel, found 95", {"    if MASKED:": PADDING * 30 + "    if MASKED:"}),
    (check_positional, "parameters of main, found 7", {"def main():": "def main(b, c, d, e, f, g, h):"}),
    (check_positional, "parameters of line, found 7", {"def line(self, text":
                                                       "def line(self, text, c, d, e, f, g, h"}),
    (check_columns, "111 columns", {"train(Config())": "train(Config(" + 92 * " " + "))"}),
    (check_columns, "blanks at its end", {"train(Config())": "train(Config()) "}),
    (check_columns, "a tab", {"train(Config())": "train(\tConfig())"}),
    (check_density, "density of the file", {"    Stage(0.25, 1.5),\n": ""}),
    (check_density, "density of the file", {"    Stage(0.25, 1.5),\n": "    Stage(0.25, 1.5),\n" * 4}),
    (check_density, "density of section 4", {"DOUBLE_TILES = (": "DOUBLE_TILES = (" + "\n    (1, 2)," * 45,
                                             "# Shards of tokens.\n": "# Shards of tokens.\n" * 9,
                                             "# What is trained,": "# What.\n" * 9 + "# What is trained,"}),

    (check_order, "LATER", {"LR_MIN) * g)\n": "LR_MIN, LATER) * g)\n\n\nLATER = 1\n"}),
    (check_order, "After", {MAIN_BODY: MAIN_BODY + "    After()\n\n\nclass After:\n    pass\n"}),
    (check_order, "after", {MAIN_BODY: MAIN_BODY + "    [after for x in []]\n\n\ndef after():\n    pass\n"}),
    (check_layers, "Log of section 2", {"*, scale):": "*, scale, log: Log):"}),
    (check_layers, "Log of section 2", {"comm: Comm": "comm: Log"}),
    (check_layers, "F8_MAX of section 3", {"read(cfg.n_steps)": "read(cfg.n_steps + F8_MAX)"}),
    (check_layers, "double of section 4", {"train(Config())": "train(double(Config()))"}),
    (check_layers, "cfg", {"comm: Comm, p": "cfg, p"}),
    (check_layers, "world", {"*, scale):": "*, scale, world):"}),

    *((check_door, door, {IMPORT: f"{IMPORT}import {door.strip('.').split('.')[0]}\n",
                          STEP: f"    {'p' * door.startswith('.')}{door}()\n" + STEP})
      for door in DOOR if door != "torch"),
    (check_door, "torch.pi", {"return len(self.stages)": "return len(self.stages) * torch.pi"}),
    (check_door, "torch.distributed", {STEP: "    dist.all_reduce(p)\n" + STEP}),
    (check_door, "time.sleep", {IMPORT: "from time import sleep as nap\n", STEP: "    nap()\n" + STEP}),
    (check_door, "open in section 8, found 'wb'", {'open(path, "rb")': 'open(path, "wb")'}),
    (check_door, "open in section 8, found 'a'", {'open(path, "rb")': 'open(path, mode="a")'}),
    (check_door, ".write_text", {"    return head,": "    path.write_text(head)\n    return head,"}),
    (check_door, "print", {MAIN_BODY: "    print(1)\n" + MAIN_BODY}),
    (check_door, "print", {"            dist.init_process_group()": "            print(1)"}),
    *((check_environment, "'DEBUG'", {'os.environ.get("WORLD_SIZE", 1)': f"({reading})"}) for reading in
      ("os.environ.get('DEBUG')", "os.environ['DEBUG']", "'DEBUG' in os.environ", "'DEBUG' not in os.environ",
       "os.getenv('DEBUG')", "os.environ.pop('DEBUG')")),
    (check_one_rank, "comm.world > 1", {STEP: "    if comm.world > 1:\n        p.zero_()\n" + STEP}),
    (check_statements, "definition, found above section 1", {"# ======== 1.": "X = 1\n# ======== 1."}),
    (check_statements, "Assert", {MODULE: MODULE + "assert F8_MAX\n"}),
    (check_statements, "If", {MODULE: MODULE + "if F8_MAX:\n    X = 1\n"}),
    (check_statements, "Expr", {MODULE: MODULE + "FAST['double']\n"}),
    (check_statements, "Try", {"except ImportError": "except Exception"}),
    (check_statements, "If", {"def main():": 'if __name__ == "__main__":\n    X = 1\n\n\ndef main():'}),
    (check_statements, "Assert", {"    import triton\n": "    assert os\n    import triton\n"}),
    (check_statements, "Assert", {"    triton = tl = None": "    assert os\n    triton = tl = None"}),
    (check_statements, "below the header", {MAIN_BODY: "    from math import pi\n" + MAIN_BODY}),
    (check_statements, "below the header", {MAIN_BODY: "    import math\n" + MAIN_BODY}),
    (check_statements, "last lines", {"\n\nif __name__ == \"__main__\":\n    main()\n": ""}),
    (check_statements, "last lines", {"\":\n    main()\n": "\":\n    main()\n    main()\n"}),
    (check_import_calls, "os.getcwd", {MODULE: MODULE + "HERE = os.getcwd()\n"}),
    (check_import_calls, "torch.zeros", {MODULE: MODULE + "ZEROS = [torch.zeros(n) for n in range(2)]\n"}),
    (check_import_calls, "os.getcwd", {"def main():": "def main(here=os.getcwd()):"}),
    (check_import_calls, "os.getcwd", {"def main():": "def main(*, here=os.getcwd()):"}),
    (check_import_calls, "functools.wraps", {"def main():": "@functools.wraps(Stage)\ndef main():"}),
    (check_import_calls, "os.getcwd", {"class Model:": "class Model:\n    here = os.getcwd()\n"}),
    (check_import_calls, "functools.wraps", {"def main():": "@functools.wraps\ndef main():"}),
    (check_import_calls, "functools.wraps", {"class Model:": "@functools.wraps(Stage)\nclass Model:"}),

    (check_numbers, "found 3", {METHOD: "        return x.sum(axis=3)\n"}),
    (check_numbers, "found 4", {METHOD: "        return x * -4\n"}),
    (check_numbers, "found 1000.0", {METHOD: "        return x * 1e3\n"}),
    (check_numbers, "found 0.25", {"y=0.5": "y=0.25"}),
    (check_numbers, "found 3", {MODULE: MODULE + "lower = 3\n"}),
    (check_numbers, "found 3", {"class Model:": "class Model:\n    width = 3\n"}),
    (check_numbers, "found 3", {"# ======== 7.": "Model.width = 3\n\n# ======== 7."}),
    (check_numbers, "found 3j", {METHOD: "        return x * 3j\n"}),
    *((check_markers, mark, {"see [1]": f"see [1]. {mark}: rest"}) for mark in MARKS),
    *((check_history, words, {"see [1]": f"see [1], {words} 2"}) for words in
      ("previously", "no longer", "used to be", "was changed", "Formerly")),
    (check_history, "no longer", {"# All of it together.": "# All of it is no\n# longer together."}),
    (check_history, "previously", {"Train once.": "Train once, previously\n    twice.\n    "}),
    (check_dead_code, "# x = double(y)", {MAIN_BODY: MAIN_BODY + "    # x = double(y)\n"}),
    (check_dead_code, "# x += 1", {MAIN_BODY: MAIN_BODY + "    # Once more.\n    # x += 1\n"}),
    (check_dead_code, "# width: int = 3", {MAIN_BODY: MAIN_BODY + "    # width: int = 3\n"}),
    (check_dead_code, "# train(cfg)", {MAIN_BODY: MAIN_BODY + "    # train(cfg)\n"}),
    (check_dead_code, "#     y = 1", {MAIN_BODY: MAIN_BODY + "    #     y = 1\n"}),
    (check_dead_code, "# z = 1", {MAIN_BODY: MAIN_BODY + "    # y = 1\n    # z = 1\n"}),
    (check_dead_code, "# y = 1", {MAIN_BODY: "    train(Config())  # Why\n    # y = 1\n"}),
    (check_dead_code, "# y = 1", {"# Shards of tokens.\n": "# y = 1\n"}),
    (check_dead_code, "# import math", {MAIN_BODY: MAIN_BODY + "    # import math\n"}),
    (check_dead_code, "# return x", {"by (1), see [1]": "return x"}),
    (check_dead_code, "# for x in range(2):", {MAIN_BODY: MAIN_BODY + "    # for x in range(2):\n"}),
    *((check_dead_code, words, {MAIN_BODY: MAIN_BODY + f"    # {words}\n"}) for words in
      ("if x > 1:", "while x > 1:", "with a.b():", "def f(x):", "@a.b(1)", "raise E(x)", "from a import b")),
    (check_dead_code, "loose string", {MAIN_BODY: MAIN_BODY + "    '''x = 1'''\n"}),
    (check_characters, r"\xe9", {"see [1]": "see [1], \u00e9"}),
    (check_characters, r"\xe9", {"Train once.": "Train \u00e9."}),
    (check_characters, r"\u221a", {"see [1]": "see [1], \u221ax"}),
    (check_characters, r"\u2026", {"{time.perf": "\u2026 {time.perf"}),
    (check_kernels, "docstring of double", {"    tiling   one block of the table per program\n": ""}),
    (check_kernels, "docstring of double", {"    kind  ": "    source", "    source   [": "    kind     ["}),
    (check_kernels, "docstring of double", {'    """Twice x.\n\n    math  ': '    """math  '}),
    (check_kernels, "what it computes", {'"""Twice x.\n\n    math ': '"""\n    math '}),
    (check_kernels, "bitwise | reorder | approx", {"bitwise; double_ref": "exact; double_ref"}),
    (check_kernels, "the reference", {"bitwise; double_ref": "bitwise; triple_ref"}),
    (check_kernels, "source: [n]", {"source   [1]": "source   folklore"}),
    (check_kernels, "a name like _x_kernel", {"_double_kernel": "_double"}),
    (check_kernels, "flags of _double_kernel", {"y_ptr, N, stride, first,": "y_ptr, ODD: tl.constexpr,",
                                                "    if MASKED:": "    if MASKED and ODD:"}),
    (check_kernels, "flags of _double_kernel", {"y_ptr, N, stride, first,": "y_ptr, ODD: tl.constexpr,",
                                                "n = n % N": "n = n if ODD else 0"}),
    (check_kernels, "found triple", {"def descend(": "@triton.jit\ndef triple(x):\n    x\n\n\ndef descend("}),
    (check_topology, "i == 1", {'if kind == "long" and': "if i == 1 and"}),
    (check_topology, "2 != i", {'if kind == "long" and': "if 2 != i and"}),
    (check_topology, "i in (1, 2)", {'if kind == "long" and': "if i in (1, 2) and"}),
    (check_topology, "i not in [1, 2]", {'if kind == "long" and': "if i not in [1, 2] and"}),
    (check_topology, "LAYERS[0]", {METHOD: "        return x * LAYERS[0]\n"}),
    (check_topology, "self.blocks[-1]", {METHOD: "        return self.blocks[-1](x)\n"}),
    (check_settings, "no use of seed", {"    stages: tuple": "    seed: int = 1\n    stages: tuple"}),
    (check_settings, "no use of until", {"    stages: tuple": "    until: int = 1\n    stages: tuple",
                                         METHOD: METHOD.replace(")", ") * kind.until")}),
    (check_settings, "no use of seed", {"    stages: tuple": "    seed: int = 1\n    stages: tuple",
                                        METHOD: "        self.seed = 1\n" + METHOD}),
    (check_settings, "none that is frozen", {"(frozen=True)\nclass Config": "\nclass Config"}),
    (check_settings, "none that is frozen", {"class Config:": "class Settings:", "Config)": "Settings)",
                                             "Config()": "Settings()"}),
    *((check_names, f"found {name},", {MAIN_BODY: MAIN_BODY + f"    {name} = 1\n"}) for name in
      ("args", "info", "data", "tmp", "idx2", "cu_seqlens", "lr_t", "_x", "B", "M")),
    (check_names, "found data,", {METHOD: "        self.data = x\n" + METHOD}),
    (check_names, "found args,", {"def main():": "def main(*args):"}),
    (check_names, "found tmp,", {MAIN_BODY: "    for tmp in range(2):\n    " + MAIN_BODY}),
    (check_names, "found _t,", {IMPORT: IMPORT + "import math as _t\n"}),
    (check_docstrings, "main, found 14 lines", {MAIN_BODY: MAIN_BODY + PADDING * 4}),
    (check_docstrings, "Log, found 13 lines", {"class Log:": "class Log:" + "\n    # Why.\n    on = 1" * 5}),
    (check_docstrings, "Model.forward, found 15 lines",
     {"class Model:": 'class Model:\n    """A."""\n', METHOD: "        # Y.\n        x = 1\n" * 5 + METHOD}),
]

ACCEPTED = {   # sensible code of which a coarser rule would complain
    "a formula in a sentence": {MAIN_BODY: MAIN_BODY + "    # The sum is\n    # x = y + z\n    # for all.\n"},
    "prose that parses": {MAIN_BODY: MAIN_BODY + "    # if needed:\n    # with care:\n    # x\n"},
    "a formula set in": {MAIN_BODY: MAIN_BODY + "    # The sum:\n    #   x = y + z\n"},
    "a formula in the margin": {"by (1), see [1]": "p = p * (1 - lr)"},
    "a trap": {MAIN_BODY: MAIN_BODY + "    # Trap: x = y\n    # Trap: keep(this) first\n    # width: wide\n"},
    "a type in the margin": {"by (1), see [1]": "lr: float = 1"},
    "no longer than": {"see [1]": "no longer than 2"},
    "a local name that a later section defines": {"*, scale):": "*, scale, train):\n        train()"},
    "a local name that is a module's": {"*, scale):": "*, scale, time):\n        time.tick()"},
    "a kernel with many parameters": {"stride, first,": "stride, first, a, b, c, d, e,"},
    "a group heading inside a class": {"    stages: tuple": "    # ---- stages\n    stages: tuple"},
    "invariants beyond twelve lines": {"# (1) The decay comes first.\n":
                                       "# (1) The decay first.\n" + "#     So.\n" * 9 + "# (2) And.\n"},
    "a storage moved": {STEP: "    p.data = g\n" + STEP},
    "an environment name in a constant": {'os.environ.get("WORLD_SIZE", 1)': "os.environ[NAME]",
                                          "class Comm:": 'NAME = "RANK"\n\n\nclass Comm:'},
    "an environment variable set": {"self.world = int(": "os.environ['A'] = 'b'\n        self.world = int("},
    "a file opened to write in section 2": {"        print(f": "        open('x', 'x')\n        print(f"},
    "a file opened in section 8": {'open(path, "rb")': "open(path, buffering=0)"},
    "recursion": {"def main():\n": "def main():\n    main()\n"},
    "a long train and a long kernel": {'once."""\n': 'once."""\n' + PADDING * 38,
                                       "    if MASKED": PADDING * 28 + "    if MASKED"},
    "six parameters and a context": {"def line(self, text": "def line(ctx, text, b, c, d, e, f"},
    "a long function in a function": {MAIN_BODY: '    """Run."""\n\n    def inner():\n'
                                                 + textwrap.indent(PADDING, "    ") * 4 + MAIN_BODY},
    "registries and types": {MODULE: MODULE + "FAST |= dict(a=3)\nLIMIT: int = 3\nNAMES = 'a b'.split()\n",
                             "class Model:": "class Model:\n    WIDTH = 3\n", "ImportE": "ModuleNotFoundE"},
    "a call inside a lambda": {MODULE: MODULE + "LATER = lambda: os.getcwd()\n"},
    "a world that is not compared with 1": {STEP: "    p = p if p.dim() > 1 else p / comm.world\n" + STEP},
    "shapes and order": {METHOD: "        if i > 1 or x.shape[0] == 1 or len(x.shape) == 2:\n"
                                 "            x = x[0, -1]\n" + METHOD},
    "a plain number outside of section 6": {STEP: "    if lr == 0:\n        lr = g[0]\n" + STEP},
    "a name that is torch's": {METHOD: "        x.data = self.data\n        x(data=x)\n" + METHOD},
    "a GEMM's letters": {"y_ptr, N, stride": "y_ptr, N, M, K"},
    "conditions that are no flags": {"    if MASKED:": "    if MASKED and stride and first:"},
    "something launched outside of section 4": {STEP: "    p[g](lr)\n" + STEP},
    "Greek in a docstring": {"Train once.": "\u03b8 \u2264 \u221a\u03c3\u00b2 \u2192 \u00d7 \u2212 \u00b7"},
}


def planted(edits):
    """GOOD with some of its text replaced."""
    src = GOOD
    for old, new in edits.items():
        assert old in src, f"GOOD has no {old!r}"
        src = src.replace(old, new)
    return src


def complaints(src):
    """{rule: its findings} for those rules that have any."""
    return {rule.__name__: found for rule in RULES if (found := rule(src))}


def test_good_source_is_accepted():
    """Without a fault no rule complains, so each finding below is due to what was planted."""
    assert complaints(GOOD) == {} and over_budget(GOOD) == []


@pytest.mark.parametrize("edits", ACCEPTED.values(), ids=ACCEPTED)
def test_sensible_code_is_accepted(edits):
    """A rule must not drive out good code."""
    assert complaints(planted(edits)) == {}


@pytest.mark.parametrize("rule, says, edits", FAULTS,
                         ids=[f"{rule.__name__}-{says}" for rule, says, _ in FAULTS])
def test_planted_fault_is_found_by_its_rule_alone(rule, says, edits):
    """A rule finds what breaks it, and only it does: two rules never mean the same."""
    found = complaints(planted(edits))
    assert list(found) == [rule.__name__], found
    assert any(re.match(r"line \d+: ", line) and says in line for line in found[rule.__name__]), found


def test_every_rule_can_fail():
    """There is a planted fault for each rule."""
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_findings_name_their_line():
    """The number of a finding is that of the line where the found text stands."""
    for rule, _, edits in FAULTS:
        if rule in (check_environment, check_history, check_markers, check_names, check_topology):
            src = planted({"import functools\n": "# One.\n\n# Two.\nimport functools\n", **edits})
            n, found = re.match(r"line (\d+): .*, found (.*), wanted", rule(src)[0]).groups()
            assert found.strip("'").split()[0] in src.splitlines()[int(n) - 1]


def test_scopes_are_told_apart():
    """Names in CAPITALS, and they alone, are read from module level."""
    src = textwrap.dedent("""
        top = ONE
        OBJECT.field = TWO

        @DECORATOR
        def f(a, *b, c=DEFAULT, **d) -> RESULT:
            global WRITTEN
            WRITTEN = 1
            import e.x, g as h
            from i import j
            class k(BASE):
                width = FIELD
                twice = width
                SIZE = width
                def area(self): return self.x, SIZE, VALUE, k
            def l(m, early=EARLY):
                EARLY = INNER = m
                return l(a, INNER), OUTER
            with a as n, b as (o, *p): del o
            try: q = (r := 1)
            except ERROR as s: raise s
            match a:
                case {"t": t, **u}: return t, u
                case [v, *w]: return v, w
            for x in [y for y in b for z in y if z]: x(lambda lone, late=LATE: lone + late + c.LOCAL)
            return [WRITTEN, INNER, EACH, d, h, j, k, n, p, q, r, {EACH: it for EACH, it in b}, e.x]
    """)
    names = {dotted(node).split(".")[0] for node in global_reads(ast.parse(src))}
    assert names == set(re.findall(r"(?<!\.)\b[A-Z]{2,}\b", src))


def test_budgets_are_noted():
    """A section over its budget, and a kernel over 130 lines, is named."""
    assert "section 6 Model" in over_budget(planted({"380 ": "12 "}))[0]
    assert "part of section 4" in over_budget(planted({EMPTY: "\n" * 131 + EMPTY}))[0]


# ======== 6. The real file ==================================================================================

# Runs in a bare process. Imports each file of the command line under two names and notes what that did.
PROBE = r"""
import importlib.util, io, json, os, random, signal, sys, threading
import numpy, torch
try:
    import triton
except ImportError:
    pass

TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS = ("subprocess.", "socket.", "shutil.", "tempfile.", "os.system", "os.exec", "os.fork", "os.kill",
          "os.posix_spawn", "os.putenv", "os.unsetenv", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
seen, armed = set(), False

def hook(event, details):
    if armed and event == "open" and isinstance(details[2], int) and details[2] & WRITES:
        seen.add(f"opens {details[0]} for writing")
    elif armed and event.startswith(EVENTS):
        seen.add(f"does {event}")

def watched(self, key, get=type(os.environ).__getitem__):
    if armed and key in TORCHRUN:
        seen.add(f"reads {key}")
    return get(self, key)

def state():
    return {
        "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradient mode": torch.is_grad_enabled(),
        "torch RNG": torch.get_rng_state().numpy().tobytes(),
        "numpy RNG": str(numpy.random.get_state()[1:]),
        "Python RNG": random.getstate(),
        "signal handlers": [signal.getsignal(s) for s in sorted(signal.valid_signals())],
        "excepthook": (sys.excepthook, threading.excepthook),
        "CUDA": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "search path": list(sys.path),
    }

type(os.environ).__getitem__ = watched
sys.addaudithook(hook)
report, stdout = {}, sys.stdout
for number, path in enumerate(sys.argv[1:]):
    seen = set()
    for name in (f"first_{number}", f"second_{number}"):
        before, sys.stdout = state(), io.StringIO()
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        armed = True
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            seen.add(f"raises {error!r}")
        armed = False
        if sys.stdout.getvalue():
            seen.add("prints")
        seen |= {f"changes {key}" for key, value in state().items() if value != before[key]}
    report[path] = sorted(seen)
print(json.dumps(report), file=stdout)
"""

EFFECTS = {   # a module that does this at import: what the probe must say
    "open('x', 'w')": "opens x for writing",
    "import os; os.open('y', os.O_CREAT)": "opens y for writing",
    "import os; os.mkdir('z')": "does os.mkdir",
    "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])": "does subprocess.Popen",
    "import socket; socket.socket()": "does socket.__new__",
    "import os; os.environ['RANK']": "raises KeyError('RANK')",
    "import os; os.environ.get('WORLD_SIZE')": "reads WORLD_SIZE",
    "import os; os.environ['NEW'] = '1'": "changes environment",
    "print('hello')": "prints",
    "from threading import *; Thread(target=Event().wait, daemon=True).start()": "changes threads",
    "import torch; torch.set_num_threads(torch.get_num_threads() + 1)": "changes torch threads",
    "import torch; torch.set_default_dtype(torch.float64)": "changes default dtype",
    "import torch; torch.set_default_device('meta')": "changes default device",
    "import torch; torch.set_float32_matmul_precision('medium')": "changes matmul precision",
    "import torch; torch.set_grad_enabled(False)": "changes gradient mode",
    "import torch; torch.rand(1, device='cpu')": "changes torch RNG",
    "import numpy; numpy.random.rand()": "changes numpy RNG",
    "import random; random.random()": "changes Python RNG",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)": "changes signal handlers",
    "import sys; sys.excepthook = print": "changes excepthook",
    "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)":
        "changes process group",
    "import torch; torch.cuda._initialized = True": "changes CUDA",
    "import os; os.chdir('/')": "changes folder",
    "import sys; sys.path.append('x')": "changes search path",
}


def effects_of_import(paths, folder):
    """{path: what two imports of it did} in a fresh process with a bare environment and an empty folder."""
    run = subprocess.run([sys.executable, "-B", "-c", PROBE, *map(str, paths)], cwd=folder, text=True,
                         env={"PATH": os.environ.get("PATH", "")}, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def planted_effects(tmp_path_factory):
    """One process for all planted modules; each is compared with the state just before it."""
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("folder")
    paths = {source: sources / f"planted_{i}.py" for i, source in enumerate(["X = 1", *EFFECTS])}
    for source, path in paths.items():
        path.write_text(source)
    report = effects_of_import(paths.values(), folder)
    return {source: report[str(path)] for source, path in paths.items()}


@pytest.mark.parametrize("source", EFFECTS)
def test_planted_effect_of_import_is_seen(source, planted_effects):
    """The probe names each effect, and none of a module that has none."""
    assert EFFECTS[source] in planted_effects[source]
    assert planted_effects["X = 1"] == []


def test_import_has_no_effect(tmp_path):
    """Importing train_gpt.py twice, under two names, without torchrun or GPU, leaves no trace."""
    assert effects_of_import([SCRIPT], tmp_path)[str(SCRIPT)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rule", RULES, ids=[rule.__name__ for rule in RULES])
def test_train_gpt(rule):
    """The real file keeps every rule."""
    found = rule(SCRIPT.read_text(encoding="utf-8"))
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


def test_train_gpt_keeps_its_budgets():
    """Over budget is a warning: never a reason to compress code."""
    for note in over_budget(SCRIPT.read_text(encoding="utf-8")):
        warnings.warn(note, stacklevel=1)


ABSOLUTE = re.compile(r"(?<![\w.~$}>/-])/(?:work|root|tmp)(?=/)")
CLIMBING = re.compile(r"(?<![\w./])(?:\.\./)+[\w.-]+")


def stray_paths(name, content):
    """Absolute paths of one machine in a file of the repository, and relative ones that lead out of it."""
    found = [at(n, name, match[0] + "/...", "a path in the repository")
             for n, line in enumerate(content.splitlines(), 1) for match in ABSOLUTE.finditer(line)]
    for n, line in enumerate(content.splitlines(), 1):
        for match in CLIMBING.finditer(line) if not name.startswith("tests/") else ():
            target = (ROOT / name).parent.joinpath(match[0]).resolve()
            if not (target.is_relative_to(ROOT) and target.exists()):
                found.append(at(n, name, match[0], "a path in the repository"))
    return found


HOME, TMP = "/" + "root", "/" + "tmp"   # in pieces, so that this file has none


@pytest.mark.parametrize("name, content, n_found", [
    ("README.md", f"see {TMP}/x and {HOME}/x", 2), ("tests/a.py", f"'{HOME}/x'", 1),
    ("README.md", f"a{TMP}/x, https://x.org{HOME}/x, ${{X}}{TMP}/x", 0),
    ("README.md", "see ../elsewhere/x", 1), ("data/a.md", "see ../elsewhere/x", 1),
    ("tests/a.py", "../elsewhere", 0), ("records/a.md", "see ../tests/test_text.py", 0)])
def test_planted_path_is_found(name, content, n_found):
    """Paths of one machine are found, paths in the repository and addresses are not."""
    assert len(stray_paths(name, content)) == n_found


def test_repository_has_no_stray_paths():
    """What is committed mentions no path of the machine on which it was written."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout")
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if not name.endswith(".bin") and b"\0" not in content:
            found += stray_paths(name, content.decode("utf-8", "replace"))
    assert not found, "\n".join(found)
