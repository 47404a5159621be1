"""Makes any one call inside actordbg fail, in any thread: a finder that loads the package with every call site instrumented.

`instrument(package)` has to come before the package is imported. From then on each of its modules is compiled from a syntax tree
in which a call `f(x)` inside of a function reads `fault_point(N, f, x)`, with a number N of its own; an `import` inside of a
function is a site as well. So a site is one place in the source, not a line or a name; Python functions and C functions are
alike; an error comes in place of the call, after its arguments were evaluated, as a real one would; threads need nothing special;
and a fault can stay *from then on*. (A profile function that raises does the first only: the interpreter removes it then, and
each thread has its own.)

    instrument("actordbg")
    import actordbg...
    with armed(Fault(site, [MemoryError])): ...
    seen()                           # how often each site was passed since `forget`

What is not a site, because these errors cannot come from there:

- `super`, `cast`: the compiler's and the type checker's;
- `len`, `isinstance`, `hasattr`, `getattr`, `callable`, `type`, `bool` of one argument: they ask what is there already;
- in the wrapped `forward`: `is_compiling()`, a flag, and `original(...)`, which is the training's own and may raise what it likes;
- `close_somehow`, the very last resort, where everything else has failed: it consists of a few assignments;
- `from_outside`, which judges an error at an edge: whatever fails in it, it answers;
- locks (`with lock:`), and whatever else is not a call: they do not allocate, and touch no file.
"""

import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CANNOT_FAIL = {
    "super", "cast", "len", "isinstance", "hasattr", "getattr", "callable", "type", "bool", "is_compiling", "original",
    "item.close_somehow", "what.close_somehow", "from_outside",
}  # fmt: skip
_POINT, _IMPORT = "__fault_point__", "__fault_import__"


@dataclass(frozen=True)
class Site:
    """One call in the source. `number` is the same in every process that loads the same modules in the same order."""

    number: int
    module: str
    function: str
    line: int
    callee: str

    def __str__(self):
        return f"{self.module}:{self.line} {self.function}: {self.callee}"


@dataclass
class Fault:
    """Errors at `site`, one after another: the `nth` time that it is passed and, with more errors than one, the next times; if
    `lasting`, every time from then on, the errors in turn. `raised`: how many there were.
    """

    site: int
    errors: Sequence[Callable[[], Exception]]
    nth: int = 1
    lasting: bool = False
    passed: int = field(default=0, init=False)
    raised: int = field(default=0, init=False)

    def __call__(self):
        self.passed += 1
        if self.passed >= self.nth and (self.lasting or self.raised < len(self.errors)):
            self.raised += 1
            raise self.errors[(self.raised - 1) % len(self.errors)]()


sites = {}
_armed = {}
_seen = []


def instrument(package):
    """Load `package` with fault points from now on."""
    sys.meta_path.insert(0, _Finder(package))


@contextlib.contextmanager
def armed(*faults):
    """These faults happen meanwhile."""
    _armed.update({fault.site: fault for fault in faults})
    try:
        yield faults
    finally:
        _armed.clear()


def seen():
    """How often each site was passed since `forget`."""
    return {number: count for number, count in enumerate(_seen) if count}


def forget():
    """Count from zero again."""
    _seen[:] = [0] * len(sites)


def _point(number, function, /, *args, **kwargs):
    _seen[number] += 1
    if number in _armed:
        _armed[number]()
    return function(*args, **kwargs)


def _import(number):
    _point(number, int)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package's modules as Python does, and gives them the loader below."""

    def __init__(self, package):
        self._package = package

    def find_spec(self, name, path, target=None):
        if name != self._package and not name.startswith(f"{self._package}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles from the source each time: instrumented code never gets into __pycache__."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        tree = _Instrument(fullname).visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module):
        setattr(module, _POINT, _point)
        setattr(module, _IMPORT, _import)
        super().exec_module(module)


class _Instrument(ast.NodeTransformer):
    """Calls inside of functions; decorators, defaults and annotations are evaluated before anybody records."""

    def __init__(self, module):
        self._module = module
        self._names = []
        self._functions = 0

    def visit_FunctionDef(self, node):
        self._names.append(node.name)
        self._functions += 1
        body = [self.visit(one) for one in node.body]
        node.body = [one for found in body for one in (found if isinstance(found, list) else [found])]
        self._functions -= 1
        self._names.pop()
        return node

    def visit_ClassDef(self, node):
        self._names.append(node.name)
        node.body = [self.visit(one) for one in node.body]
        self._names.pop()
        return node

    def visit_Import(self, node):
        if not self._functions:
            return node
        number = self._site(node.lineno, "import " + ", ".join(alias.name for alias in node.names))
        call = ast.Call(ast.Name(_IMPORT, ast.Load()), [ast.Constant(number)], [])
        return [ast.copy_location(ast.Expr(call), node), node]

    visit_ImportFrom = visit_Import

    def visit_Call(self, node):
        self.generic_visit(node)
        callee = ast.unparse(_original(node.func))
        if not self._functions or callee in CANNOT_FAIL:
            return node
        number = self._site(node.lineno, callee)
        point = ast.Name(_POINT, ast.Load())
        return ast.copy_location(ast.Call(point, [ast.Constant(number), node.func, *node.args], node.keywords), node)

    def _site(self, line, callee):
        number = len(sites)
        sites[number] = Site(number, self._module, ".".join(self._names), line, callee)
        _seen.append(0)
        return number


def _original(node):
    """For a chained call (`f(x).g()`), the text without the instrumentation of its inner calls."""

    class Strip(ast.NodeTransformer):
        def visit_Call(self, call):
            self.generic_visit(call)
            if isinstance(call.func, ast.Name) and call.func.id == _POINT:
                return ast.Call(call.args[1], [], [])
            return call

    return Strip().visit(copy.deepcopy(node))
