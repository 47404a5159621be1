"""Failures of one kind have one name, and what varies between them does not show in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actordbg.actor.signatures import MAX_LENGTH, explain, known_failures, normalize, signature_of

SEEN = {
    "varlen-flash-attention-under-compile": [
        ("torch._dynamo.exc.TorchRuntimeError", "Failed running call_function flash_attn._flash_attn_varlen_forward.default(...):\n"
         "flash_attn::_flash_attn_varlen_forward() Expected a value of type 'int' for argument 'max_seqlen_q' but instead found "
         "type 'FakeTensor'."),
    ],
    "recompile-limit": [
        ("torch._dynamo.exc.FailOnRecompileLimitHit", "recompile_limit reached with fullgraph=True."),
        ("RuntimeError", "torch._dynamo hit config.cache_size_limit (8)"),
    ],
    "positions-of-a-float-mask": [
        ("RuntimeError", "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
         "torch.FloatTensor instead (while checking arguments for embedding)"),
        ("RuntimeError", "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
         "torch.cuda.BFloat16Tensor instead (while checking arguments for embedding)"),
    ],
    "compiler-missing": [("torch._inductor.exc.InvalidCxxCompiler", "No working C++ compiler found in cpp.cxx: (None, 'g++')")],
    "compile-failed": [
        ("torch._inductor.exc.InductorError", "LoweringException: KeyError: 's0'"),
        ("torch._dynamo.exc.BackendCompilerFailed", "backend='inductor' raised: ..."),
    ],
    "cuda-out-of-memory": [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 31.50 GiB. GPU 0 has a total capacity of 79.10 GiB"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    "node-out-of-memory": [
        ("WorkerDied", "node b0735129 (10.0.0.7) ran out of memory (22.4GB / 23.5GB), and Ray's memory monitor ended a host there"),
    ],
    "cpu-out-of-memory": [
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
         "to allocate 1050673152 bytes. Error code 12 (Cannot allocate memory)"),
        ("MemoryError", ""),
    ],
    "flash-attention-missing": [
        ("ImportError", "FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package "
         "flash_attn seems to be not installed."),
        ("ModuleNotFoundError", "No module named 'flash_attn'"),
    ],
    "flash-attention-dtype": [("RuntimeError", "FlashAttention only support fp16 and bf16 data type")],
    "token-outside-vocabulary": [("IndexError", "index out of range in self")],
    "cuda-device-assert": [("RuntimeError", "CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")],
    "collective-mismatch": [
        ("TimeoutError", "rank 0 waits in broadcast (deepspeed/runtime/zero/utils.py) since 20 s; rank 1 has no input left (1 of 1 "
         "done): ranks ran 2 and 1 inputs; it did not finish within 20 s (--timeout)"),
    ],
    "collective-timeout": [
        ("torch.distributed.DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, ...)"),
        ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
    ],
    "peer-lost": [("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31415")],
    "shape-mismatch": [
        ("RuntimeError", "The size of tensor a (24) must match the size of tensor b (23) at non-singleton dimension 3"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (48x64 and 128x64)"),
    ],
    "dtype-mismatch": [("RuntimeError", "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16")],
    "non-finite-output": [("NonFiniteOutput", "3 of 128 log-probs are not finite (non-finite output)")],
    "killed": [("WorkerCrashed", "the worker died of SIGKILL (often the kernel's out-of-memory killer: see `dmesg`)")],
    "segmentation-fault": [("WorkerCrashed", "the worker died of SIGSEGV (an invalid memory access in native code)")],
    "worker-hung": [("WorkerHung", "the input did not finish within 600 s")],
    "worker-crashed": [("WorkerCrashed", "the worker ended with exit code 3")],
    "not-replayable": [("actordbg.base.errors.Unsupported", "the call could not be recorded whole (visual_inputs: ...)")],
    "damaged-dump": [("actordbg.base.errors.CorruptDump", "x.zst: ends inside its record")],
}  # fmt: skip


def test_every_known_failure_has_a_case_here():
    assert known_failures().keys() == SEEN.keys()


@pytest.mark.parametrize("name", SEEN)
def test_a_known_failure_has_its_name_and_is_explained_with_ways_out(name: str):
    assert {signature_of(*failure) for failure in SEEN[name]} == {name}
    explanation, ways_out = explain(name)
    assert explanation.endswith(".") and ways_out


def test_a_log_names_only_what_shows_there_alone():
    log = "...\nW1120 ProcessGroupNCCL.cpp Watchdog caught collective operation timeout: WorkNCCL\n..."
    assert signature_of("RuntimeError", "something ended", log) == "collective-timeout"
    assert signature_of("ValueError", "no", "DEBUG shapes cannot be multiplied? checked: fine") == "ValueError: no"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("size 1861 at 0x7f3a0010 does not fit 1024", "size 7 at 0x55aa does not fit 8"),
        ("shape (2, 1861, 64) of /tmp/a/x.bin, 1e-05 off", "shape [4, 312] of /data/y, 2.5e+3 off"),
        ("key 9f3a2c1bdeadbeef missing", "key 00112233445566778899 missing"),
    ],
)
def test_what_varies_does_not_show(left: str, right: str):
    assert signature_of("pkg.mod.OddError", left) == signature_of("pkg.mod.OddError", right)
    assert signature_of("pkg.mod.OddError", left).startswith("OddError: ")


def test_what_differs_in_words_stays_different():
    assert signature_of("ValueError", "no rows in batch 3") != signature_of("ValueError", "no columns in batch 3")
    assert signature_of("ValueError", "float32 wanted") == "ValueError: float32 wanted"
    assert signature_of(None, None) == "error"
    assert explain("ValueError: no") is None
    assert len(normalize("A\nB", "x" * 400)) == MAX_LENGTH and signature_of("A\nB", "x\ny") == "A B: x"


def test_the_desk_names_failures_and_checks_configurations_without_torch():
    code = "import sys, actordbg.actor.signatures, actordbg.actor.rules, actordbg.cli.setting_options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
