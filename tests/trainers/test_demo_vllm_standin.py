"""The stand-in for vLLM: what OpenRLHF imports is there, sampling follows the parameters, weights are synchronized."""

import ast
import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest
from roots import ROOT, run_program

from actordbg.demo.demo_training import build_assets
from actordbg.trainers.openrlhf import vllm_standin
from actordbg.trainers.openrlhf.vllm_standin import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    SamplingParams,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model, _ = build_assets(tmp_path_factory.mktemp("vllm"), 1)
    options = {"model": str(model), "seed": 1, "dtype": "float32", "enforce_eager": True}
    return AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**options))


def _sample(engine, ids, params):
    async def last():
        return [output async for output in engine.generate({"prompt_token_ids": ids}, params, request_id="1")][-1].outputs[0]

    return asyncio.run(last())


def test_a_sample_has_new_tokens_only_and_says_why_it_stopped(engine):
    completion = _sample(engine, [1, 3, 40, 41], SamplingParams(max_tokens=6, min_tokens=6))
    assert len(completion.token_ids) == 6 and completion.finish_reason == "length"
    assert all(0 <= token < 512 for token in completion.token_ids)


def test_everything_that_openrlhf_imports_from_vllm_is_there():
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        pytest.skip("openrlhf is not installed here")
    wanted = {
        (node.module, name.name)
        for path in Path(spec.origin).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "vllm"
        for name in node.names
    }
    assert len(wanted) >= 4
    imports = "\n".join(f"from {module} import {name}" for module, name in sorted(wanted))
    begin = "import sys\nfrom actordbg.trainers.openrlhf import vllm_standin\nassert not {'vllm', 'torch'} & {*sys.modules}"
    script = f"{begin}\nvllm_standin.register()\nimport vllm\n{imports}\nprint(vllm.__version__)"
    done = run_program([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert done.stdout.strip() == vllm_standin.__version__, done.stderr
