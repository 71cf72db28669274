"""Trains the demo checkpoint on one GPU against the clock; the best weights so far are always on disk.

    python train.py --seconds 450 --out out     # one H200; --device cpu --tiny checks the script

Workers generate conversations without end; a pool on the device holds the newest ones in three length
buckets, and each step draws rows of every bucket. Loss counts assistant tokens (and, lightly and only in
the first half, all others, which helps the copying heads form).
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import threading
import time
from pathlib import Path

START = time.time()
HERE = Path(__file__).parent
SUPERVISED = 1024  # added to the id of a token that counts in the loss; ids stay below it
BUCKETS = {160: 256, 384: 96, 704: 64}  # row length -> rows a step
BUCKET_WEIGHT = {160: 0.3, 384: 0.3, 704: 0.4}
POOL_TOKENS = 400_000_000  # a bucket


def tokens_with_marks(ids, special):
    """Ids with SUPERVISED added from the first token of each assistant turn to its <|im_end|>."""
    start, end, assistant = special
    inside, out = False, list(ids)
    for i, token in enumerate(ids):
        if i >= 3 and ids[i - 3] == start and ids[i - 2] == assistant:
            inside = True
        if inside:
            out[i] += SUPERVISED
        if token == end:
            inside = False
    return out


def generate_forever(seed, queue, rows_a_parcel):
    """A worker: parcels of (row length, rows) without end."""
    import numpy
    from tokenizers import Tokenizer

    import generate_data

    os.nice(5)
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    special = [tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "assistant")]
    waiting = {length: [] for length in BUCKETS}
    while True:
        texts = [generate_data.render(rng.choice([generate_data.chat, generate_data.recall_chat])(rng)) for _ in range(256)]
        for encoding in tokenizer.encode_batch(texts):
            length = next((n for n in BUCKETS if n >= len(encoding.ids)), None)
            if length:
                waiting[length].append(tokens_with_marks(encoding.ids, special))
        for length, rows in waiting.items():
            if len(rows) >= rows_a_parcel:
                parcel = numpy.zeros((len(rows), length), dtype=numpy.int16)
                for i, row in enumerate(rows):
                    parcel[i, : len(row)] = row
                queue.put((length, parcel))
                waiting[length] = []


class Pool:
    """The newest rows of each bucket, on the device; a thread keeps filling it."""

    def __init__(self, device, workers, rows_a_parcel, tokens):
        import torch
        self.torch, self.device = torch, device
        self.rows = {n: torch.zeros(tokens // n, n, dtype=torch.int16, device=device) for n in BUCKETS}
        self.filled, self.next, self.total = ({n: 0 for n in BUCKETS} for _ in range(3))
        self.filling = threading.Lock()
        self.queue = multiprocessing.Queue(maxsize=4 * workers)
        self.workers = [multiprocessing.Process(target=generate_forever, args=(1000 + i, self.queue, rows_a_parcel), daemon=True)
                        for i in range(workers)]
        for worker in self.workers:
            worker.start()

    def start_filling(self):
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self):
        while True:
            length, parcel = self.queue.get()
            store, at = self.rows[length], self.next[length]
            count = min(len(parcel), len(store) - at)
            with self.filling:
                store[at : at + count] = self.torch.from_numpy(parcel[:count]).to(self.device)
            self.next[length] = (at + count) % len(store)
            self.filled[length] = max(self.filled[length], at + count)
            self.total[length] += count

    def draw(self, length, count):
        rows = self.torch.randint(self.filled[length], (count,), device=self.device)
        return self.rows[length][rows].long()


def evaluate(torch, qwen3, weights, questions, tables):
    """Exact match of greedy decoding: it holds iff every answer token is the arg max after its true predecessors.

    Returns (exact matches per kind, the smallest gap between first and second logit on right answers)."""
    right, smallest_gap = {}, math.inf
    with torch.no_grad():
        for at in range(0, len(questions), 125):
            part = questions[at : at + 125]
            ids = torch.zeros(len(part), max(len(q["ids"]) for q in part), dtype=torch.long)
            for i, q in enumerate(part):
                ids[i, : len(q["ids"])] = torch.tensor(q["ids"])
            ids = ids.to(tables[0].device)
            x = qwen3.trunk(weights, ids, tables)
            scores = qwen3.logits(x, weights["model.norm.weight"], weights["model.embed_tokens.weight"])
            top = scores.topk(2).values
            hit, gap = (scores.argmax(-1)[:, :-1] == ids[:, 1:]).cpu(), (top[..., 0] - top[..., 1]).cpu()
            for i, q in enumerate(part):
                span = slice(q["prompt"] - 1, len(q["ids"]) - 1)
                exact = bool(hit[i, span].all())
                right.setdefault(q["kind"], []).append(exact)
                if exact:
                    smallest_gap = min(smallest_gap, float(gap[i, span].min()))
    return {kind: (sum(v), len(v)) for kind, v in right.items()}, smallest_gap


def load_questions(tokenizer):
    import generate_data
    questions = []
    for line in open(HERE / "questions.jsonl"):
        q = json.loads(line)
        prompt = tokenizer.encode(generate_data.render(q["messages"], generate=True)).ids
        answer = tokenizer.encode(q["answer"] + "<|im_end|>").ids
        questions.append({"kind": q["kind"], "ids": prompt + answer, "prompt": len(prompt)})
    return questions


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=480, help="wall clock from process start to the last save")
    parser.add_argument("--out", default="out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=11)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--eval-seconds", type=float, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where a step's device time goes, at the end")
    parser.add_argument("--no-graph", action="store_true", help="launch every kernel of a step by itself")
    parser.add_argument("--tiny", action="store_true", help="small batches and no compile, to check the script")
    args = parser.parse_args()
    if args.tiny:
        BUCKETS.update({160: 4, 384: 2, 704: 1})
    multiprocessing.set_start_method("spawn")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer

    import qwen3

    pool = Pool(args.device, args.workers, 16 if args.tiny else 256, 2_000_000 if args.tiny else POOL_TOKENS)
    pool.start_filling()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HERE / name, args.out)
    log_file = open(Path(args.out) / "train_log.txt", "w")

    def log(text):
        print(text := f"{time.time() - START:6.1f}s {text}", flush=True)
        print(text, file=log_file, flush=True)

    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    weights = qwen3.initial_weights(args.device, args.seed)
    averaged = {name: w.detach().clone() for name, w in weights.items()}
    log(f"{sum(w.numel() for w in weights.values())} parameters; {json.dumps(vars(args))}")
    questions = load_questions(Tokenizer.from_file(str(HERE / "tokenizer.json")))
    tables = qwen3.rope_tables(1024, args.device)
    compiled = (lambda f: f) if args.tiny else (lambda f: torch.compile(f, dynamic=False))
    run_block, run_embed = compiled(qwen3.block), compiled(qwen3.embed)

    @compiled
    def loss_of(x, norm, embedding, target, unsupervised_weight):
        supervised = (target >= SUPERVISED).float()
        label = target % SUPERVISED
        share = supervised + unsupervised_weight * (1 - supervised) * (label != 0)
        losses = F.cross_entropy(qwen3.logits(x, norm, embedding).flatten(0, 1), label.flatten(), reduction="none")
        return (losses * share.flatten()).sum() / supervised.sum()

    matrices = [w for n, w in weights.items() if w.dim() == 2 and "embed" not in n]
    others = [w for n, w in weights.items() if w.dim() == 1 or "embed" in n]
    on_gpu = args.device == "cuda"
    rate = torch.tensor(args.lr, device=args.device)
    unsupervised = torch.tensor(0.1, device=args.device)
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=rate, betas=(0.9, 0.98), eps=1e-9, fused=on_gpu, capturable=on_gpu)
    everything, averages = list(weights.values()), list(averaged.values())
    batch = {n: torch.zeros(count, n, dtype=torch.long, device=args.device) for n, count in BUCKETS.items()}
    seen = {n: torch.zeros((), device=args.device) for n in BUCKETS}

    def train_step():
        """One update from the rows in `batch`; reads and writes only fixed buffers, so it can be a CUDA graph."""
        for length, rows in batch.items():
            x = qwen3.trunk(weights, rows[:, :-1] % SUPERVISED, tables, run_block, run_embed)
            loss = loss_of(x, weights["model.norm.weight"], weights["model.embed_tokens.weight"], rows[:, 1:], unsupervised)
            (loss * BUCKET_WEIGHT[length]).backward()
            seen[length].add_(loss.detach())
        torch.nn.utils.clip_grad_norm_(everything, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def draw_batch():
        for length, rows in batch.items():
            rows.copy_(pool.draw(length, BUCKETS[length]))

    def as_graph():
        """Captures train_step: its thousands of small kernels then cost one launch."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        rate.fill_(1e-5)
        with torch.cuda.stream(side):
            for _ in range(3):
                draw_batch()
                train_step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pool.filling, torch.cuda.graph(graph):
            train_step()
        return graph.replay

    while min(pool.filled.values()) < (8 if args.tiny else 2000):
        time.sleep(0.1)
        assert all(w.is_alive() for w in pool.workers), "a data worker died"
    log(f"pool {pool.filled}")

    run_step = as_graph() if on_gpu and not args.no_graph else train_step
    log("ready to train")
    step, best, last_eval, first_step, since, since_time = 0, -1, time.time(), time.time(), 0, time.time()
    total = args.seconds - (first_step - START) - 8  # the last seconds are for the last evaluation and save

    def report(text):
        nonlocal since, since_time
        losses = " ".join(f"{n}:{float(v) / max(since, 1):.5f}" for n, v in seen.items())
        log(f"step {step} done {done:.2f} {(time.time() - since_time) / max(since, 1) * 1e3:.1f} ms/step loss {losses} {text}")
        for value in seen.values():
            value.zero_()
        since, since_time = 0, time.time()

    while True:
        done = (time.time() - first_step) / total
        finished = done >= 1
        if finished or time.time() - last_eval > args.eval_seconds:
            scores, gap = evaluate(torch, qwen3, averaged, questions, tables)
            right = sum(r for r, _ in scores.values())
            report(f"right {right} {scores} smallest gap {gap:.3f} pool {pool.total}")
            if right >= best:
                best = right
                qwen3.export(averaged, args.out)
            last_eval = since_time = time.time()
            if finished:
                break
        rate.fill_(args.lr * min(1, (step + 1) / 300) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * min(done, 1)))))
        unsupervised.fill_(0.1 * max(0.0, 1 - 2 * done))
        draw_batch()
        run_step()
        step, since = step + 1, since + 1
        torch._foreach_lerp_(averages, [w.detach() for w in everything], 1 - min(0.998, step / (step + 20)))
        if on_gpu and step % 8 == 0:
            torch.cuda.synchronize()  # so the clock above is not ahead of the device
        if step in (10, 100, 200, 400) or step % 1000 == 0:
            report("")
    if args.profile:
        with torch.profiler.profile() as profile:
            for _ in range(3):
                run_step()
            torch.cuda.synchronize()
        log(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=80))
    for worker in pool.workers:
        worker.terminate()
    log(f"best {best} of {len(questions)}, {step} steps")


if __name__ == "__main__":
    main()
    os._exit(0)  # the filling thread may sit in a queue read
