"""`--accelerate-config`: which settings a file or a mapping gives, what it names as not used, and what it refuses."""

import json

import commandline
import pytest
from replaycases import publish
from roots import json_of, write_json

from actordbg.api.client import Client
from actordbg.base.errors import Unsupported, UsageError
from actordbg.config.accelerate_file import read_accelerate

FSDP2 = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False, "fsdp_activation_checkpointing": False, "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    },
    "machine_rank": 0, "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2, "rdzv_backend": "static",
    "same_network": True, "tpu_env": [], "use_cpu": False,
}  # fmt: skip
"""What `accelerate config` of accelerate 1.15 writes for FSDP2."""
SETTINGS = {"backend": "fsdp2", "nproc": 2, "dtype": "bf16"}


def changed(section, **values):
    return FSDP2 | {section: FSDP2.get(section, {}) | values}


@pytest.mark.parametrize(
    "config, settings, unused",
    [
        (FSDP2, SETTINGS, []),
        (changed("fsdp_config", fsdp_version=1), SETTINGS, ["fsdp_config.fsdp_version 1"]),
        (changed("fsdp_config", fsdp_offload_params=True), SETTINGS, ["fsdp_config.fsdp_offload_params True"]),
        (changed("fsdp_config", fsdp_reshard_after_forward=False), SETTINGS, ["fsdp_config.fsdp_reshard_after_forward False"]),
        (changed("fsdp_config", fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), SETTINGS,
         ["fsdp_config.fsdp_auto_wrap_policy SIZE_BASED_WRAP"]),
        (changed("parallelism_config", parallelism_config_tp_size=2), SETTINGS | {"tp": 2}, []),
        (changed("dynamo_config", dynamo_backend="INDUCTOR"), SETTINGS | {"compile": True, "compile_backend": "inductor"}, []),
        (FSDP2 | {"mixed_precision": False}, SETTINGS | {"dtype": "fp32"}, []),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}},
         {"backend": "deepspeed", "nproc": 1, "dtype": "fp32", "zero_stage": 3}, ["deepspeed_config.offload_optimizer_device cpu"]),
        ({"distributed_type": "NO"}, {"backend": "plain", "nproc": 1, "dtype": "fp32"}, []),
    ],
)  # fmt: skip
def test_a_config_gives_settings_and_what_is_not_used_is_named(config, settings, unused, tmp_path):
    assert read_accelerate(config) == ("the mapping", settings, unused)
    (file := tmp_path / "config.yaml").write_text(json.dumps(config))
    assert read_accelerate(str(file)) == ("config.yaml", settings, unused)


@pytest.mark.parametrize(
    "config, error, words",
    [
        (json.dumps(FSDP2 | {"num_machines": 4}), Unsupported, "the mapping is for 4 machines"),
        (json.dumps(FSDP2 | {"mixed_precision": "fp8"}), Unsupported, "cannot run in mixed_precision fp8"),
        (json.dumps(FSDP2 | {"num_processes": "two"}), UsageError, "'two' is not a value of --nproc"),
        ('{"distributed_typ": "FSDP"}', UsageError, "has no distributed_type"),
        ('{"distributed_type": ', UsageError, "cannot be read"),
        ("nowhere.yaml", UsageError, r"nowhere\.yaml is not a file"),
    ],
)
def test_a_config_that_is_invalid_or_cannot_run_is_refused(config, error, words):
    with pytest.raises(error, match=words) as caught:
        read_accelerate(config)
    assert caught.value.hint


def test_accelerates_own_file_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    write_json(tmp_path / "accelerate" / "default_config.yaml", FSDP2)
    assert read_accelerate("default") == ("default_config.yaml", SETTINGS, [])


def test_commands_and_python_take_it_and_a_flag_wins(store):
    publish(store, 2)
    option = ("--accelerate-config", json.dumps(FSDP2))
    replay = commandline.invoke(store, "replay", *option, "--dtype", "fp32", "--dry-run")
    assert "on 2 workers (fsdp2)" in replay.stdout and "from the mapping: backend fsdp2, nproc 2\n" in replay.stderr
    cells = json_of(commandline.invoke(store, "train-check", *option, "--dry-run", "--json"))["cells"]
    assert {cell["config"]["backend"] for cell in cells} == {"plain", "fsdp2"}
    notes = []
    client = Client(lambda *given, **more: notes.append(more["note"]))
    settings = client.settings({"accelerate_config": FSDP2, "dtype": "fp16"})
    assert settings == SETTINGS | {"dtype": "fp16"} and notes == ["from the mapping: backend fsdp2, nproc 2"]
