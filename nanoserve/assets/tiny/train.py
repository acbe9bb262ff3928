"""Train the embedded checkpoint: a small, real Qwen3 on the Python standard library.

    python -m nanoserve.assets.tiny.train --out DIR --minutes 5                          # one GPU
    python -m nanoserve.assets.tiny.train --out DIR --minutes 1 --batch-tokens 2048 --seq-len 256   # CPU smoke run
    python -m nanoserve.assets.tiny.train --out DIR --evaluate                           # measure what is in DIR

The file reads in the order things happen: corpus → tokenizer → training rows → model and optimiser → loop → measures.
`corpus_files("train" | "heldout")` is the public part: importing this module costs nothing (torch, transformers and
tokenizers are imported where they are used), and the held-out files are never seen by the model or by its tokenizer.
"""

from __future__ import annotations

import argparse
import ast
import codeop
import hashlib
import json
import math
import random
import re
import sys
import sysconfig
import time
import tokenize
from pathlib import Path
from typing import Literal

# ── corpus ────────────────────────────────────────────────────────────────────────────────────────────────────────────

HELDOUT_PERCENT = 4
# Tests and their data, tables that a generator wrote, documentation, and whatever is not the standard library itself.
SKIPPED_DIRS = {
    "test", "tests", "idle_test", "idlelib", "pydoc_data", "encodings", "lib-dynload",
    "site-packages", "dist-packages", "__pycache__", "__phello__",
}  # fmt: skip
SKIPPED_FILES = re.compile(
    r"(^|/)(_sysconfigdata.*|sitecustomize|usercustomize)\.py$|^(html/entities|locale)\.py$|^config-"
)


def split_of(relpath: str) -> Literal["train", "heldout"]:
    """The split depends on the path alone, so it is the same on every machine and for every Python version."""
    digest = hashlib.sha256(f"tiny:{relpath}".encode()).hexdigest()
    return "heldout" if int(digest[:8], 16) % 100 < HELDOUT_PERCENT else "train"


def corpus_files(split: Literal["train", "heldout"], stdlib: str | Path | None = None) -> list[tuple[str, str]]:
    """`(path relative to the standard library, source without docstrings)` of the split's files, sorted by path."""
    root = Path(stdlib or sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relpath = path.relative_to(root).as_posix()
        if SKIPPED_DIRS.intersection(relpath.split("/")[:-1]) or SKIPPED_FILES.search(relpath):
            continue
        if split_of(relpath) != split:
            continue
        try:
            with tokenize.open(path) as file:
                text = without_docstrings(file.read())
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text.strip():
            files.append((relpath, text))
    return files


def without_docstrings(source: str) -> str:
    """Cut docstrings out by position, so that comments and formatting stay; an emptied body becomes `pass`."""
    lines = source.encode().splitlines(keepends=True)  # ast columns count UTF-8 bytes
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
            continue
        doc = node.body[0]
        if not (isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)):
            continue
        assert doc.end_lineno is not None
        first, last = doc.lineno - 1, doc.end_lineno - 1
        head, tail = lines[first][: doc.col_offset], lines[last][doc.end_col_offset :]
        only = len(node.body) == 1 and not isinstance(node, ast.Module)
        for i in range(first, last + 1):  # emptied, not deleted: the line numbers of later docstrings stay right
            lines[i] = b""
        if only or head.strip() or tail.lstrip().startswith((b";", b"#", b"\\")):
            lines[first] = head + b"pass" + tail
        elif last + 1 < len(lines) and not lines[last + 1].strip():
            lines[last + 1] = b""
    text = b"".join(lines).decode().lstrip("\n")
    ast.parse(text)
    return text


# ── tokenizer ─────────────────────────────────────────────────────────────────────────────────────────────────────────

