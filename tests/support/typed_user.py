"""A user's script: every public name of actordbg, as `mypy --strict` reads it: `make check` does."""

import torch

import actordbg


def report_progress(steps: int, note: str = "", total: int | None = None) -> None:
    print(steps, note, total)


def main(model: torch.nn.Module, ids: torch.Tensor) -> int:
    store: actordbg.OpenStore = actordbg.open("store", on_progress=report_progress)
    dump: actordbg.StoredDump = store.add(ids)
    lengths: list[int] = [each.seq_len for each in store.dumps("rank=0", order="length")[:3]]
    with actordbg.record(model, store, run="mine") as recording:
        model(input_ids=ids)
    answer: actordbg.CommandResult = actordbg.check_model(model, {"input_ids": ids}, packing=True)
    truth = actordbg.truth(model, {"input_ids": ids})
    norm: float | None = truth.grad_norm
    try:
        answer.raise_if_wrong()
        store.check(recording.where, model="/models/llama", packing=True).raise_if_wrong()
    except actordbg.BadResult as wrong:
        print(wrong.hint)
    except actordbg.ActordbgError as error:
        print(error.code, error.message)
    for judged in (
        store.replay(max_inputs=1), store.lint(), store.compare("last", "truth", max_abs=0.1), store.locate("last"),
        store.explain(), store.report("last", charts=False), store.noise(),
        store.matrix(attn=["sdpa", "eager"]), store.train_check(training={"steps": 4}, dry_run=True),
    ):  # fmt: skip
        print(judged.verdict, judged.sentence, judged.figures, judged.not_checked, judged.next, judged.ok, judged["good"])
    junit: str = store.check().to_junit()
    table: str = store.report("all").to_csv()
    return len(lengths) + len(dump.tensors) + len(junit) + len(table) + int(norm or 0)
