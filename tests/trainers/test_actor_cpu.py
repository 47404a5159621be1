"""OpenRLHF without CUDA: what `install_cpu_support` makes possible, and what it leaves alone.

One process (the support changes torch, so it has no place in this one) does everything and prints what it found; the tests read
that. It has no compiler on its PATH, so anything that would compile C++ fails there.
"""

import json
import os
import sys

import pytest
from roots import environment, run_program

from actordbg.actor.models import build_tiny
from actordbg.trainers.openrlhf.cpu import CpuDevice

pytestmark = pytest.mark.slow

PROBE = """
import json, os, sys
from types import SimpleNamespace as N
from actordbg.trainers.openrlhf.cpu import install_cpu_support, map_flash_attention_to_sdpa
from importlib.util import find_spec
real = find_spec("flash_attn") is not None
facts = {"first": install_cpu_support(), "second": install_cpu_support()}
facts["openrlhf imported by it"] = "openrlhf" in sys.modules
facts["real flash-attn"] = real
map_flash_attention_to_sdpa()
import torch
from transformers.utils import is_flash_attn_2_available
try:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    facts["kernels"] = True
except ImportError:
    facts["kernels"] = False
facts["flash attention 2 available"] = is_flash_attn_2_available()
names = vars(sys.modules["transformers.utils.import_utils"]).get("PACKAGE_DISTRIBUTION_MAPPING", {})
facts["as transformers 5.7 asks"] = "flash-attn" in [name.replace("_", "-") for name in names.get("flash_attn", ())]
facts["cuda available"] = torch.cuda.is_available()
try:
    torch.cuda.get_device_properties(0)
    facts["device properties"] = "faked"
except Exception as error:
    facts["device properties"] = "raise"
facts["moved to"] = str(torch.ones(1).to(torch.cuda.current_device()).device)
facts["parsed"] = str(torch.device(f"cuda:{torch.cuda.current_device()}"))

from openrlhf.models import Actor
from openrlhf.utils.deepspeed import DeepspeedStrategy

model = sys.argv[1]
generator = torch.Generator().manual_seed(0)
ids = torch.randint(3, 512, (3, 24), generator=generator)
mask = torch.ones_like(ids); mask[0, :10] = 0; mask[1, 15:] = 0
def log_probs(actor, rows=slice(None), ids=ids):
    with torch.no_grad():
        return actor(ids[rows], attention_mask=mask[rows], return_output=True, return_logprobs=True)[0]
plain = Actor(model, attn_implementation="sdpa", param_dtype="fp32")
packed = Actor(model, attn_implementation="flash_attention_2", param_dtype="fp32", packing_samples=True)
facts["dtype"] = str(next(plain.parameters()).dtype)
facts["packed attention"] = packed.model.config._attn_implementation
inside = (mask[:, :-1] * mask[:, 1:]).bool()
facts["packed - padded"] = float((log_probs(packed) - log_probs(plain))[inside].abs().max())
scrambled = ids.clone(); scrambled[0] = ids[0].flip(0)
facts["leak"] = float((log_probs(packed, ids=scrambled) - log_probs(packed))[1:][inside[1:]].abs().max())
facts["spread"] = float(log_probs(plain)[inside].std())

args = N(local_rank=0, ds=N(param_dtype="fp32"), train=N())
strategy = DeepspeedStrategy(micro_train_batch_size=3, train_batch_size=3, zero_stage=2, args=args)
strategy.setup_distributed()
adam = dict(lr=1e-2, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.0)
cfg = dict(optim="adam", muon={}, adam=adam, scheduler_steps=4, lr_warmup_ratio=0.0)
plain, optimizer, _ = strategy.prepare((plain, cfg))
facts["optimizer"] = type(optimizer.optimizer).__name__
before = -log_probs(plain)[inside].mean()
for _ in range(3):
    loss = -plain(ids, attention_mask=mask, return_output=True, return_logprobs=True)[0][inside].mean()
    strategy.backward(loss, plain, optimizer)
    strategy.optimizer_step(optimizer, plain, None)
facts["loss fell by"] = float(before + log_probs(plain)[inside].mean())
facts["mesh"] = strategy.ds_device_mesh.device_type
import deepspeed.runtime.zero.partition_parameters as zero
class Later(N):
    def wait(self):
        self.out.copy_(self.given)
def held(number):
    shard = torch.full((4,), float(number))
    shard.ds_numel = 4
    return N(ds_tensor=shard, ds_numel=4, ds_shape=(4,), dtype=shard.dtype, data=None)
params = [held(1), held(2), held(3)]
fake = N(_partition_world_size=lambda p: 2, local_device="cpu", use_all_gather_into_tensor=True, get_partition_dp_group=lambda p: None)
gather = lambda out, given, group, async_op: Later(out=out, given=torch.cat((given, given)))
zero.dist.all_gather_into_tensor = gather
zero.Init._allgather_params_coalesced(fake, params)
facts["gathered"] = [one.data.tolist() for one in params]
facts["compiled"] = os.listdir(os.environ["TORCH_EXTENSIONS_DIR"])
print("FACTS" + json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory, template_of_workers):
    """What the probe found out in its own process."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is CUDA here, so nothing is replaced")
    folder = tmp_path_factory.mktemp("cpu")
    model = build_tiny(folder / "model", vocab_size=512)
    (folder / "extensions").mkdir()
    port = str(20000 + os.getpid() % 20000)
    env = environment(TEMPLATE_OF_WORKERS=str(template_of_workers), FORKED_PROGRAM="-c")
    env |= {"HOME": str(folder), "PATH": "", "HF_HUB_OFFLINE": "1", "RANK": "0", "WORLD_SIZE": "1"}
    env |= {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", PROBE, str(model)]
    done = run_program(command, cwd=folder, env=env, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("FACTS"))
    return found


def test_openrlhfs_actor_runs_in_fp32_where_torch_still_knows_that_there_is_no_cuda(facts):
    expected = {
        "first": True, "second": True, "openrlhf imported by it": False, "cuda available": False, "device properties": "raise",
        "moved to": "cpu", "parsed": "cuda:0", "dtype": "torch.float32", "packed attention": "sdpa",
    }  # fmt: skip
    assert {name: facts[name] for name in expected} == expected
    assert f"""cuda:{CpuDevice("cpu")}""" == "cuda:0" and CpuDevice("cpu") == "cpu"


def test_parameters_that_zero_3_gathers_together_are_all_there_when_it_says_so(facts):
    """Each stand-in for a collective is done when it is waited for, and not before, as gloo's may be."""
    assert facts["gathered"] == [[float(number)] * 4 for number in (1, 2, 3)]


def test_packing_is_exact_and_rows_do_not_leak(facts):
    """fp32, sdpa: the padded and the packed run of three rows agree to rounding; scrambling row 0 moves no other row."""
    assert facts["spread"] > 1, "log-probs that hardly vary could not show a leak"
    assert facts["packed - padded"] < 2e-5
    assert facts["leak"] == 0.0


def test_openrlhfs_strategy_trains_with_torchs_adam_and_compiles_nothing(facts):
    assert (facts["optimizer"], facts["mesh"], facts["compiled"]) == ("AdamW", "cpu", [])
    assert facts["loss fell by"] > 0.01


def test_the_stand_in_has_no_kernels_and_is_not_taken_for_flash_attention(facts):
    if facts["real flash-attn"]:
        pytest.skip("the real flash-attn is installed here, and the stand-in is never used beside it")
    assert facts["kernels"] is False and facts["flash attention 2 available"] is False
    assert facts["as transformers 5.7 asks"] is False