VOCAB_SIZE = 4096
EOT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Qwen3's added tokens in Qwen3's order, at the end of the vocabulary as there; the flag says "special".
ADDED_TOKENS = [
    (EOT, True), (IM_START, True), (IM_END, True),
    ("<|object_ref_start|>", True), ("<|object_ref_end|>", True), ("<|box_start|>", True), ("<|box_end|>", True),
    ("<|quad_start|>", True), ("<|quad_end|>", True), ("<|vision_start|>", True), ("<|vision_end|>", True),
    ("<|vision_pad|>", True), ("<|image_pad|>", True), ("<|video_pad|>", True),
    ("<tool_call>", False), ("</tool_call>", False), ("<|fim_prefix|>", False), ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False), ("<|fim_pad|>", False), ("<|repo_name|>", False), ("<|file_sep|>", False),
    ("<tool_response>", False), ("</tool_response>", False), ("<think>", False), ("</think>", False),
]  # fmt: skip
# Qwen's pattern less two habits that hurt a small code model: English contractions ("'s" splits 'self'), and newlines
# glued to punctuation (":\n" as one token would leave a prompt that ends in ":" without a likely next token).
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def train_tokenizer(texts: list[str]):
    """A byte-level BPE of exactly `VOCAB_SIZE` entries, added tokens included."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in ADDED_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def save_tokenizer(tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": EOT,
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


# ── training rows ─────────────────────────────────────────────────────────────────────────────────────────────────────

CHAT_SHARE = 0.12
ASKS = [
    "Complete this function:\n\n{sig}",
    "Complete this function:\n\n{sig}",
    "{sig}",
    "Write this Python function:\n\n{sig}",
    "Write a Python function called {name}.",
    "Write a function {name} in Python",
]
# The only text that is not from the standard library: what the model says when it is not asked for a function.
INTRODUCTION = "I am a very small language model that completes Python code. Send me the first line of a function."
SMALL_TALK = ["Hi", "Hello", "Hello!", "Hey there", "Who are you?", "What can you do?", "Help", "How are you?"]


def pieces_of(text: str) -> list[str]:
    """The file cut where a top-level def, class or import begins: the places where a training row may start."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    cuts = {0}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            cuts.add(min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and node.col_offset == 0:
            cuts.add(node.lineno - 1)
    edges = [*sorted(cuts), len(lines)]
    return ["".join(lines[a:b]) for a, b in zip(edges, edges[1:], strict=False) if a < b]


def functions_of(text: str) -> list[tuple[str, str, str, bool]]:
    """`(name, signature, whole source, is a method)` of every function, methods moved to the left margin."""
    lines, found = text.splitlines(), []
    tree = ast.parse(text)
    methods = {m for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for m in c.body}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.body[0].lineno == node.lineno:
            continue
        if node.col_offset and node not in methods:
            continue
        body, indent = lines[node.lineno - 1 : node.end_lineno], " " * node.col_offset
        if any(line.strip() and not line.startswith(indent) for line in body):  # a string that ignores indentation
            continue
        body = [line[len(indent) :] for line in body]
        head = body[: node.body[0].lineno - node.lineno]
        while head and (not head[-1].strip() or head[-1].lstrip().startswith("#")):
            head.pop()
        if head and head[-1].endswith(":"):
            found.append((node.name, "\n".join(head), "\n".join(body), node in methods))
    return found


def chat_text(user: str, assistant: str, think: bool) -> str:
    """One exchange; `think` writes the empty block that `enable_thinking=False` puts before an answer."""
    block = "<think>\n\n</think>\n\n" if think else ""
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{block}{assistant}{IM_END}\n"


