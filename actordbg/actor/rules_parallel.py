"""Rules about ranks that compute one model, or one input, together: tensor parallelism, rings, and what moves their data."""

from __future__ import annotations

from actordbg.actor.rule import INFO, REFUSE, WARN, Rule

FULLY_SHARD_SINCE = (2, 6)
"""The torch release from which `fully_shard` is public."""

PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "trainer-cannot-be-called",
        REFUSE,
        lambda case: case.uncallable,
        "adapter {adapter} is not installed here, or has no `again`, so its trainer's function cannot be called by itself",
        ("--through rows, which needs no trainer", "announce the adapter as an entry point, with a seam that has `again`"),
    ),
    Rule(
        "trainers-function-is-alone",
        REFUSE,
        lambda case: case.function and (case.together or case.compiles),
        "the trainer's function is called with a plain model: nothing is sharded or compiled around it",
        ("--backend plain, without --compile", "--through rows"),
    ),
    Rule(
        "plain-ranks-share-nothing",
        REFUSE,
        lambda case: not case.together and (case.config.tp > 1 or case.ring or case.config.dist_backend is not None),
        "{parallel}: that is for ranks that compute together, and those of the plain backend are independent of each other",
        ("--backend fsdp2", "leave {parallel} out"),
    ),
    Rule(
        "fsdp2-needs-torch",
        REFUSE,
        lambda case: case.fsdp2 and () < case.version("torch") < FULLY_SHARD_SINCE,
        "fsdp2 is torch's `fully_shard`, which is public from torch 2.6 on; here is torch {torch}",
        ("upgrade torch", "--backend deepspeed --zero-stage 3, which shards the same"),
    ),
    Rule(
        "autotp-needs-bf16",
        REFUSE,
        lambda case: case.deepspeed and case.config.tp > 1,
        "tensor parallelism under DeepSpeed is its AutoTP, which {trainer} allows in bf16 only: its results could "
        "not be told from rounding, and DeepSpeed gathers no single gradients of it",
        ("--backend fsdp2 --tp {tp}, by transformers' own plan", "leave --tp out"),
    ),
    Rule(
        "tp-does-not-divide-heads",
        REFUSE,
        lambda case: case.fsdp2 and any(count % case.config.tp for count in case.heads),
        "--tp {tp} gives every rank equally many attention heads and key/value heads, and {model} has {heads} and {kv_heads}",
        ("--tp {tp_fits}", "--ring, which divides tokens instead"),
    ),
    Rule(
        "tp-under-compile",
        REFUSE,
        lambda case: case.fsdp2 and case.config.tp > 1 and case.config.compile and case.config.compile_backend != "eager",
        "torch.compile cannot trace the model of fsdp2 with tensor parallelism (BackendCompilerFailed, a "
        "RecursionError in autograd's tracing; torch 2.13)",
        ("--compile-backend eager, which traces no autograd", "leave --compile out", "leave --tp out"),
    ),
    Rule(
        "ring-needs-packing",
        REFUSE,
        lambda case: case.together and case.ring and not case.choices.packing,
        "ring attention divides a packed batch: {trainer} ignores the ring where rows are not packed, and every rank would "
        "compute the same",
        ("--packing",),
    ),
    Rule(
        "ring-on-the-rows",
        REFUSE,
        lambda case: case.ring and case.choices.through == "rows",
        "ring attention is {trainer}'s own: on the rows, each rank would compute the same",
        ("--through trainer", "leave --ring out"),
    ),
    Rule(
        "ring-attention-kernel",
        REFUSE,
        lambda case: case.ring and (case.choices.attn == "eager" or (case.choices.attn == "sdpa" and case.ring_flash_attn)),
        "with {attn} attention each rank of a ring would attend to its own tokens only: {ring_kernels}",
        ("--attn {ring_attn}",),
    ),
    Rule(
        "ring-flash-attn-missing",
        REFUSE,
        lambda case: case.ring and case.choices.attn == "flash_attention_2" and not case.ring_flash_attn,
        "a ring with flash_attention_2 needs ring_flash_attn, which is not installed (or there is no CUDA for it)",
        ("--attn sdpa, with keys and values gathered in its place", "pip install ring-flash-attn"),
    ),
    Rule(
        "nccl-needs-cuda",
        REFUSE,
        lambda case: case.config.dist_backend == "nccl" and not case.facts.cuda,
        "nccl moves data between CUDA devices, and there is none",
        ("--dist-backend gloo", "leave --dist-backend out"),
    ),
    Rule(
        "gloo-with-cuda",
        WARN,
        lambda case: case.together and case.config.dist_backend == "gloo" and case.facts.cuda,
        "gloo moves CUDA tensors through host memory, and has not all of the collectives that sharding uses for them",
        ("--dist-backend nccl",),
    ),
    Rule(
        "fsdp2-breaks-graphs",
        WARN,
        lambda case: case.fsdp2 and case.config.compile,
        "under fsdp2 the hooks that gather weights break the graph at every layer: a two-layer model compiles into 5 graphs with "
        "4 breaks instead of one graph (11 with 8 in a ring)",
        ("--backend deepspeed, at stages 0 to 2 one graph",),
    ),
    Rule(
        "ring-kernel-stands-in",
        INFO,
        lambda case: case.together and case.ring and case.choices.attn == "sdpa",
        "keys and values are gathered in plain torch, in the place of ring_flash_attn: {trainer}'s slicing, gathering and "
        "reducing run as they do in training, the ring's kernel does not",
        ("--attn flash_attention_2 where CUDA and ring_flash_attn are",),
    ),
)
