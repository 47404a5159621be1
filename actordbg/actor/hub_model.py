"""Check in seconds, before any worker starts, that the model that a configuration names is available.

The libraries that load a model request each of its files from the hub, with waits and retries, even for a cached model: without
a network that took 100 s, in every worker. So the desk looks first:

    tiny                        always: actordbg makes it
    a folder                    if it has a config.json
    an adapter's folder         if its base is available
    a name, all weights in the hub's cache  yes; neither the desk nor a worker asks the hub (`needs_no_hub`)
    any other name              if the hub answers for its config.json within `DEADLINE_S`

The cache, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, tokens and proxies are left to huggingface_hub, which sends the requests.

Example::

    config = find_model("meta-llama/Llama-3.1-8B")           # its config.json, or EnvironmentProblem with the reason
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from actordbg.base.errors import EnvironmentProblem
from actordbg.base.owners import read_owned
from actordbg.config.choices import installed_versions, is_local
from actordbg.config.replay_config import TINY
from actordbg.formats.record_reading import MOST_VALUES, strict_json

T = TypeVar("T")
TIMEOUT_S = 5.0
"""How long the hub may take for one response."""
DEADLINE_S = 12.0
"""How long all requests to the hub may take: a DNS lookup has no timeout, and a server may respond byte by byte."""
TOKENIZER = "tokenizer.json"
_CONFIG, _BASE = "config.json", "base_model_name_or_path"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
"""Which files hold the weights, where several do."""
_WAY_OUT = "name a folder with --model DIR, or download it on a machine with a network (`hf download NAME`) and copy its cache"


def looks_like_path(name: str) -> bool:
    """Return whether a model's name can only be a folder's: hub names have at most one slash."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def find_model(model: str) -> dict[str, Any] | None:
    """Return the config.json of a model (None for `tiny`); EnvironmentProblem, with the reason, if it is not available.

    Without huggingface_hub a hub name cannot be checked, so it is accepted (None): the workers will report what is missing.
    """
    base = base_of(model)
    name = base or model
    if name == TINY:
        return None
    try:
        folder = folder_of(name)
        return _find_by_name(name) if folder is None else read_config(folder, f"{name} holds no model")
    except EnvironmentProblem as problem:
        if base is None:
            raise
        hint = f"name the folder of its base as {_BASE} in {model}/adapter_config.json"
        raise EnvironmentProblem(f"{model} is an adapter, and its base is not available: {problem.message}", hint=hint) from None


def folder_of(model: str) -> Path | None:
    """Return the folder that a model's name stands for, None for a hub name; EnvironmentProblem if the path does not exist."""
    if is_local(model):
        return Path(model).expanduser()
    if looks_like_path(model):
        hint = "name a folder with a config.json, or a hub name; if the model of a replay was moved, replay again with --model"
        raise EnvironmentProblem(f"there is no model in {model}", hint=hint)
    return None


def base_of(model: str) -> str | None:
    """Return the base model of a peft adapter, for a folder that holds only the adapter; None for any other model."""
    folder = Path(model).expanduser()
    base = None if model == TINY or _has_weights(folder) else read_json(folder / "adapter_config.json").get(_BASE)
    return base if isinstance(base, str) else None