class Corpus:
    """Token ids of the training files, and a differently arranged stream of them for every epoch."""

    def __init__(self, files: list[tuple[str, str]], tokenizer, rng: random.Random):
        import numpy as np

        def encode(texts):
            return [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]

        self.rng = rng
        self.eot = np.array([tokenizer.token_to_id(EOT)])
        self.files = [encode(pieces_of(text)) for _, text in files]
        functions = [function for _, text in files for function in functions_of(text)]
        self.methods = encode([source + "\n\n\n" for _, _, source, is_method in functions if is_method])
        chats = []
        for name, sig, source, _ in functions:
            if source.count("\n") <= 40:
                for think in (False, True):
                    chats.append(chat_text(rng.choice(ASKS).format(name=name, sig=sig), source, think))
        talk = [chat_text(ask, INTRODUCTION, think) for ask in SMALL_TALK for think in (False, True)]
        self.chats, self.talk = encode(chats), encode(talk)
        self.tokens = sum(len(piece) for file in self.files for piece in file)

    def stream(self):
        """One epoch: `ids [n]` and `starts [m]`, the sorted offsets at which a training row may begin."""
        import numpy as np

        docs = list(self.files)
        # A quarter of the methods appear again as plain functions, in documents of eight.
        methods = self.rng.sample(self.methods, len(self.methods) // 4)
        docs += [methods[i : i + 8] for i in range(0, len(methods), 8)]
        budget = CHAT_SHARE * self.tokens
        while budget > 0:
            turns = self.rng.sample(self.chats, self.rng.choice((1, 1, 1, 2, 3)))
            if self.rng.random() < 0.05:
                turns.insert(0, self.rng.choice(self.talk))
            docs.append([np.concatenate(turns)])
            budget -= len(docs[-1][0])
        self.rng.shuffle(docs)
        parts = [part for doc in docs for part in (*doc, self.eot)]
        offsets = np.cumsum([0, *map(len, parts[:-1])])
        starts = offsets[[len(part) > 1 for part in parts]]
        return np.concatenate(parts), starts

    def rows(self, seq_len: int):
        """One epoch as `[rows, seq_len + 1]` ids. A row starts at the last possible start inside the row before it."""
        import numpy as np

        ids, starts = self.stream()
        at, begins = 0, []
        while at + seq_len + 1 <= len(ids):
            begins.append(at)
            last = int(starts[np.searchsorted(starts, at + seq_len, side="right") - 1])
            at = last if last > at + seq_len // 2 else at + seq_len
        self.rng.shuffle(begins)
        return ids[np.array(begins)[:, None] + np.arange(seq_len + 1)]


# ── model and optimiser ───────────────────────────────────────────────────────────────────────────────────────────────

MAX_POSITIONS = 4096


def model_config(tokenizer) -> dict:
    """config.json as Qwen3 checkpoints write it. `rope_theta` stands where version 4 and version 5 readers look."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 6,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id(EOT),
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "torch_dtype": "bfloat16",
    }


def add_dropout(model, p: float) -> None:
    """Dropout on what every block adds to the residual stream (Qwen3 has none; this corpus is read many times)."""
    from torch.nn.functional import dropout

    def hook(module, _, output):
        return dropout(output, p, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(hook)
        layer.mlp.down_proj.register_forward_hook(hook)


class Muon:
    """Muon (Jordan et al. 2024): momentum, orthogonalised by Newton-Schulz. Equal shapes are stacked: few launches."""

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.95):
        import torch

        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        shapes: dict[tuple, list] = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros_like(torch.stack([p.data for p in ps]))) for ps in shapes.values()]

    def step(self, scale: float) -> None:
        """Update in place with learning rate `lr * scale`."""
        import torch

        lr = self.lr * scale
        with torch.no_grad():
            for params, velocity in self.groups:
                grad = torch.stack([p.grad for p in params])  # [n, rows, columns]
                velocity.lerp_(grad, 1 - self.momentum)
                update = self.orthogonalise(grad.lerp(velocity, self.momentum))
                rows, columns = update.shape[1:]
                update = update.to(grad.dtype) * (lr * max(1, rows / columns) ** 0.5)
                torch._foreach_mul_(params, 1 - lr * self.weight_decay)
                torch._foreach_sub_(params, list(update.unbind()))

    @staticmethod
    def orthogonalise(x):
        wide = x.bfloat16() if x.shape[1] <= x.shape[2] else x.bfloat16().mT
        wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = wide @ wide.mT
            wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
        return wide if x.shape[1] <= x.shape[2] else wide.mT


# ── loop ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(args: argparse.Namespace) -> dict:
    import torch
    import transformers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out, rng = Path(args.out), random.Random(args.seed)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    files = corpus_files("train", args.stdlib)
    tokenizer = train_tokenizer([text for _, text in files])
    save_tokenizer(tokenizer, out)
    corpus = Corpus(files, tokenizer, rng)
    heldout = corpus_files("heldout", args.stdlib)
    config = model_config(tokenizer)
    model = Qwen3ForCausalLM(Qwen3Config(**config))  # fp32 master weights; sdpa attention is the default
    model.to(device=device, dtype=torch.float32)  # type: ignore
    add_dropout(model, args.dropout)
    parameters = sum(p.numel() for p in model.parameters())
    size = sum(len(text.encode()) for _, text in files)
    print(f"train {len(files)} files, {size:,} bytes, {corpus.tokens:,} tokens; held out {len(heldout)} files")
    print(f"{len(corpus.chats):,} chats; {parameters:,} parameters", flush=True)

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, args.lr, args.weight_decay)
    adam = torch.optim.AdamW(others, lr=0.1 * args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay,
                             fused=device == "cuda")  # fmt: skip

    def loss_of(rows):
        """Mean cross entropy of `rows [batch, seq_len + 1]`."""
        # The explicit mask mapping keeps transformers from building a dense mask: plain causal attention.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(rows[:, :-1], attention_mask={"full_attention": None}, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    # The last part of the run reads rows four times as long, so that the whole context is in distribution.
    short, long = args.seq_len, min(4 * args.seq_len, MAX_POSITIONS)
    step_loss = loss_of
    if device == "cuda":
        compiled = torch.compile(loss_of, dynamic=False)
        try:
            for seq_len in (short, long):
                rows = torch.zeros(args.batch_tokens // seq_len, seq_len + 1, dtype=torch.long, device=device)
                compiled(rows).backward()
            step_loss = compiled
        except Exception as error:  # a machine without a C compiler still trains, more slowly
            print(f"torch.compile does not work here, running eagerly: {type(error).__name__}: {str(error)[:300]}")
        model.zero_grad(set_to_none=True)

    curve, best, best_state = [], math.inf, None
    seen, step, progress, next_eval, losses = 0, 0, 0.0, 0.05, []
    goal = args.epochs * len(corpus.rows(short)) * short
    began = time.monotonic()
    while progress < 1:
        seq_len = short if progress < 0.85 else long
        batch = args.batch_tokens // seq_len
        for rows in torch.from_numpy(corpus.rows(seq_len)).to(device).split(batch):
            if len(rows) < batch:
                break
            loss = step_loss(rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            scale = min(1.0, (step + 1) / args.warmup) * (1 - progress)  # warm-up, then linear to zero
            for group in adam.param_groups:
                group["lr"] = 0.1 * args.lr * scale
            adam.step()
            muon.step(scale)
            model.zero_grad(set_to_none=True)
            step, seen = step + 1, seen + batch * seq_len
            losses.append(loss.detach())
            if step % 8 == 0 or device == "cpu":
                losses[-1].item()  # keeps the host from running ahead of the clock
            progress = min(1.0, max((time.monotonic() - began) / (60 * args.minutes), seen / goal))
            if progress >= min(next_eval, 1.0):
                next_eval += 0.05
                measured = perplexity(model, tokenizer, heldout, device)
                point = {"step": step, "tokens": seen, "epochs": round(args.epochs * seen / goal, 2),
                         "seconds": round(time.monotonic() - began, 1), "seq_len": seq_len,
                         "train_loss": round(torch.stack(losses).mean().item(), 4),
                         "heldout_loss": round(measured["loss"], 4)}  # fmt: skip
                curve.append(point)
                losses = []
                print(json.dumps(point), flush=True)
                if measured["loss"] < best:
                    best, best_state = measured["loss"], {k: v.clone() for k, v in model.state_dict().items()}
            if progress >= 1:
                break

    model.load_state_dict(best_state)  # type: ignore[arg-type]
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore
    write_json(out / "config.json", config)
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(EOT)]
    write_json(out / "generation_config.json",
               {"bos_token_id": ends[1], "eos_token_id": ends, "pad_token_id": ends[1]})  # fmt: skip
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    hardware = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"hardware": hardware, "versions": versions, "parameters": parameters, "train_files": len(files),
            "train_bytes": size, "train_tokens": corpus.tokens,
            "heldout_files": len(heldout), "arguments": vars(args), "curve": curve}  # fmt: skip


# ── measures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def perplexity(model, tokenizer, files: list[tuple[str, str]], device: str, window: int = 1024) -> dict:
    """Teacher-forced loss over `files`, each ended by <|endoftext|>, in windows of `window` tokens that do not overlap.

    Every token but the first of each file is scored. `loss` is in nats per token, `bits_per_byte` counts UTF-8 bytes.
    """
    import torch

    inputs, targets = [], []
    for _, text in files:
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id(EOT)]
        for at in range(0, len(ids) - 1, window):
            row = ids[at : at + window + 1]
            padding = window + 1 - len(row)  # on the right, where causal attention never looks back from
            inputs.append(row[:-1] + [0] * padding)
            targets.append(row[1:] + [-100] * padding)
    tokens = sum(target != -100 for row in targets for target in row)
    count = sum(len(text.encode()) for _, text in files)
    was_training, total = model.training, 0.0
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for at in range(0, len(inputs), 8):
            x, y = torch.tensor(inputs[at : at + 8], device=device), torch.tensor(targets[at : at + 8], device=device)
            logits = model(x, attention_mask={"full_attention": None}, use_cache=False).logits
            total += torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
            ).item()
    model.train(was_training)
    return {"loss": total / tokens, "token_perplexity": math.exp(total / tokens), "tokens": tokens, "bytes": count,
            "byte_perplexity": math.exp(total / count), "bits_per_byte": total / count / math.log(2)}  # fmt: skip


def parses(text: str) -> bool:
    """Whether the complete lines of `text` are valid Python so far, with at least one statement under the prompt.

    The last line is dropped (the token budget cut it). A syntax error in what is left fails; a statement that is
    merely unfinished (an open bracket, a `try` whose `except` is to come) is trimmed from the end.
    """
    lines = text.split("\n")[:-1]
    try:
        codeop.compile_command("\n".join(lines), symbol="exec")
    except (SyntaxError, ValueError, OverflowError):
        return False
    while len(lines) > 1:
        try:
            ast.parse("\n".join(lines))
            return True
        except SyntaxError:
            lines.pop()
    return False


def heldout_signatures(stdlib: str | None, count: int = 50) -> list[str]:
    """One-line signatures of held-out functions, none of which occurs in the training files, in a fixed order."""
    known = {sig for _, text in corpus_files("train", stdlib) for _, sig, _, _ in functions_of(text)}
    sigs = {sig for _, text in corpus_files("heldout", stdlib) for _, sig, _, _ in functions_of(text)}
    fresh = [sig for sig in sigs - known if "\n" not in sig]
    return sorted(fresh, key=lambda sig: hashlib.sha256(sig.encode()).hexdigest())[:count]


def complete(model, tokenizer, prompts: list[str], temperature: float, tokens: int = 96) -> list[str]:
    """The continuations, as one left-padded batch; what comes after an end-of-text token is cut."""
    import torch

    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(EOT)]
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    width = max(map(len, encoded))
    ids = torch.tensor([[ends[1]] * (width - len(e)) + e for e in encoded], device=model.device)
    mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded], device=model.device)
    options = {"max_new_tokens": tokens, "eos_token_id": ends, "pad_token_id": ends[1], "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    full = model.generate(ids, attention_mask=mask, **options)
    texts = []
    for row in full[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), None)
        texts.append(tokenizer.decode(row[:end]) + ("\n" if end is not None else ""))
    return texts


def evaluate(args: argparse.Namespace) -> dict:
    """Measure the checkpoint in `--out`, in fp32, through plain `transformers`."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(Path(args.out) / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    result: dict = {"heldout": perplexity(model, tokenizer, corpus_files("heldout", args.stdlib), "cpu")}
    signatures = heldout_signatures(args.stdlib)
    samples = ["def read_json(path):", "import json", "class Stack:", "def fibonacci(n):"]
    for temperature in (0.0, 0.6):
        torch.manual_seed(args.seed)
        texts = complete(model, tokenizer, signatures, temperature)
        good = sum(parses(prompt + text) for prompt, text in zip(signatures, texts, strict=True))
        result[f"parse_share_t{temperature}"] = f"{good}/{len(signatures)}"
        texts = complete(model, tokenizer, samples, temperature)
        result[f"samples_t{temperature}"] = dict(zip(samples, texts, strict=True))
    return result


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    option = parser.add_argument
    option("--out", required=True, help="folder for the checkpoint")
    option("--evaluate", action="store_true", help="do not train, only measure the checkpoint in --out")
    option("--minutes", type=float, default=5, help="training ends after this time, compilation not counted")
    option("--epochs", type=float, default=40, help="… or after this many passes, whichever is first")
    option("--batch-tokens", type=int, default=32768, help="tokens per step")
    option("--seq-len", type=int, default=1024, help="row length; the last 15 %% of a run reads rows 4 × as long")
    option("--lr", type=float, default=0.02, help="peak learning rate of Muon; AdamW (embedding, norms) uses a tenth")
    option("--weight-decay", type=float, default=0.5, help="the setting that mattered most: see README.md")
    option("--dropout", type=float, default=0.2, help="on the residual branches, in training only")
    option("--warmup", type=int, default=50, help="warm-up steps")
    option("--seed", type=int, default=0)
    option("--device", help="default: cuda if there is one")
    option("--stdlib", help="standard library to read; default: that of the running Python")
    args = parser.parse_args()
    if args.evaluate:
        write_json(Path(args.out) / "evaluation.json", evaluate(args))
    else:
        write_json(Path(args.out) / "training.json", train(args))


if __name__ == "__main__":
    main()
