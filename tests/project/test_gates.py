"""What a store, a model or a server says meets one gate: each test walks the source, so that a new way around one fails here."""

import ast
from functools import cache

import pytest
from casefiles import cases_of
from roots import ROOT

PRODUCT = ROOT / "actordbg"
STARTS = {"Popen", "run", "call", "check_call", "check_output"}
LOADS = {"from_pretrained", "from_config"}


parsed = cache(ast.parse)
"""A source's tree: several gates look at each."""


@cache
def calls(tree):
    """Each call, with its function as text."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def starts_with_our_input(source):
    """Yield the lines that start a process without saying what its input is: a prompt there is answered by `yes |`."""
    tree = parsed(source)
    for function, call in calls(tree):
        module, _, name = function.rpartition(".")
        spawns = function.startswith(("os.spawn", "os.exec", "os.posix_spawn", "os.system", "os.popen", "pty."))
        if spawns or (
            module == "subprocess" and name in STARTS and not {"stdin", "input"} & {word.arg for word in call.keywords}
        ):
            yield call.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "subprocess":
            yield node.lineno


def loads_that_may_ask(source):
    """Yield the lines that load a model, a configuration or a tokenizer and leave it to transformers whether its code runs."""
    tree, decided = parsed(source), set[int]()
    for _, call in calls(tree):
        said = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
        if said and not (isinstance(said[0], ast.Constant) and said[0].value is not False):
            decided.add(id(call.func))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOADS and id(node) not in decided:
            yield node.lineno


PARSES = {
    "json.loads",
    "json.load",
    "json.JSONDecoder",
    "msgspec.json.decode",
    "msgspec.json.Decoder",
    "yaml.load",
    "pickle.load",
}


def parses_json(source):
    """Yield the lines that parse JSON by themselves: `[],[],[]` becomes 20 times its bytes of objects, in whatever file it is."""
    tree = parsed(source)
    for function, call in calls(tree):
        if function in PARSES and not any("read_regular" in (text := ast.unparse(word)) and "4096" in text for word in call.args):
            yield call.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "msgspec.json"):
            yield node.lineno


REMOVES = {"unlink", "rmtree"}


def removes(source):
    """Yield the lines that remove a file without `store_files.remove`: another user's link may lead them out of the store."""
    for function, call in calls(parsed(source)):
        name = function.rpartition(".")[2]
        if function == "os.remove" or name in REMOVES:
            yield call.lineno


ALLOWED = cases_of("gates")
GATES = {
    "a child's input is not ours": starts_with_our_input,
    "a model's code": loads_that_may_ask,
    "no removal behind a link": removes,
    "one strict JSON": parses_json,
}


@pytest.mark.parametrize("gate", GATES)
def test_there_is_no_way_around_a_gate(gate):
    allowed = {line.partition("  ")[0] for line in ALLOWED[gate].given}
    found = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        if lines := list(GATES[gate](path.read_text())):
            found[path.relative_to(PRODUCT).as_posix()] = lines
    assert found.keys() == allowed, {name: lines for name, lines in found.items() if name not in allowed}


def clauses_read(source):
    """Yield the lines that look into what a finding says: a method of its text, a part of it, a comparison with a text."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            read = [node.func.value] if node.func.attr not in _KEEPS else []
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
                read += node.args
        elif isinstance(node, ast.Subscript):
            read = [node.value]
        elif isinstance(node, ast.Compare) and any(isinstance(each, ast.In | ast.NotIn) for each in node.ops):
            read = [node.left, *node.comparators]
        else:
            continue
        yield from (node.lineno for each in read if isinstance(each, ast.Attribute) and each.attr in _CLAUSES)


_CLAUSES = ("said", "reason", "why")
"""Attributes that hold a clause."""


_KEEPS = ("removesuffix", "format", "strip", "splitlines", "replace")
"""Methods that put a clause into a sentence, or leave it out of one where the line above has it."""


SCANS = {**GATES, "clauses": clauses_read}


@pytest.mark.parametrize("case", [case for case in cases_of("scans").values() if case.given[0] in SCANS], ids=str)
def test_a_scan_sees_what_goes_around_it(case):
    lines = sorted(SCANS[case.given[0]]("\n".join(case.given[1:])))
    assert " ".join(map(str, lines)) == " ".join(case.expected)


def test_code_reads_rules_and_keys_of_a_finding_and_never_its_clause():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "actordbg").rglob("*.py"))
        if (lines := list(clauses_read(path.read_text())))
    }
    assert found == {}
