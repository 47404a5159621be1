"""A CPU stand-in for the part of vLLM that OpenRLHF's PPO uses: an engine that samples with transformers.

OpenRLHF's PPO modules `import vllm` at the top, and the package index has vLLM only as a CUDA build. Without CUDA, the demo's
processes register this module under vLLM's name. Everything else in the run is real: OpenRLHF's trainer, Ray actors, DeepSpeed
strategy, experience maker and reward path.

Weights are synchronized as in a real run: after each step OpenRLHF broadcasts every parameter through vLLM's NCCL communicator,
which is gloo here. So the samples come from the policy after its last update.

Log-probs are those of the whole vocabulary at the sampling temperature, whatever top_p and top_k; vLLM processes them too.

This module has only what OpenRLHF calls without colocation, sleep mode or images; anything else raises AttributeError.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

__version__ = "0.29.0+actordbg.cpu"


@dataclass
class SamplingParams:
    """The vLLM sampling parameters that OpenRLHF sets. `top_k=-1` means no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    min_tokens: int = 1
    skip_special_tokens: bool = False
    logprobs: int | None = None


TokensPrompt = dict
"""A dict with `prompt_token_ids`: list[int]."""


class AsyncEngineArgs(SimpleNamespace):
    """Keeps all arguments; the engine reads only `model`, `seed` and `dtype`."""


class AsyncLLMEngine:
    """Generates one request at a time with transformers' `generate` on the CPU."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(args.seed)
        dtype = getattr(torch, args.dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False, dtype=dtype)
        self._model = model.eval()
        self.model_runner = SimpleNamespace(model=self)
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLMEngine:
        return cls(engine_args)

    async def is_sleeping(self) -> bool:
        return False

    async def generate(self, prompt: dict[str, list[int]], params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        """Yield the finished output of this prompt (vLLM also yields partial outputs before it)."""
        import torch

        ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.no_grad():
            generated = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                max_new_tokens=params.max_tokens,
                min_new_tokens=params.min_tokens,
                eos_token_id=self._tokenizer.eos_token_id,
                pad_token_id=self._tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
            )
        begin = ids.shape[1]
        tokens = generated.sequences[0, begin:].tolist()
        log_probs = [(logits[0].float() / params.temperature).log_softmax(-1) for logits in generated.logits]
        of_tokens = [float(values[token]) for token, values in zip(tokens, log_probs, strict=True)]
        chosen = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, of_tokens, strict=True)]
        text = self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        stopped = bool(tokens) and tokens[-1] == self._tokenizer.eos_token_id
        reason, named = "stop" if stopped else "length", chosen if params.logprobs is not None else None
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, text=text, finish_reason=reason, logprobs=named)])

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Run `init_process_group` or `update_weight`, which a real engine runs in its workers."""
        return [getattr(self, method)(*args)]

    def init_process_group(self, host: str, port: int, rank: int, world_size: int, *_: object) -> None:
        self._policy = PyNcclCommunicator(StatelessProcessGroup.create(host, port, rank, world_size), "cpu")

    def update_weight(self, name: str, dtype: Any, shape: Any, *_: object) -> None:
        import torch

        received = torch.empty(shape, dtype=dtype)
        self._policy.broadcast(received, 0)
        self.model_runner.model.load_weights([(name, received)])

    def load_weights(self, weights: list[tuple[str, Any]]) -> set[str]:
        """Overwrite parameters, as a model of vLLM's does; returns their names."""
        for name, weight in weights:
            self._model.get_parameter(name).data.copy_(weight)
        return {name for name, _ in weights}


class StatelessProcessGroup:
    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> Any:
        """Meet the other ranks at a store that rank 0 serves, and return their gloo group."""
        from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

        return ProcessGroupGloo(TCPStore(host, port, world_size, rank == 0), rank, world_size)  # type: ignore[call-arg]


class PyNcclCommunicator:
    def __init__(self, group: Any, device: object) -> None:
        self._group = group

    def broadcast(self, tensor: Any, src: int, stream: object = None) -> None:
        """Send `tensor` from rank `src`, or overwrite it with what that rank sends."""
        self._group.broadcast(tensor, src).wait()


def random_uuid() -> str:
    return uuid.uuid4().hex


def register() -> None:
    """Make this module importable as `vllm`, with the submodules that OpenRLHF imports from, in this process only."""
    this = sys.modules[__name__]
    names = {
        "vllm": this,
        "vllm.inputs": this,
        "vllm.utils": this,
        "vllm.distributed": ModuleType("vllm.distributed"),
        "vllm.distributed.utils": this,
        "vllm.distributed.device_communicators": ModuleType("vllm.distributed.device_communicators"),
        "vllm.distributed.device_communicators.pynccl": this,
    }
    sys.modules.update(names)
