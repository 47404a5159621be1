"""What is asked of the trainer: each thing that it provides is asked for somewhere, and little else knows its name."""

import re

from roots import ROOT

from actordbg.trainers.find_adapter import BUILT_IN
from actordbg.trainers.openrlhf.adapter import OpenRlhf
from actordbg.trainers.trainer import TRAINER

PRODUCT = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "actordbg").rglob("*.py")}


def test_the_trainer_has_every_member_that_is_asked_for_and_no_other():
    asking = "\n".join(text for name, text in PRODUCT.items() if "/openrlhf/" not in name)
    public = {name for name in vars(OpenRlhf) if not name.startswith("_")}
    assert set(re.findall(r"\bTRAINER\.(\w+)", asking)) <= public
    calls = ("TRAINER.{}", "ctors.{}", "actors_of(choices).{}")
    assert [name for name in public if not any(call.format(name) in asking for call in calls)] == []


def test_other_trainers_are_named_by_the_adapters_alone():
    names = {*BUILT_IN} - {"plain"} | {"slime", "areal", "nemo_rl", "prime_rl"}
    named = re.compile(rf"\b({'|'.join(names)})\b(?! ?(PR)?#)", re.IGNORECASE)  # but public threads are cited
    example = {"actordbg/api/pytest_plugin.py", "actordbg/api/tapping.py"}
    dashboards = {"actordbg/judge/explained_sides.py"}  # their own names of its figures
    others = {name for name, text in PRODUCT.items() if not name.startswith("actordbg/trainers/") and named.search(text)}
    formulas = {
        "actordbg/recorded/advantage_laws.py",
        "actordbg/recorded/recorded_laws.py",
        "actordbg/recorded/loss_terms.py",
    }  # whose formula a law is
    formats = {
        "measure/log_exports",
        "measure/curves",
        "dumps/layouts",
        "dumps/archives",
        "dumps/containers",
        "dumps/pickle_tree",
        "cli/dump_files",
        "api/plain_commands",
    }
    formats = {f"actordbg/{name}.py" for name in formats}  # who writes such a file or figure
    assert others == example | dashboards | formulas | formats
    adapters = [text for name, text in PRODUCT.items() if name.endswith("_adapter.py") and "find_adapter" not in name]
    assert len(adapters) == len({place.partition(":")[0] for place in BUILT_IN.values()})
    assert sum(len(text.splitlines()) for text in adapters) <= 100 * len(BUILT_IN), "an adapter is small, with its losses"


def test_few_files_outside_of_its_folder_mention_the_trainer_by_name():
    """Threads and sources of formulas are cited; commands say whose agents or engine they follow, formats who writes them."""
    outside = [text for name, text in PRODUCT.items() if "/openrlhf/" not in name]
    assert sum(bool(re.search(rf"{TRAINER.package}(?!#)", text.lower())) for text in outside) <= 27
