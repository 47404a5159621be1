"""One name for one kind of failure, so that a report can say "12 inputs failed alike, and this is why".

An exception's text differs from input to input (shapes, addresses, ranks, sizes). A *signature* does not: it is the
id of a known failure, with its explanation and the ways out. For an unknown failure it is the error class and its message, with
everything that varies replaced by `#`.

Known failures are matched in the order of KNOWN, on the error class and the message. Some show only in the log (a process that
was killed, a compiler's message); those are matched on its text as well. Pure functions over text: no torch here.

Example:
    >>> signature_of("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 31.50 GiB. GPU 0 has ...")
    'cuda-out-of-memory'
    >>> signature_of("ValueError", "size 1861 at 0x7f3a does not fit 1024")
    'ValueError: size # at # does not fit #'
    >>> explain("cuda-out-of-memory")[1][0]
    '--packing: padding is not computed'
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LENGTH = 160
"""Longest signature of an unknown failure, in characters."""


@dataclass(frozen=True)
class Known:
    """A failure with a name. `pattern` is searched in "ErrorClass: message"; with `in_log`, in the log as well."""

    id: str
    pattern: re.Pattern[str]
    explanation: str
    ways_out: tuple[str, ...]
    in_log: bool = False


def _known(id: str, pattern: str, explanation: str, *ways_out: str, in_log: bool = False) -> Known:
    return Known(id, re.compile(pattern, re.IGNORECASE | re.DOTALL), explanation, ways_out, in_log)


KNOWN: tuple[Known, ...] = (
    _known(
        "varlen-flash-attention-under-compile",
        r"max_seqlen_[qk].{0,400}FakeTensor|FakeTensor.{0,400}max_seqlen_[qk]|_flash_attn_varlen_forward.{0,400}FakeTensor"
        r"|FakeTensor.{0,400}flash_attn.{0,40}varlen",
        "With packing, flash-attn's variable-length kernel takes max_seqlen_q as a number. While torch.compile traces, it "
        "is a FakeTensor, and the kernel refuses it.",
        "--attn sdpa",
        "--no-packing",
        "leave --compile and --deepcompile out",
        in_log=True,
    ),
    _known(
        "positions-of-a-float-mask",
        r"Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; "
        r"but got torch\.[\w.]*(Float|Half|Double)",
        "Packing counts position ids from the attention mask, in the mask's dtype. This dump's mask is one of floats, and this "
        "model looks its positions up in a table (GPT-2 does), which takes whole numbers only.",
        "--no-packing",
        "a model with rotary positions",
        "in the training: make the mask whole numbers (attention_mask.long())",
    ),
    _known(
        "recompile-limit",
        r"recompile_limit|cache_size_limit|FailOnRecompileLimitHit|RecompileLimitExceeded",
        "The model was compiled anew for more variants of its inputs than torch allows. Without this error torch would have "
        "gone on eagerly, and the timings would not be those of compiled code.",
        "--order length, so that like inputs follow each other",
        "fewer different shapes: narrow --where",
    ),
    _known(
        "compiler-missing",
        r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler|cannot find (g\+\+|nvcc)",
        "torch.compile generates C++ (on a CPU) or Triton (on a GPU) and needs a compiler to build it.",
        "install g++ or clang++, or name one in CXX",
        "leave --compile out",
    ),
    _known(
        "compile-failed",
        r"BackendCompilerFailed|InductorError|torch\._dynamo\.exc\.(?!FailOnRecompile)|LoweringException",
        "The compiler, not the model, failed: the same input may pass eagerly.",
        "leave --compile out, and compare",
        "TORCH_LOGS=+dynamo,+inductor shows where",
    ),
    _known(
        "cuda-out-of-memory",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|NCCL.{0,80}out of memory",
        "The input needs more GPU memory than is free. In fp32 the logits alone take 4 bytes x batch x length x vocabulary, "
        "and a backward keeps them.",
        "--packing: padding is not computed",
        "--zero-stage 3 with more processes",
        "--no-backward, or --num-layers N, to see where it begins",
    ),
    _known(
        "cpu-out-of-memory",
        r"DefaultCPUAllocator.{0,80}(can't|not enough|cannot) allocate|^MemoryError|std::bad_alloc|Cannot allocate memory",
        "The input needs more memory than this machine has free.",
        "--packing: padding is not computed",
        "the tiny model, whose vocabulary is small: --model tiny",
        "smaller inputs: --where 'batch_size * seq_len < 4000'",
    ),
    _known(
        "node-out-of-memory",
        r"Ray's memory monitor ended",
        "The node's memory was nearly used up, and Ray ended the worker that held its ranks. Other work on the node counts too.",
        "fewer ranks on a node: --gpus-per-node, --groups",
        "smaller inputs: --where 'batch_size * seq_len < 4000'",
        "actordbg memory watch --ray shows who holds it; RAY_memory_usage_threshold of `ray start` moves the limit",
    ),
    _known(
        "flash-attention-missing",
        r"FlashAttention2 has been toggled on|flash_attn.{0,60}(not installed|seems to be not installed)"
        r"|No module named 'flash_attn|flash_attention_2.{0,80}not (available|supported)",
        "The model was asked to run flash attention 2, and the flash-attn package is missing or cannot run here.",
        "--attn sdpa",
        "pip install flash-attn, on a machine with CUDA",
    ),
    _known(
        "flash-attention-dtype",
        r"FlashAttention only supports? fp16 and bf16|flash.{0,40}only support.{0,40}(fp16|bf16|half)",
        "Flash attention has kernels for fp16 and bf16 only.",
        "--dtype bf16",
        "--attn sdpa",
    ),
    _known(
        "token-outside-vocabulary",
        r"index out of range in self|indexSelect.{0,60}(srcIndex < srcSelectDimSize)|vectorized_gather_kernel.{0,60}out of bounds"
        r"|index -?\d+ is out of bounds for dimension .{0,30}embed",
        "An id is larger than the embedding has rows (or negative): the dump comes from another tokenizer than the model's.",
        "--model of the run that captured the dump",
        "--model tiny, which folds ids into its vocabulary",
    ),
    _known(
        "cuda-device-assert",
        r"device-side assert",
        "A kernel found an impossible value, most often an index out of range. The process cannot use the GPU any more.",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel",
        "replay the input on a CPU, where the same error has a message",
    ),
    _known(
        "collective-mismatch",
        r"rank \d+ waits in .*?(?:ranks ran .*? inputs|every rank waits in a collective)",
        "Ranks that compute together called their collectives a different number of times, or in another order: each waits for "
        "one that does not come. A rank that runs out of inputs, an input that takes another path through the model, or "
        "lengths that change what is communicated do that.",
        "`actordbg report` shows each rank's stack: the first frames that differ say where they parted",
        "leave --align shuffle out: without it ranks that have no input are kept in step",
        "in training: the same number of micro-batches on every rank (drop_last, or padding the last ones)",
    ),
    _known(
        "collective-timeout",
        r"Watchdog caught collective operation timeout|(?<!outside of any )collective.{0,80}timed? ?out"
        r"|ProcessGroup(NCCL|Gloo).{0,200}timeout"
        r"|Timed out (initializing|waiting)|wait timeout after \d+ms",
        "A rank waited for the others in a collective that they never reached: one of them failed, hung, or took another "
        "number of steps.",
        "look at the other ranks' results of the same slot",
        "--nproc 1",
        in_log=True,
    ),
    _known(
        "peer-lost",
        r"Connection (closed|reset) by peer|ncclRemoteError|ncclSystemError|NCCL.{0,60}unhandled system error|Broken pipe",
        "Another process of the replay died while this one was communicating with it.",
        "look at the other ranks' results of the same slot",
        in_log=True,
    ),
    _known(
        "shape-mismatch",
        r"size of tensor .{0,40} must match|shapes? .{0,60}(cannot be multiplied|mismatch|incompatible)|mat1 and mat2 shapes"
        r"|The expanded size of the tensor|are \(.{0,40}\), the mask \(",
        "Two tensors do not fit each other: masks of another length than the sequences, or a model that expects another shape.",
        "actordbg dump show ID shows the input's shapes",
    ),
    _known(
        "dtype-mismatch",
        r"expected (m1 and m2|scalar type|mat1 and mat2).{0,80}(same dtype|but (got|found))|must have the same dtype",
        "Two tensors that meet in one operation have different dtypes: part of the model runs in another precision.",
        "--dtype bf16 or --dtype fp32 for all of it",
    ),
    _known(
        "non-finite-output",
        r"non-?finite",
        "The forward ran and some of its log-probs are NaN or infinite. A row without a single real token does that, and so "
        "does an overflow in fp16 or bf16.",
        "--dtype fp32: if it is finite there, it is an overflow",
        "actordbg dump show ID: a row whose attention mask is all 0",
    ),
    _known(
        "killed",
        r"SIGKILL|signal 9\b|exit ?code -9",
        "Something outside killed the worker; most often the kernel, because memory ran out.",
        "smaller inputs: --where 'batch_size * seq_len < 4000'",
        "fewer processes: --nproc 1",
    ),
    _known(
        "segmentation-fault",
        r"SIGSEGV|SIGBUS|SIGABRT|SIGILL|SIGFPE|Segmentation fault|signal (4|6|7|8|11)\b",
        "A library crashed without a Python exception. The worker's log has the stack of every thread.",
        "--attn eager, and leave --compile out, to see which kernel it is",
    ),
    _known(
        "worker-hung",
        r"WorkerHung|did not finish within|^hung\b|timed out after",
        "The input was still running when its timeout ended. The log has the stack of every thread at that moment.",
        "--timeout N, if it is only slow (the first compiled input is)",
        "look at the other ranks' results of the same slot",
    ),
    _known(
        "worker-crashed",
        r"WorkerCrashed|the worker (died|ended)",
        "The process ended while this input was running, without a Python exception.",
        "the end of its log says what its last words were",
        "--attn eager, and leave --compile out, to see which part it is",
    ),
    _known(
        "not-replayable",
        r"could not be recorded whole|was captured with the argument",
        "An argument of the call could not be stored, or the forward of the installed Actor does not have it.",
        "replay with the trainer (or the fork) that it was captured with",
    ),
    _known("damaged-dump", r"CorruptDump|NewerFormat", "The file is not what its header says.", "actordbg dump verify"),
)

_BY_ID = {known.id: known for known in KNOWN}
_LOG_TAIL = 20_000


def signature_of(error_class: str | None, error: str | None, log: str = "") -> str:
    """A stable id for a failure: a known one's, else "ErrorClass: message" with what varies replaced by `#`.

    `log` is the failing input's part of the worker's log; only its end is searched, for the failures that show there alone.
    """
    head = f"{error_class or ''}: {error or ''}"
    for known in KNOWN:
        if known.pattern.search(head):
            return known.id
    tail = log[-_LOG_TAIL:]
    for known in KNOWN:
        if known.in_log and known.pattern.search(tail):
            return known.id
    return normalise(error_class, error)


def explain(signature: str) -> tuple[str, tuple[str, ...]] | None:
    """(explanation, ways out) of a known failure's id; None for an unknown one."""
    known = _BY_ID.get(signature)
    return (known.explanation, known.ways_out) if known else None


def normalise(error_class: str | None, error: str | None) -> str:
    """The class without its module, and the message's first line without what varies: "ValueError: size # at #"."""
    kind = " ".join((error_class or "error").rsplit(".", 1)[-1].split())
    lines = [line.strip() for line in (error or "").splitlines()]
    message = next((line for line in lines if line), "")
    for pattern, replacement in _VARYING:
        message = pattern.sub(replacement, message)
    text = " ".join(f"{kind}: {message}".split()) if message else kind
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1].rstrip() + "…"


_VARYING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"(?<![\w.])(/[\w.+@-]+)+"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"[\[(]\s*-?\d+(\s*[,x]\s*-?\d+)*\s*,?\s*[\])]"), "#"),
    (re.compile(r"(?<![A-Za-z0-9_])[-+]?\d+(\.\d+)*(e[-+]?\d+)?"), "#"),
    (re.compile(r"#(\s*[,x]\s*#)+"), "#"),
)