def _json_of(path: Path) -> Any:
    """Read a model's file, a link in the hub's cache too. It may have Infinity; a FIFO, or more than 64 MiB, is an OSError."""
    return strict_json(read_owned(path)[0], json.loads, MOST_VALUES)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model's file; {} if it cannot be read, since transformers cannot read it either."""
    try:
        data = _json_of(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


@functools.lru_cache(maxsize=4)
def first_letters(model: str) -> dict[int, str]:
    """Return the first letter of each token by its id, as a model's tokenizer spells it; {} without one in the folder or the
    hub's cache, and if it does not cut the text into pieces, as BPE and Unigram do.
    """
    file = Path(model).expanduser() / TOKENIZER
    path = file if file.is_file() else cached_file(model, TOKENIZER)
    made = read_json(path) if path and model else {}
    try:
        pieces = made["model"]
        if pieces["type"] not in ("BPE", "Unigram"):
            return {}
        listed = pieces["vocab"]
        ids = {piece: at for at, (piece, _) in enumerate(listed)} if isinstance(listed, list) else dict(listed)
        ids |= {token["content"]: token["id"] for token in made["added_tokens"]}
        return {at: piece[0] for piece, at in ids.items() if piece and not piece.startswith("<0x")}  # a byte of a letter
    except (LookupError, TypeError, ValueError, AttributeError):  # not as tokenizers writes it
        return {}


@functools.lru_cache(maxsize=32)
def _find_by_name(model: str) -> dict[str, Any] | None:
    """Like `find_model`, for a hub name; each is requested once, however many cells of a matrix use it."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        return None
    cached = _cached(model)
    path = _ask(model) if cached is None else cached
    return read_config(path.parent, f"the hub's {_CONFIG} of {model} is invalid")


def read_config(folder: Path, fault: str) -> dict[str, Any]:
    """Read the config.json of a model's folder; EnvironmentProblem, which begins with `fault`, if that fails."""
    path = folder / _CONFIG
    try:
        if not path.is_file():
            raise FileNotFoundError(2, f"there is no {_CONFIG}")
        config = _json_of(path)
        if not isinstance(config, dict):
            raise ValueError(config)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{path} is not a JSON object"
        raise EnvironmentProblem(f"{fault}: {reason}", hint="name a model's folder, with its config.json") from None
    return config


def needs_no_hub(model: str) -> bool:
    """Return whether a hub model is complete in the cache, weights and code, so that loading it requests nothing."""
    path = None if model == TINY or is_local(model) else _cached(model)
    return path is not None and "--" not in json.dumps(read_json(path).get("auto_map"))  # code of another repository


def _cached(model: str) -> Path | None:
    """Return the config.json of a model in the hub's cache, if all its weights lie beside it: `find_model` caches it alone."""
    path = cached_file(model, _CONFIG)
    return path if path is not None and _has_weights(path.parent) else None


def cached_file(model: str, name: str) -> Path | None:
    """Return a file of a hub model from the local cache; None if it is not there, or the name is not a valid hub name."""
    if looks_like_path(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, name)
    except (ImportError, ValueError, OSError):  # not a valid hub name
        return None
    return Path(cached) if isinstance(cached, str) else None


def _has_weights(folder: Path) -> bool:
    """Return whether all files of weights are there: a single file, or all that an index names."""
    if any((folder / name).is_file() for name in _WEIGHTS):
        return True
    for name in _INDEXES:
        with contextlib.suppress(TypeError, AttributeError):  # an invalid index names nothing
            shards = set(read_json(folder / name).get("weight_map", {}).values())
            return bool(shards) and all((folder / shard).is_file() for shard in shards)
    return False


def _config_of(model: str) -> Path | None:
    """Return the path of a model's config.json on this machine; None if a hub model is not in the cache."""
    return Path(model).expanduser() / _CONFIG if is_local(model) else cached_file(model, _CONFIG)


def safetensors_of(model: str) -> list[Path]:
    """Return the safetensors files with all weights of a model on this machine; [] if it has none, or an adapter."""
    config = _config_of(model)
    if config is None or (config.parent / "adapter_config.json").is_file():
        return []
    if (single := config.parent / _WEIGHTS[0]).is_file():
        return [single]
    shards = read_json(config.parent / _INDEXES[0]).get("weight_map", {}).values()
    return sorted({config.parent / shard for shard in shards})


def _ask(model: str) -> Path:
    """Request the model's config.json from the hub; EnvironmentProblem if that fails or misses the deadline."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    def ask() -> Path:  # the first request is not repeated, which the later ones would be
        get_hf_file_metadata(hf_hub_url(model, _CONFIG), timeout=TIMEOUT_S)
        return Path(hf_hub_download(model, _CONFIG, etag_timeout=TIMEOUT_S))

    try:
        return answered_within(DEADLINE_S, ask)
    except Exception as error:  # noqa: BLE001 - the hub's libraries raise their HTTP client's errors; all mean "no model"
        raise _problem(model, error) from None


def answered_within(seconds: float, ask: Callable[[], T]) -> T:
    """Return a server's whole answer, or raise what `ask` raises; TimeoutError later, however often a byte of it comes."""
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, name="ask-a-server", daemon=True)  # left behind if the server does not respond
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise error
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def _problem(model: str, error: Exception) -> EnvironmentProblem:
    """Explain why the model is not available, with a workaround."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    reason = " ".join((str(error) or type(error).__name__).split())[:200]
    if isinstance(error, HFValidationError):
        return EnvironmentProblem(f"{model} is neither a model folder nor a hub name: {reason}", hint=_WAY_OUT)
    if constants.HF_HUB_OFFLINE:
        return EnvironmentProblem(
            f"the model {model} is not in the hub's cache, and HF_HUB_OFFLINE is set",
            hint="download it first, or name its folder with --model DIR",
        )
    if isinstance(error, HfHubHTTPError):
        return EnvironmentProblem(
            f"the hub at {constants.ENDPOINT} did not serve model {model}: {reason}",
            hint="check its name; for a private or gated model log in (`hf auth login`), or name a folder with --model DIR",
        )
    return EnvironmentProblem(
        f"offline: cannot reach the hub at {constants.ENDPOINT} and {model} is not fully cached: {reason}",
        hint=_WAY_OUT,
    )


WEIGHTS = "weights"
WHOLE = 2**25
"""Files of a model up to this many bytes are hashed whole."""
PIECES, PIECE = 64, 2**18
"""How many pieces of a larger file are hashed, and their bytes: an update of the weights changes every piece."""
DECIDE = ("actordbg", "torch", "transformers", WEIGHTS)
"""The versions that a truth depends on."""


def versions_of(model: str) -> dict[str, str]:
    """Return the versions of the packages, and of the model's weights if they are files."""
    weights = weights_version(model)
    return installed_versions() | ({WEIGHTS: weights} if weights else {})


def weights_version(model: str) -> str | None:
    """Return the hash of a model's files, 16 hex digits; None if it has no files on this machine."""
    config = None if model == TINY else _config_of(model)
    if config is None:
        return None
    folder = config.parent
    total = hashlib.sha256()
    for path in sorted(entry for entry in folder.iterdir() if entry.is_file()):
        total.update(os.fsencode(path.name) + b"\0" + _hash(path))
    if base := base_of(model):
        total.update(str(weights_version(base)).encode())
    return total.hexdigest()[:16]


def _hash(path: Path) -> bytes:
    """Hash a file's size, modification time and content (of a large file, pieces); links are followed."""
    hasher = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        state = os.fstat(file.fileno())
        hasher.update(f"{state.st_size} {state.st_mtime_ns}".encode())
        if state.st_size <= WHOLE:
            hasher.update(file.read())
        else:
            for piece in range(PIECES):
                file.seek(piece * (state.st_size - PIECE) // (PIECES - 1))
                hasher.update(file.read(PIECE))
    return hasher.digest()
