"""Shared by the trainers of the demo checkpoints: endless conversations, the clock, evaluation, the best weights on disk.

Workers generate conversations; a pool on the device holds the newest ones in three length buckets, and each
step draws rows of every bucket. Loss counts assistant tokens (and, lightly and only in the first half, all
others, which helps the copying heads form).

A trainer hands `train` a subject:

    weights                      name -> f32 leaf tensor, trained by AdamW
    state                        name -> f32 tensor that `after_update` changes; averaged like the weights
    compile(compiled)            makes what `loss` runs
    loss(rows, unsupervised)     of token rows with marks [rows, length]; fixed buffers only, so it can be captured
    after_update()               after the optimizer's step, captured too
    progress(done)               share of the elapsed time, before each step; not captured
    evaluate(averaged, questions) -> (tuple to compare by, text)
    statistics()                 text for the log, of the steps since the previous call
    export(averaged, folder)
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

START = time.time()
HERE = Path(__file__).parent
SUPERVISED = 1024  # added to the id of a token that counts in the loss; ids stay below it
BUCKETS = {160: 256, 384: 96, 704: 64}  # row length -> rows per step
TINY_BUCKETS = {160: 4, 384: 2, 704: 1}
BUCKET_WEIGHT = {160: 0.3, 384: 0.3, 704: 0.4}
POOL_TOKENS = 400_000_000  # tokens per bucket


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
    """A worker process that generates batches of (row length, rows) without end."""
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
    """Pool of the newest rows of each length bucket on the device; a thread adds new rows continuously."""

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

    def stop(self):
        for worker in self.workers:
            worker.terminate()


def weighted_loss(logits, target, unsupervised_weight):
    """Cross entropy of supervised targets, and with a low weight of other targets except padding, per supervised target."""
    import torch.nn.functional as F

    supervised = (target >= SUPERVISED).float()
    label = target % SUPERVISED
    share = supervised + unsupervised_weight * (1 - supervised) * (label != 0)
    losses = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
    return (losses * share.flatten()).sum() / supervised.sum()


def batches(questions, device, size=125):
    """Questions followed by their correct answers, as rows of ids padded at the end."""
    import torch
    for at in range(0, len(questions), size):
        part = questions[at : at + size]
        ids = torch.zeros(len(part), max(len(q["ids"]) for q in part), dtype=torch.long)
        for i, q in enumerate(part):
            ids[i, : len(q["ids"])] = torch.tensor(q["ids"])
        yield part, ids.to(device)


class ExactMatch:
    """Exact match of greedy decoding: it holds iff every answer token is the arg max after its true predecessors."""

    def __init__(self):
        self.kinds, self.smallest_gap = {}, math.inf

    def add(self, part, ids, scores):
        top = scores.topk(2).values
        hit, gap = (scores.argmax(-1)[:, :-1] == ids[:, 1:]).cpu(), (top[..., 0] - top[..., 1]).cpu()
        for i, q in enumerate(part):
            span = slice(q["prompt"] - 1, len(q["ids"]) - 1)
            exact = bool(hit[i, span].all())
            self.kinds.setdefault(q["kind"], []).append(exact)
            if exact:
                self.smallest_gap = min(self.smallest_gap, float(gap[i, span].min()))

    @property
    def right(self):
        return sum(sum(v) for v in self.kinds.values())

    def __str__(self):
        kinds = {kind: (sum(v), len(v)) for kind, v in self.kinds.items()}
        return f"right {self.right} {kinds} smallest gap {self.smallest_gap:.3f}"


def load_questions(tokenizer):
    import generate_data
    questions = []
    for line in open(HERE / "questions.jsonl"):
        q = json.loads(line)
        prompt = tokenizer.encode(generate_data.render(q["messages"], generate=True)).ids
        answer = tokenizer.encode(q["answer"] + "<|im_end|>").ids
        questions.append({"kind": q["kind"], "ids": prompt + answer, "prompt": len(prompt)})
    return questions


def arguments(lr):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=480, help="wall clock from process start to the last save")
    parser.add_argument("--out", default="out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=11)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--eval-seconds", type=float, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where a step's device time goes, at the end")
    parser.add_argument("--no-graph", action="store_true", help="launch every kernel of a step by itself")
    parser.add_argument("--no-compile", action="store_true", help="run every operation by itself; implies --no-graph")
    parser.add_argument("--again", action="store_true", help="go on in the log of a start before this one")
    parser.add_argument("--tiny", action="store_true", help="small batches and no compile, to check the script")
    args = parser.parse_args()
    if args.tiny:
        BUCKETS.update(TINY_BUCKETS)
    return args


class Training:
    """Weights, their averages and the optimizer. One update runs as separate launches or as one CUDA graph."""

    def __init__(self, args, subject, pool):
        import torch
        self.torch, self.args, self.subject, self.pool = torch, args, subject, pool
        self.on_gpu = args.device == "cuda"
        self.averaged = {n: w.detach().clone() for n, w in (subject.weights | subject.state).items()}
        self.averages = list(self.averaged.values())
        self.everything = list(subject.weights.values())
        self.moving = [w.detach() for w in self.everything] + list(subject.state.values())
        decayed = lambda name, w: w.dim() > 1 and "embed" not in name and "lm_head" not in name
        self.rate = torch.tensor(args.lr, device=args.device)
        self.unsupervised = torch.tensor(0.1, device=args.device)
        self.optimizer = torch.optim.AdamW(
            [{"params": [w for n, w in subject.weights.items() if decayed(n, w)], "weight_decay": 0.05},
             {"params": [w for n, w in subject.weights.items() if not decayed(n, w)], "weight_decay": 0.0}],
            lr=self.rate, betas=(0.9, 0.98), eps=1e-9, fused=self.on_gpu, capturable=self.on_gpu)
        self.batch = {n: torch.zeros(count, n, dtype=torch.long, device=args.device) for n, count in BUCKETS.items()}
        self.seen = {n: torch.zeros((), device=args.device) for n in BUCKETS}
        self.kept = None

    def step(self):
        """One update from the rows in `batch`; reads and writes only fixed buffers, so it can be a CUDA graph."""
        for length, rows in self.batch.items():
            loss = self.subject.loss(rows, self.unsupervised)
            (loss * BUCKET_WEIGHT[length]).backward()
            self.seen[length].add_(loss.detach())
        self.torch.nn.utils.clip_grad_norm_(self.everything, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.subject.after_update()

    def draw_batch(self):
        for length, rows in self.batch.items():
            rows.copy_(self.pool.draw(length, BUCKETS[length]))

    def ready_step(self):
        """Runs `step` once, then captures it in a CUDA graph, whose thousands of small kernels cost one launch."""
        torch = self.torch
        self.rate.fill_(1e-5)
        if not self.on_gpu or self.args.no_graph or self.args.no_compile:
            self.draw_batch()
            self.step()
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.draw_batch()
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self.pool.filling, torch.cuda.graph(graph):
            self.step()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def tensors(self):
        moments = [t for state in self.optimizer.state.values() for t in state.values() if self.torch.is_tensor(t)]
        return self.moving + self.averages + moments

    def keep(self):
        """Saves all tensors if they are finite; otherwise restores the last saved ones. Returns whether they were finite."""
        sound = all(bool(self.torch.isfinite(t).all()) for t in self.tensors())
        if sound:
            self.kept = [t.clone() for t in self.tensors()]
        elif self.kept:
            for t, kept in zip(self.tensors(), self.kept):
                t.copy_(kept)
        return sound


def again_without(args, pool, log):
    """Restarts the whole program in the remaining time, first without the CUDA graph, then without compilation."""
    flag = "--no-compile" if args.no_graph else "--no-graph"
    log(f"FAILED; starting again with {flag}\n{traceback.format_exc()}")
    if args.no_compile or (args.no_graph and args.tiny):
        raise
    pool.stop()
    command = [sys.executable, *sys.argv, "--again", flag, "--seconds", str(args.seconds - (time.time() - START))]
    os.execv(sys.executable, command)


def train(args, make_subject):
    """Trains the model that `make_subject()` returns until the time is over."""
    multiprocessing.set_start_method("spawn")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from tokenizers import Tokenizer

    pool = Pool(args.device, args.workers, 16 if args.tiny else 256, 2_000_000 if args.tiny else POOL_TOKENS)
    pool.start_filling()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HERE / name, args.out)
    log_file = open(Path(args.out) / "train_log.txt", "a" if args.again else "w")

    def log(text):
        print(text := f"{time.time() - START:6.1f}s {text}", flush=True)
        print(text, file=log_file, flush=True)

    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    subject = make_subject()
    training = Training(args, subject, pool)
    log(f"{sum(w.numel() for w in training.averages)} parameters; {json.dumps(vars(args))}")
    questions = load_questions(Tokenizer.from_file(str(HERE / "tokenizer.json")))[: 20 if args.tiny else None]
    plain = args.tiny or args.no_compile
    subject.compile((lambda f: f) if plain else (lambda f: torch.compile(f, dynamic=False)))
    while min(pool.filled.values()) < (8 if args.tiny else 2000):
        time.sleep(0.1)
        assert all(w.is_alive() for w in pool.workers), "a data worker died"
    log(f"pool {pool.filled}")
    try:
        run_step = training.ready_step()
    except Exception:
        again_without(args, pool, log)
    log("ready to train")
    loop(args, training, questions, run_step, log)
    if args.profile:
        with torch.profiler.profile() as profile:
            for _ in range(3):
                run_step()
            torch.cuda.synchronize()
        log(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=80))
    pool.stop()


def loop(args, training, questions, run_step, log):
    torch, subject = training.torch, training.subject
    step, best, last_eval, first_step, since, since_time = 0, (-1,), time.time(), time.time(), 0, time.time()
    total = max(1, args.seconds - (first_step - START) - 8)  # the last seconds are reserved for the final evaluation and save
    peak = args.lr

    def report(text):
        nonlocal since, since_time, peak
        losses = " ".join(f"{n}:{float(v) / max(since, 1):.5f}" for n, v in training.seen.items())
        log(f"step {step} done {done:.2f} {(time.time() - since_time) / max(since, 1) * 1e3:.1f} ms/step loss {losses} "
            f"{subject.statistics()} {text}")
        if not training.keep():
            peak /= 2
            log(f"NOT FINITE: back to the last sound weights; learning rate {peak}")
        for value in training.seen.values():
            value.zero_()
        since, since_time = 0, time.time()

    while True:
        done = (time.time() - first_step) / total
        finished = done >= 1
        if finished or time.time() - last_eval > args.eval_seconds:
            merit, text = subject.evaluate(training.averaged, questions)
            report(f"{text} pool {training.pool.total}")
            if merit >= best:
                best = merit
                subject.export(training.averaged, args.out)
            last_eval = since_time = time.time()
            if finished:
                break
        training.rate.fill_(peak * min(1, (step + 1) / 300) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * min(done, 1)))))
        training.unsupervised.fill_(0.1 * max(0.0, 1 - 2 * done))
        subject.progress(done)
        training.draw_batch()
        run_step()
        step, since = step + 1, since + 1
        torch._foreach_lerp_(training.averages, training.moving, 1 - min(0.998, step / (step + 20)))
        if training.on_gpu and step % 8 == 0:
            torch.cuda.synchronize()  # so that the clock above does not run ahead of the device
        if step in (10, 100, 200, 400) or step % 1000 == 0:
            report("")
    log(f"best {best} of {len(questions)}, {step} steps")
