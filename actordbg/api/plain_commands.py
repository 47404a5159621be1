"""The commands that ask nothing of a terminal but notes and consent: each is a method of a store, and the command as it stands.

Signature and docstring are the options and the help of the command line (`cli/from_signature.py`). So this module, which a
command's `--help` loads, imports little: the work is imported where it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.config.replay_config import ENDPOINT

if TYPE_CHECKING:
    from actordbg.api.client import Client
    from actordbg.api.desk import Desk
    from actordbg.document.command_result import CommandResult

TRIALS, SECONDS = 200, 300.0
"""The usual budget of a reduction."""
Trials = Annotated[int, Option(min=1, rank=5)]
Seconds = Annotated[float, Option(min=1, rank=6)]
Truth = Annotated[
    str | None, Option(metavar="fp32|fp64", help="Dtype of the truth (default: fp64 for fp32, else fp32).", kind=str | None)
]
Power = Annotated[bool, Option(help="Plant faults of several sizes in the truth and report which would be detected.", rank=30)]
Method = TypeVar("Method", bound=Callable[..., Any])


def consenting(method: Method) -> Method:
    """Let models run their own code while a method runs, if its argument `trust_remote_code` says so."""

    @functools.wraps(method)
    def called(self: PlainCommands, *given: Any, **named: Any) -> Any:
        with self.client.consent(named.get("trust_remote_code", False)):
            return method(self, *given, **named)

    return cast(Method, called)


class PlainCommands:
    """What a store can be asked as on the command line. desk: the store, its settings, and who asks."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._store = desk, desk.store

    @property
    def folder(self) -> Path:
        """The store's folder."""
        return self._store.root

    @property
    def client(self) -> Client:
        """The program or terminal that is told of progress."""
        return self._desk.client

    def _flags(self, settings: Mapping[str, Any], lists: Collection[str] = ()) -> dict[str, Any]:
        return self.client.settings(settings, lists)

    def lint(
        self, *paths: str, where: str | None = None, max_inputs: Annotated[int | None, Option(min=1)] = None,
        columns: Annotated[Sequence[str], Option("--column", kind=list[str])] = (), watch: bool = False,
    ) -> CommandResult:  # fmt: skip
        """Check recorded data against laws, without a model.

        Reads dumps, forwards and losses, and checks what must hold in every healthy run: no placeholder log-prob under the mask,
        no log-prob above 0, lengths, masks, end tokens, truncation, duplicated rows, the ratio before the first update, the
        normalization of a step. Names the first law that fails, with a public thread and the remedy. Most laws need losses:
        `dump enable --calls forward,loss`.

        Takes seconds for a thousand dumps. A dump that breaks a law is WRONG in `dump ls`, `--where` and `--lf` from then on.
        With PATH, checks the files that a run left behind, and leaves nothing in the store: rows of slime, miles, prime-rl or
        NeMo-RL, tables of rows, and logs of any trainer or tracker, whose curves are held against what a training may do (KL,
        entropy, norms, clipping, lengths, rewards, the engine's distance).

        Exit code: 1 if a law fails or nothing could be checked; 4 if no file could be read; 5 if no dump was selected.

        Example: actordbg lint --where "timestamp > now() - '2h'"

        Example: actordbg lint rollout_data/ train_data/12.pt

        Example: actordbg lint trainer_state.json

        Example: actordbg lint outputs/ --watch

        Args:
            paths (PATH): A store, or files and folders of a run (default: the store's dumps).
            max_inputs: At most N dumps, the newest.
            columns (PART=NAME): With PATH, the name of a part of a row, such as ids=input_ids, tokenizer=MODEL; repeatable.
            watch: Follow the files of a live run until Ctrl-C, with a line for each finding.
        """
        from actordbg.api.checks import linted
        from actordbg.api.following import watched
        from actordbg.api.run_files import linted_files

        if watch:
            return watched(self._desk, [Path(path) for path in paths], columns)
        if paths:
            return linted_files(self._desk, [Path(path) for path in paths], where, max_inputs, columns)
        return linted(self._desk, where, max_inputs)

    @consenting
    def explain(
        self, replay: str = "last", *, against: Literal["rollout"] | None = None,
        other_models: Annotated[Sequence[str], Option("--other-model", kind=list[str])] = (), trust_remote_code: bool = False,
    ) -> CommandResult:  # fmt: skip
        """Explain what is wrong with a replay, and since when.

        Puts together what the store knows of the replay: its model bit for bit, its modules, the laws, the ranks, and the
        log-probs against the truth and the run's own outputs. Says which tokens are wrong by the smallest rule that covers them,
        since which recorded input, what to do, what was ruled out, and what was not checked. Computes the truth and runs
        `locate` on one input if that was not done yet.

        Exit code: 1 if anything is wrong or nothing could be checked.

        Example: actordbg explain last -o why.html

        Args:
            replay (REPLAY): The replay to explain: an id, a name, `@1` or `last`.
            against: Say which side is wrong, the run or the engine's recorded log-probs (needs `dump enable --calls
                forward,loss`).
            other_models (PATH): With --against, also a model whose weights a side may have had, such as an earlier
                checkpoint; repeatable.
        """
        from actordbg.api.explaining import explained, sides_explained

        self._store.require()
        spec = self._desk.replayed(replay)
        if against is not None or spec.config.backend == ENDPOINT:
            return sides_explained(self._desk, spec, other_models, engine=against is None)
        if other_models:
            raise UsageError("--other-model needs --against", hint="add --against rollout")
        return explained(self._desk, spec)

    @consenting
    def reduce(
        self, name: str = "last", *, trials: Trials = TRIALS, seconds: Seconds = SECONDS, trust_remote_code: bool = False
    ) -> CommandResult:
        """Reduce a wrong replay to the smallest faulty case.

        Same fault: the same error, signal, hang, broken law, or module and cause. Fewer rows, tokens, layers and processes, a
        small random model instead of the checkpoint, settings back to their defaults: by bisection, then by delta debugging. Each
        trial runs in a process of its own, and the case that is reported ran again in fresh ones. The same command continues a
        stopped reduction.

        Exit code: 0 if a case of the fault was found, 1 if none could be confirmed; 5 if nothing is wrong.

        Example: actordbg reduce last --seconds 120

        Args:
            name (REPLAY|COMPARISON): What is wrong: an id, a name, `@1` or `last`.
            trials: Most trials of this call (default 200).
            seconds: Most seconds of trials of this call (default 300).
        """
        from actordbg.api.reducing import reduced, reduction_answer

        return reduction_answer(reduced(self._desk, name, trials, seconds))

    @consenting
    def repro(
        self, name: str = "last", out: Annotated[str | Path, Option("--out", "-o", kind=Path, rank=1)] = "repro.py", *,
        issue: Annotated[str | Path | None, Option(kind=Path, rank=1)] = None,
        fixed: Annotated[str | None, Option(rank=1)] = None, trials: Trials = TRIALS, seconds: Seconds = SECONDS,
        trust_remote_code: bool = False,
    ) -> CommandResult:  # fmt: skip
        """Write one script that shows the fault, without actordbg.

        The script needs torch and transformers (deepspeed or openrlhf only where the fault does). It says what is expected and
        what comes, and exits with 1 while the fault is there and with 0 when it is gone. Before success is claimed it runs once
        in a fresh interpreter. It has token ids and no text, and no path of this machine.

        Exit code: 1 if the script does not show the fault there.

        Example: actordbg repro last -o repro.py --issue issue.md

        Args:
            name (REDUCTION|REPLAY|COMPARISON): What is wrong: an id, a name, `@1` or `last`. It is reduced first, unless it
                was.
            out (FILE): The script to write (default repro.py).
            issue (FILE.md): Also write the text of an issue.
            fixed (PYTHON): Also run it with this interpreter, where the fault is gone: it must exit with 0.
            trials: Most trials of this call (default 200).
            seconds: Most seconds of trials of this call (default 300).
        """
        from actordbg.api.reducing import known_or_reduced, write_repro
        from actordbg.document.page import check_place

        check_place(Path(out))
        check_place(None if issue is None else Path(issue))
        record = known_or_reduced(self._desk, name, trials, seconds)
        return write_repro(record, Path(out), issue=None if issue is None else Path(issue), fixed=fixed)

    def bundle(
        self, *names: str, where: str | None = None,
        out: Annotated[str | Path, Option("-o", kind=Path)] = "bundle.tar.zst",
        redact: bool = False,
        keep_ids: Annotated[str | Collection[int], Option(kind=str)] = (),
        model: str | None = None,
    ) -> CommandResult:  # fmt: skip
        """Pack dumps, replays and comparisons into one archive.

        `actordbg dump import FILE` opens it, then `check` works there. It has token ids, names of models and hosts, and
        commands; no logs. --redact replaces token ids by a permutation that is not kept, and leaves out outputs, images, texts,
        and the names of runs, models and hosts.

        Exit code: 5 if nothing was selected.

        Example: actordbg bundle last -o case.tar.zst

        Args:
            names (REPLAY|COMPARISON): Also their results, and the dumps of each replay.
            out (FILE): The archive to write.
            redact: Permute token ids; keep padding and special tokens. Dumps only.
            keep_ids (ID,...): With --redact, also keep these ids.
            model (NAME|PATH): With --redact, the model whose special tokens are kept.
        """
        from actordbg.api.reducing import bundled
        from actordbg.document.page import check_place

        if (keep_ids or model) and not redact:
            raise UsageError("--keep-ids and --model are for --redact", hint="add --redact")
        if isinstance(keep_ids, str):
            keep_ids = _numbers("--keep-ids", keep_ids)
        check_place(Path(out))
        return bundled(self._store, names, where, Path(out), redact=redact, keep=keep_ids, model=model or "")

    @consenting
    def step(
        self, number: Annotated[int, Option("--step", min=0)], run: Annotated[str | None, Option("--run")] = None, *,
        trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay an optimizer step: loss, norm, known faults.

        Runs the recorded micro-batches of all ranks through forward, loss and backward: the trainer's own loss under a
        configuration, and the formula over the whole step as one batch in fp32. Names known faults: a wrong accumulation factor,
        dp_size or token count, DeepSpeed's accumulation beside the trainer's, a gradient that is lost, applied twice or clipped
        early. Needs losses (`dump enable --calls forward,loss`), and a --model with the weights of that
        step; with other weights the norm is not checked.

        Exit code: 1 if anything is wrong or was not checked.

        Example: actordbg step --step 0 --model /models/policy

        Example: actordbg step --run ppo-7b --step 12 --model ckpt/step12 --backend deepspeed --zero-stage 2 --nproc 2

        Args:
            number (N): The optimizer step, counted from 0 (`step` of a dump).
            run (NAME): The run (default: the only one with losses of that step).
        """
        from actordbg.api.replaying import replayed_step

        return replayed_step(self._desk, number, run, self._flags(settings))

    @consenting
    def build_actor(
        self, *, trust_remote_code: bool = False, batch_size: Annotated[int, Option(min=1)] = 2,
        seq_len: Annotated[int, Option(min=4)] = 128, save: Path | None = None, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Build the actor alone and run one forward.

        The input is synthetic. Prints the settings that the built actor has, which may differ from those that were requested.

        Example: actordbg actor init --backend deepspeed --zero-stage 2 --packing --backward

        Args:
            batch_size: Rows of the synthetic input.
            seq_len: Length of the synthetic input, padding included.
            save (DIR): If it ran, save the checkpoint that it was built from, with --num-layers its first layers, for --model.
        """
        from actordbg.api.replaying import built_alone

        return built_alone(self._desk, self._flags(settings), batch_size, seq_len, save)

    def turns(
        self, dump: str | None = None, *, run: str | None = None, tokenizer: str | Path | None = None, template: str | None = None
    ) -> CommandResult:
        """Check that the sampled ids are those that were trained on.

        Needs a run recorded with `run --turns`. Compares what each turn was given with the turns before it, what the rollout
        handed to the trainer with all turns, and recorded calls with that. Names the first id that differs and its kind:
        retokenized, border lost, template drops text, extra BOS, two BOS, EOS appended. --tokenizer adds the text, which some
        kinds are known by.

        --template proves that a conversation's prefix stays a prefix as turns are added, on made-up and recorded conversations.

        Exit code: 1 if ids differ or no recorded call of the training has them; 5 if no turns were recorded.

        Example: actordbg turns --run agent --tokenizer /models/qwen3

        Args:
            dump (ID): Only conversations that became rows of this dump.
            run (NAME): The run (default: the newest with recorded turns).
            template (MODEL): Judge the chat template of this model instead.
        """
        from actordbg.api.reports import texts_of
        from actordbg.recorded.chat_template import template_answer
        from actordbg.recorded.turns import trajectories_of, turns_answer

        if template is not None:
            return template_answer(template, trajectories_of(self._store, run)[0] if self._store.exists() else [])
        return turns_answer(self._store.require(), dump, run=run, decode=texts_of(tokenizer))

    def weights(self, run: Annotated[str | None, Option("--run")] = None) -> CommandResult:
        """Check that rollout engines got the weights that were sent.

        Needs a run recorded with `run --hash-weights`: each transfer of weights is hashed where it is sent, and where the
        engine's loader gets it. Names parameters that were never sent, never arrived, arrived as others, or were unknown to the
        engine, and since which step an engine has not changed. A parameter that did not move counts as right.

        Exit code: 1 if something is wrong or no engine was recorded; 5 if no transfer was recorded.

        Example: actordbg weights --run ppo-7b

        Args:
            run (NAME): The run (default: the newest with recorded transfers).
        """
        from actordbg.recorded.weight_ladder import weights_answer

        return weights_answer(self._store.require(), run)

    @staticmethod
    def compare_logs(
        logs: Annotated[Sequence[str], Option(kind=list[str])], *, each: bool = False, metric: str | None = None,
        threshold: float = 0.05, rule: str = "first-mean-last", limit: Annotated[int, Option(min=0)] = 10,
    ) -> CommandResult:  # fmt: skip
        """Compare training losses step by step.

        Reads the losses from training logs (progress bars included) and from exports of trackers. Compares any number of logs
        with the first. A relative difference is |a - b| / max(|a|, |b|). Lists the steps that reach --threshold, the largest
        difference first, and says whether the losses fall.

        Exit code: 1 if the rule is not met, a value is NaN or infinite, or the logs have fewer than three steps in common.

        Example: actordbg compare-logs deepspeed.log fsdp2.log fsdp2_tp2.log --threshold 0.05 -o losses.png

        Args:
            logs (LOG): Logs, plain or .gz; - for standard input; exports as JSON, JSON lines or CSV; TensorBoard's event
                files; trackio's database. FILE#RUN selects a run.
            each: Compare every pair of logs (default: all with the first).
            metric (NAME): Metric to compare (default: the first that both logs have of gpt_loss, loss, policy_loss,
                act_loss, actor_loss, critic_loss, loss_mean, then any other loss).
            threshold: Relative difference at which values are too far apart.
            rule (first-mean-last|every-step): Pass rule: first, mean and last value; or every step.
            limit: At most N rows; 0 for all.
        """
        from actordbg.document.command_result import CommandResult
        from actordbg.measure.align_logs import compare_many, together
        from actordbg.measure.log_document import log_charts, logs_page
        from actordbg.measure.log_lines import read_log

        if len(logs) < 2:
            raise UsageError("compare-logs needs at least two logs", hint="name two or more")
        if list(logs).count("-") > 1:
            raise UsageError("standard input can be only one of the logs", hint="pass - once, and files for the others")
        read = [read_log(path, metric) for path in logs]
        pairs = compare_many(read, each=each, metric=metric, threshold=threshold, rule=rule, limit=limit)
        whole = together(pairs)
        data = vars(pairs[0] if len(logs) == 2 else whole)
        return CommandResult(whole.good, data, logs_page(pairs), logs_page(pairs, log_charts(pairs, read)))


def _numbers(option: str, text: str) -> set[int]:
    """Parse `0,1,2`. Raises UsageError."""
    try:
        return {int(word) for word in text.split(",") if word}
    except ValueError:
        raise UsageError(f"{option} {text!r:.80} are not numbers", hint="use ids, such as 0,1,2") from None
