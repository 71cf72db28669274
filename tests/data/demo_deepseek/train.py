"""Trains the DeepSeek-V3 demo checkpoint on one GPU against the clock; the best weights so far are always on disk.

    python train.py --seconds 420 --out out     # one H200; --device cpu --tiny checks the script

The loss is that of the next token plus DRAFT_WEIGHT times that of the MTP module for the token after it. Its
gradient propagates into the trunk, as in DeepSeek-V3: a hidden state then contains what the second token needs, which one
small module could not compute by itself. Each router's bias moves by the sign of an expert's load deficit.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "demo"))
import training

DRAFT_WEIGHT = 0.3
BIAS_RATE = 1e-3
BIAS_STOPS = 0.85  # share of the time after which the biases stay fixed
BUCKETS = {160: 224, 384: 80, 704: 56}  # row length -> rows per step: slightly fewer than in the first demo, for more steps


class DeepseekV3:
    """Decoder and MTP module with the interface that `training.train` requires."""

    def __init__(self, args):
        import torch
        import deepseek_v3

        self.torch, self.model = torch, deepseek_v3
        self.weights = deepseek_v3.initial_weights(args.device, args.seed)
        self.biases = deepseek_v3.initial_biases(args.device)
        self.state = {"biases": self.biases}
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.tables = deepseek_v3.rope_tables(1024, args.device, self.dtype)
        self.bias_rate = torch.tensor(BIAS_RATE, device=args.device)
        self.load, self.load_seen = torch.zeros_like(self.biases), torch.zeros_like(self.biases)
        self.draft_loss, self.draft_count = (torch.zeros((), device=args.device) for _ in range(2))

    def compile(self, compiled):
        model = self.model
        self.parts = model.Parts(compiled)
        self.loss_of = compiled(lambda x, norm, head, target, unsupervised:
                                training.weighted_loss(model.logits(x, norm, head), target, unsupervised))

    def loss(self, rows, unsupervised):
        model, w, torch = self.model, self.weights, self.torch
        ids = rows % training.SUPERVISED
        mask = (ids[:, :-1] != 0).float()
        embedded = self.parts.embed(ids, w["model.embed_tokens.weight"], self.dtype)
        this, behind = embedded[:, :-1].contiguous(), embedded[:, 1:].contiguous()
        x, loads = model.trunk(w, self.biases, this, mask, self.tables, self.parts)
        y, load = model.draft(w, self.biases, behind, x, mask, self.tables, self.parts)
        self.load.add_(torch.stack([*loads, load]))
        loss = self.loss_of(x, w["model.norm.weight"], w["lm_head.weight"], rows[:, 1:].contiguous(), unsupervised)
        target = torch.nn.functional.pad(rows[:, 2:], (0, 1))
        draft_loss = self.loss_of(y, w[model.DRAFT + "shared_head.norm.weight"], w["lm_head.weight"], target, unsupervised)
        self.draft_loss.add_(draft_loss.detach())
        self.draft_count.add_(1)
        return loss + DRAFT_WEIGHT * draft_loss

    def after_update(self):
        """Changes the router biases so that the experts get more equal numbers of tokens."""
        self.biases.add_(self.bias_rate * (self.load.mean(-1, keepdim=True) - self.load).sign())
        self.load_seen.add_(self.load)
        self.load.zero_()

    def progress(self, done):
        self.bias_rate.fill_(BIAS_RATE if done < BIAS_STOPS else 0.0)

    def evaluate(self, averaged, questions):
        """Compares by correct answers, then by the acceptance rate of draft tokens."""
        torch, match, agreed, drafts = self.torch, training.ExactMatch(), 0, 0
        with torch.no_grad():
            for part, ids in training.batches(questions, self.biases.device):
                scores, draft = self.model.both_logits(averaged, averaged["biases"], ids, self.tables)
                match.add(part, ids, scores)
                same = (draft.argmax(-1) == scores.argmax(-1)[:, 1:]).cpu()
                for i, q in enumerate(part):  # a draft at i is of the token i + 2: here the second answer token to the last
                    span = same[i, q["prompt"] - 1 : len(q["ids"]) - 2]
                    agreed, drafts = agreed + int(span.sum()), drafts + span.numel()
        return (match.right, agreed / drafts), f"{match} acceptance {agreed / drafts:.4f}"

    def statistics(self):
        balance = self.load_seen / self.load_seen.mean(-1, keepdim=True).clamp(min=1e-9)
        text = "load " + " ".join(f"{row.min():.2f}-{row.max():.2f}" for row in balance)
        text = f"draft {float(self.draft_loss / self.draft_count.clamp(min=1)):.5f} {text} bias {self.biases.abs().max():.2f}"
        for tensor in (self.load_seen, self.draft_loss, self.draft_count):
            tensor.zero_()
        return text

    def export(self, averaged, folder):
        weights = {name: w for name, w in averaged.items() if name != "biases"}
        self.model.export(weights, averaged["biases"], folder)


if __name__ == "__main__":
    training.BUCKETS.update(BUCKETS)
    arguments = training.arguments(lr=2e-3)
    training.train(arguments, lambda: DeepseekV3(arguments))
    os._exit(0)  # the filling thread may block in a queue read
