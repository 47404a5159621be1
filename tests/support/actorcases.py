"""Scenarios that build real actors, each run in a process of its own: an actor changes torch and the environment.

    python actorcases.py SCENARIO MODEL_CACHE       prints what the scenario found, as JSON, on the last line

Several scenarios, separated by commas, run one after another in one process; then what each found stands under its name. The tests read that. Log-probs travel as lists; inputs are made from seeds, so every process makes the same.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import roots
from packaging.version import Version

VOCAB = 4096
ZERO3 = {"backend": "deepspeed", "zero_stage": 3 if Version(version("transformers")) < Version("5.23") else 2}
"""ZeRO-3; ZeRO 2 where OpenRLHF loads no model under ZeRO-3, a known failure."""


def make_dump(
    seed=0,
    length=24,
    actions=8,
    vocab=VOCAB,
    arguments=None,
    **record,
):
    """A captured call of three rows padded on both sides; `actions` 0 for none; further fields of its record by name."""
    import torch

    from actordbg.formats.dump_record import DumpRecord
    from actordbg.store.payload import Dump

    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(0, vocab, (3, length), generator=generator)
    attention = torch.ones(3, length, dtype=torch.int64)
    attention[0, :7] = 0
    attention[1, -3:] = 0
    tensors = {"sequences": sequences, "attention_mask": attention}
    if actions:
        tensors["action_mask"] = attention[:, -actions:].bool()
    call = {"return_output": False, "return_logprobs": False, "return_entropy": False, "packed_seq_lens": None}
    made = DumpRecord(
        dump_id=f"dump-{seed}",
        run="test",
        rank=0,
        timestamp="2025-06-19T05:26:08.430740Z",
        batch_size=3,
        seq_len=length,
        tokens=int(attention.sum()),
        arguments=call | (arguments or {}),
        process_groups={"ring_attn_group": None},
        **record,
    )
    return Dump(made, tensors)


def opened(cache, model="tiny", defaults=None, **settings):
    """An actor of a model on its own, under these settings."""
    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig

    return open_actor(ReplayConfig(model=str(model), **settings), defaults=defaults, model_cache=cache)


def adapter(cache):
    """OpenRLHF's Actor and the truth of a LoRA adapter's folder, for a call with the adapter on and one with it off."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from actordbg.actor.models import ensure_tiny

    model = AutoModelForCausalLM.from_pretrained(ensure_tiny(cache))
    given = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, given).save_pretrained(cache / "adapter")
    dumps = [make_dump(actor={"lora_adapters": names}) for names in (["default"], [])]
    found = []
    for truth in (None, "fp32"):
        with opened(
            cache, cache / "adapter", truth=truth, dtype="fp32", keep_gradients=True, defaults=dumps[0].record
        ) as session:
            found.append(
                [session.run(dump, backward=name == "policy", keep=True) for dump, name in zip(dumps, ROLES, strict=True)]
            )
    (actor, reference), truths = found
    return {
        **{name: apart(one, truth) for name, one, truth in zip(ROLES, (actor, reference), truths, strict=True)},
        "apart": apart(actor, reference),
        "gradient": abs(actor.grad_norm / truths[0].grad_norm - 1),
        "trained": sorted({name.split(".")[-3] for name in actor.gradients}),
    }


ROLES = ("policy", "reference")


def apart(one, other):
    """The largest difference of two outcomes' log-probs."""
    return float((one.log_probs - other.log_probs)[one.mask].abs().max())


def numbers(outcome):
    """An outcome as plain data: log-probs where the mask is set (the others are not replayed values), loss, norm."""
    chosen = outcome.log_probs.where(outcome.mask, 0.0)
    return {
        "log_probs": chosen.tolist(),
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "folded": outcome.folded,
    }


def failing(session):
    """The error of a call in whose forward a layer raises."""
    import torch

    def raising(*_):
        raise ValueError("in the forward")

    layer = next(module for module in session.actor.modules() if isinstance(module, torch.nn.Linear))
    hook = layer.register_forward_pre_hook(raising)
    try:
        session.run(make_dump(), backward=False)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    finally:
        hook.remove()
    return "ran"


def furthest(left, right):
    """The largest difference of two lists of log-probs."""
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def run_scenario(name, cache, *, world=None, program=__file__, **environment):
    """Run a scenario (or several: see above) of `program` in `world` processes (None: one, without rank variables), and return what
    each found. The first that fails ends the others, which may wait for it. Compiled kernels are kept in the user's cache.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    around = roots.environment(**environment)
    base = {k: v for k, v in around.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACTORDBG_DISABLE")}
    command = [sys.executable, str(Path(program).resolve()), name, str(cache)]
    started, said = [], [tempfile.TemporaryFile("w+") for _ in range(2 * (world or 1))]  # noqa: SIM115 - until this process ends
    for rank in range(world or 1):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world or 1)} if world else {}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        out, err = said[2 * rank : 2 * rank + 2]
        started.append(subprocess.Popen(command, env=base | place, stdout=out, stderr=err))
    until = time.monotonic() + 400
    while None in (codes := [process.poll() for process in started]) and not any(codes) and time.monotonic() < until:
        time.sleep(0.05)
    for process in started:
        process.kill()
        process.wait()
    for file in said:
        file.seek(0)
    texts = [file.read() for file in said]
    assert codes == [0] * len(codes), "\n".join(text[-4000:] for text in texts[1::2])
    return [json.loads(text.splitlines()[-1]) for text in texts[::2]]


def main(arguments, scenarios=None):
    names, cache = arguments
    found = {name: (scenarios or globals())[name](Path(cache)) for name in names.split(",")}
    print("\n" + json.dumps(found if "," in names else found[names]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
