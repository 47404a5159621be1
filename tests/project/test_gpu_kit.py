"""The GPU kit does not rot: it is made without its wheels, its steps run and fail as they should, its capture runs on a stand-in."""

import json
import sys

import pytest
from roots import ROOT, environment, read_json, run_program

from benchmarks.gpu import make_kit as making, run_kit as kit


def script(text):
    return ("{python}", "-c", text)


@pytest.mark.slow
def test_each_step_has_its_end_and_the_report_says_what_was_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "FACTS", "import json; print(json.dumps({'cuda': False, 'packages': {'torch': '2'}}))")
    figures = script("open(r'{work}/keeps.json', 'w').write('{{\"text\": \"42 of them\"}}')")
    steps = (
        kit.Step("built", "continues behind", script("print('built it')"), 60, stand_in=None, behind=True),
        kit.Step("broken", "fails", script("raise ValueError('boom')"), 60),
        kit.Step("stuck", "never ends", script("import time; time.sleep(600)"), 1),
        kit.Step("keeps", "figures", figures, 60, after="built"),
    )
    monkeypatch.setattr(kit, "STEPS", steps)
    out = tmp_path / "out"
    assert kit.main(["--kit", str(ROOT), "--out", str(out), "--here"]) == 1
    found = {step["name"]: step for step in read_json(out / "report.json")["steps"]}
    assert [found[step.name]["status"] for step in steps] == ["no CUDA", "failed", "took too long", "passed"]
    assert found["broken"]["why"] == "ValueError: boom" and found["keeps"]["figures"] == {"text": "42 of them"}
    first, whole = (out / "report.md").read_text().partition("\n")[::2]
    assert "Did not pass: broken (failed), stuck (took too long)" in first and "42 of them" in whole
    assert "built (no CUDA" in first and {path.name for path in out.iterdir()} == {"report.md", "report.json", "logs.txt"}


def test_a_report_comes_also_where_no_environment_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    assert kit.main(["--kit", str(ROOT), "--out", str(tmp_path / "out")]) == 1
    answer = read_json(tmp_path / "out" / "report.json")
    assert [(step["name"], step["status"]) for step in answer["steps"]] == [("install", "failed")]
    assert "FileNotFoundError" in (tmp_path / "out" / "report.md").read_text()
    assert "Did not pass: install" in answer["not_run"]


def test_the_kit_has_the_tree_and_versions_of_all_it_brings(tmp_path):
    nbytes = making.make(tmp_path / "kit", wheels=False)
    assert 3_000_000 < nbytes < 20_000_000
    assert (tmp_path / "kit" / "tree" / "actordbg" / "capture" / "hook.py").is_file()
    tests = kit.gpu_tests(tmp_path / "kit" / "tree")
    assert "tests/campaign/test_matrix_distributed.py" in tests and len(tests) == 4
    names = making.names_of(ROOT / "benchmarks" / "gpu" / "packages.txt")
    wanted = making.pinned(names, ROOT / "constraints.txt")
    assert len(wanted) == len(names) > 30 and "deepspeed==0.19.6" in wanted
    assert not {"torch", "triton", "transformers", "numpy", "tokenizers"} & set(names), "those are the machine's"


STAND_IN = """
import json, sys
from actordbg.capture import watch
from benchmarks import real_step
from benchmarks.gpu import capture_on_gpu, one_process
real_step.SETTLE_SECONDS, watch.POLL_SECONDS, capture_on_gpu.CHECKED = 0.1, 0.02, 4
capture_on_gpu.WAYS = ("process", "torch.save", "clone + thread")
answer = capture_on_gpu.run(True, 1, 2)
one_process.main()
print(json.dumps(answer))
"""


@pytest.mark.forked
def test_the_capture_of_openrlhfs_actor_runs_on_a_stand_in_for_a_gpu():
    around = environment(FORKED_PROGRAM="-c")
    done = run_program([sys.executable, "-c", STAND_IN], env=around, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "are right in a group of one" in done.stdout
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (
        answer["check"]["right"] == answer["check"]["captured"] > 4
        and answer["copies_of_the_stand_in"] >= answer["check"]["captured"]
    )
    assert [row["way"] for row in answer["rows"]] == ["off", "process", "torch.save", "clone + thread"]
    assert all(row["step_ms"] > 0 for row in answer["rows"])
