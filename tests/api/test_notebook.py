"""`examples/notebook.ipynb` runs, and ends at the cause. Its cells are run one after the other by `exec`, without a kernel."""

import ast

import pytest
import torch
from roots import ROOT, read_json

CELLS = read_json(ROOT / "examples" / "notebook.ipynb")["cells"]


def run(source, names):
    """Run a cell and return the value of its last expression, which a notebook shows."""
    body = ast.parse(source).body
    shown = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(shown.value), "cell", "eval"), names) if isinstance(shown, ast.Expr) else None


@pytest.mark.forked
def test_ten_cells_lead_from_a_run_to_its_cause():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        names = {}
        code = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
        shown = [run(source, names) for source in code]
    finally:
        torch.set_num_threads(threads)
    assert len(code) == 10 and len(shown[4]) == 3
    assert names["recorded"].verdict == "NOT CHECKED", "nothing says whose weights the run had"
    assert "model.layers.1.self_attn.scaling is 0.3; transformers' model from this checkpoint has 0.25" in names["cause"].sentence
    assert names["cause"].sentence.partition(":")[0] in names["cause"]._repr_html_()
    assert [cell["outputs"] for cell in CELLS if cell["cell_type"] == "code"] == [[]] * 10
