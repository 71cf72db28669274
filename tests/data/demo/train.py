"""Trains the demo checkpoint on one GPU against the clock; the best weights so far are always on disk.

    python train.py --seconds 450 --out out     # one H200; --device cpu --tiny checks the script
"""

import os

import training


class Qwen3:
    """The decoder with the interface that `training.train` requires."""

    def __init__(self, args):
        import qwen3

        self.model, self.state = qwen3, {}
        self.weights = qwen3.initial_weights(args.device, args.seed)
        self.tables = qwen3.rope_tables(1024, args.device)

    def compile(self, compiled):
        model = self.model
        self.block, self.embed = compiled(model.block), compiled(model.embed)
        self.loss_of = compiled(lambda x, norm, embedding, target, unsupervised:
                                training.weighted_loss(model.logits(x, norm, embedding), target, unsupervised))

    def loss(self, rows, unsupervised):
        x = self.model.trunk(self.weights, rows[:, :-1] % training.SUPERVISED, self.tables, self.block, self.embed)
        return self.loss_of(x, *self.head(self.weights), rows[:, 1:], unsupervised)

    def evaluate(self, averaged, questions):
        import torch

        match = training.ExactMatch()
        with torch.no_grad():
            for part, ids in training.batches(questions, self.tables[0].device):
                x = self.model.trunk(averaged, ids, self.tables)
                match.add(part, ids, self.model.logits(x, *self.head(averaged)))
        return (match.right,), str(match)

    def head(self, weights):
        return weights["model.norm.weight"], weights["model.embed_tokens.weight"]

    def after_update(self):
        pass

    def progress(self, done):
        pass

    def statistics(self):
        return ""

    def export(self, averaged, folder):
        self.model.export(averaged, folder)


if __name__ == "__main__":
    arguments = training.arguments(lr=2.5e-3)
    training.train(arguments, lambda: Qwen3(arguments))
    os._exit(0)  # the filling thread may block in a queue read
