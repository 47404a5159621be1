"""Parts of the scripts that do not depend on the case, as ruff formats them."""

LOG_PROBS = '''
def log_probs(logits, row):
    """Return the log-prob of each token of a row but its first."""
    scores = logits[:-1].float().log_softmax(-1)
    return scores.gather(-1, torch.tensor(row)[1:, None]).squeeze(-1)
'''

EXPECTED = '''
def expected(model):
    """Run each row alone."""
    outputs = [model(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    return [log_probs(logits, row) for logits, row in zip(outputs, ROWS)]
'''

PACKED = """
    ids = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[at for row in ROWS for at in range(len(row))]])
    logits = model(ids, position_ids=positions, use_cache=False).logits[0]
    outputs = logits.split([len(row) for row in ROWS])
"""

BORDERS = """\
    lengths = torch.tensor([0, *[len(row) for row in ROWS]])
    ends = lengths.cumsum(0).to(torch.int32)
    index = [[number for number, row in enumerate(ROWS) for _ in row]]
    borders = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    borders["seq_idx"] = torch.tensor(index)
"""

PADDED = """
    width = max(left + len(row) for left, row in zip(LEFT, ROWS))
    right = [width - left - len(row) for left, row in zip(LEFT, ROWS)]
    ids = [[0] * a + row + [0] * b for a, row, b in zip(LEFT, ROWS, right)]
    real = [[0] * a + [1] * len(row) + [0] * b for a, row, b in zip(LEFT, ROWS, right)]
    mask = torch.tensor(real)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    given = {"attention_mask": mask, "position_ids": positions}
    logits = model(torch.tensor(ids), **given, use_cache=False).logits
    cut = zip(logits, LEFT, ROWS)
    outputs = [part[left : left + len(row)] for part, left, row in cut]
"""

TRAINERS = """\
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ROWS])
    outputs = model(ids, attention_mask=mask, return_logprobs=True)
    return [values[: len(row) - 1] for values, row in zip(outputs, ROWS)]
"""

STAND_IN = """
def stand_in():
    \"\"\"Provide what OpenRLHF imports of flash_attn, where that is not installed.\"\"\"

    def unpad_input(values, mask):
        lengths = mask.sum(-1, dtype=torch.int32)
        indices = mask.flatten().nonzero().flatten()
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return values.flatten(0, 1)[indices], indices, ends, int(lengths.max()), lengths

    def pad_input(values, indices, rows, width):
        flat = values.new_zeros((rows * width, *values.shape[1:]))
        return flat.index_copy(0, indices, values).view(rows, width, *values.shape[1:])

    names = ("", ".bert_padding", ".utils", ".utils.distributed")
    modules = {f"flash_attn{name}": types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__, module.__spec__ = [], ModuleSpec(name, None, is_package=True)
    padding = modules["flash_attn.bert_padding"]
    padding.unpad_input, padding.pad_input = unpad_input, pad_input
    padding.rearrange = rearrange
    padding.index_first_axis = lambda values, at: values[at]
    modules["flash_attn.utils.distributed"].all_gather = None
    sys.modules.update(modules)


def actor_class():
    \"\"\"Load OpenRLHF's Actor.\"\"\"
    if importlib.util.find_spec("flash_attn") is None:
        stand_in()
    from openrlhf.models import Actor

    return Actor


def actor_of(model):
    \"\"\"Build OpenRLHF's Actor around the model.\"\"\"
    model.config.use_cache = False
    actor = actor_class()(model, temperature=TEMPERATURE).eval()
    actor.packing_samples = PACKED
    return actor
"""

DRAWN = """
ROWS = [
    random.Random(row).choices(range(VOCABULARY), k=length)
    for row, length in enumerate(LENGTHS)
]
"""

ATTEMPTS = {
    "difference": """
    right = RIGHT
    pairs = zip(RUN, right)
    return [float((a - b).abs().max()) if len(b) else 0.0 for a, b in pairs]
""",
    "gradient": """
    right = build("eager", torch.float32)
    for outputs in (RUN, expected(right)):
        (-torch.cat(outputs).mean()).backward()
    pairs = zip(model.parameters(), right.parameters())
    pairs = [(a.grad, b.grad) for a, b in pairs if b.grad is not None]
    zero = [torch.zeros_like(b) if a is None else a.float() for a, b in pairs]
    norms = [float(b.norm()) for _, b in pairs]
    apart = [float((a - b).norm()) for a, (_, b) in zip(zero, pairs)]
    return [a / b for a, b in zip(apart, norms) if b > 1e-6]
""",
    "rerun": """
    once, again = RUN, RUN
    pairs = zip(once, again)
    return [float((a - b).abs().max()) if len(b) else 0.0 for a, b in pairs]
""",
}

SHARDED = '''
def sharded(model):
    """Load the model again as trainers do, under the configuration of DeepSpeed."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": STAGE},
        "bf16": {"enabled": BF16},
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = HfDeepSpeedConfig(settings)
        given = {"attn_implementation": ATTENTION, "dtype": DTYPE}
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, **given
        ).eval()
        del config
END'''

WITHOUT_ADAM = """\
    return deepspeed.initialize(model=model, config=settings)[0]
"""

WITH_ADAM = """\
    adam = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, config=settings, optimizer=adam)[0]
"""

MISSING = """\
except (ImportError, OSError) as missing:
    sys.exit(print(missing) or 2)
"""

MAIN_DIFFERENCES = """
def main():
    differences = attempt()
    wrong = [at for at, difference in enumerate(differences) if not difference <= LIMIT]
    for number in wrong if len(differences) > 8 else range(len(differences)):
        verdict = "UNIT: WRONG" if number in wrong else "UNIT: right"
        print(f"WHAT {number}: off by {differences[number]:.3g} {verdict}")
    print("expected: at most", LIMIT)
    return int(bool(wrong))
"""

MAIN_ERROR = """
def main():
    try:
        attempt()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = re.sub(r"\\d+", "N", re.sub(PATHS, "PATH", " ".join(lines[:2])))[:120]
        text = f"{type(error).__name__}: {text}"
        print(f"expected: it runs; what comes: {text}")
        if text == ERROR:
            return 1
        raise
    print("it ran, as expected")
    return 0
"""

LAUNCH = '''
def endings():
    """Start the attempt in processes of its own; return their exit codes, None: hangs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(PROCESSES):
        place = {"RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "MASTER_PORT": port}
        place |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-I", __file__, "attempt"]
        more = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | place}
        ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, **more))
    for process in ranks:  # the clock starts once all have imported what they need
        while process.stdout.readline() not in ("started\\n", ""):
            pass
    codes = []
    for process in ranks:
        try:
            codes.append(process.wait(SECONDS))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in ranks:
        process.kill()
    return codes
'''

MAIN_LAUNCHED = """
def main():
    if sys.argv[1:] == ["attempt"]:
FIRST        print("started", flush=True)
        attempt()
        return 0
    codes = endings()
    print(f"expected: exit codes of 0; what comes: {codes} (None: it hangs)")
    if SHOWN:
        return 1
    return 0 if set(codes) == {0} else 2
"""

END = """
if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # noqa: BLE001 - something else than the fault
        traceback.print_exc()
        code = 2
    sys.exit(code)
"""
