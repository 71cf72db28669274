"""Acceptance rate of a checkpoint's MTP module, by HF transformers' modules in f32 (or --dtype).

    python acceptance.py FOLDER [--device cuda] [--limit 50]

Answers questions.jsonl greedily with transformers, which ignores the MTP module; builds that module from the same modules
(DeepSeek-V3, arXiv 2412.19437, formulas 21 to 23) and steps through the outputs as a server does with one draft
token per step. It also compares both logits with those of `deepseek_v3.py`. One JSON object is printed.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import deepseek_v3

DEMO = Path(__file__).resolve().parent.parent / "demo"
sys.path.append(str(DEMO))


class DraftLayer(torch.nn.Module):
    """The MTP module of a checkpoint, run on hidden states of a transformers model."""

    def __init__(self, model, stored):
        super().__init__()
        config, body = model.config, model.model
        own = {n.removeprefix(deepseek_v3.DRAFT): w for n, w in stored.items() if n.startswith(deepseek_v3.DRAFT)}
        self.body, self.head = [body], [model.lm_head]
        assert torch.equal(own["embed_tokens.weight"].to(body.embed_tokens.weight), body.embed_tokens.weight)
        assert torch.equal(own["shared_head.head.weight"].to(model.lm_head.weight), model.lm_head.weight)
        norm = type(body.norm)
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = type(body.layers[-1])(config, config.num_hidden_layers - 1)
        experts = lambda which: [own[f"mlp.experts.{e}.{which}_proj.weight"] for e in range(config.n_routed_experts)]
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(p) for p in zip(experts("gate"), experts("up"))])
        own["mlp.experts.down_proj"] = torch.stack(experts("down"))
        places = {"layer." + n: n for n, _ in [*self.layer.named_parameters(), *self.layer.named_buffers()]}
        places |= {f"{n}.weight": f"{n}.weight" for n in ("enorm", "hnorm", "eh_proj")} | {"norm.weight": "shared_head.norm.weight"}
        self.load_state_dict({name: own[of] for name, of in places.items()})

    def forward(self, ids):
        """Logits of the model [batch, tokens, vocab_size] and of the MTP module [batch, tokens - 1, vocab_size]."""
        body, head = self.body[0], self.head[0]
        hidden = body(ids).last_hidden_state
        joined = torch.cat((self.enorm(body.embed_tokens(ids[:, 1:])), self.hnorm(hidden[:, :-1])), -1)
        x = self.eh_proj(joined)
        count = x.shape[1]
        unseen = torch.full((count, count), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)[None, None]
        turns = body.rotary_emb(x, torch.arange(count, device=x.device)[None])
        x = self.layer(x, attention_mask=unseen, position_embeddings=turns)
        return head(hidden), head(self.norm(x[0] if isinstance(x, tuple) else x))


def greedy(model, prompts, device, pad, max_new_tokens=48):
    """Token ids of the model's answers, including <|im_end|>."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    ends = set(deepseek_v3.GENERATION_CONFIG["eos_token_id"])
    answers = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers


def walk(same, first, last):
    """Numbers of draft and accepted tokens from output token `first` to `last`; same[i] is whether the draft of token i is right."""
    drafts, accepted, at = 0, 0, first
    while at < last:
        drafts += 1
        accepted += same[at + 1]
        at += 2 if same[at + 1] else 1
    return drafts, accepted


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    import training
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager").to(args.device).eval()
    stored = load_file(f"{args.folder}/model.safetensors")
    layer = DraftLayer(model, stored).to(dtype).to(args.device).eval()
    layer.layer.mlp.gate.e_score_correction_bias.data = stored[deepseek_v3.DRAFT + deepseek_v3.BIAS].to(args.device)
    weights, biases = deepseek_v3.from_checkpoint(stored, args.device)
    tables = deepseek_v3.rope_tables(2048, args.device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    questions = sorted(training.load_questions(tokenizer.backend_tokenizer)[: args.limit], key=lambda q: q["prompt"])
    right = agreed = tokens = drafts = accepted = 0
    worst = {"model": 0.0, "draft": 0.0}
    with torch.no_grad():
        for at in range(0, len(questions), args.batch):
            part = questions[at : at + args.batch]
            prompts = [q["ids"][: q["prompt"]] for q in part]
            answers = greedy(model, prompts, args.device, 0, args.max_tokens)
            rows = [p + a for p, a in zip(prompts, answers)]
            ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
            for i, row in enumerate(rows):
                ids[i, : len(row)] = torch.tensor(row)
            ids = ids.to(args.device)
            both = layer(ids)
            own = deepseek_v3.both_logits(weights, biases, ids, tables)
            for name, a, b in zip(worst, both, own):
                worst[name] = max(worst[name], float((a.float() - b).abs().max() / a.float().abs().max()))
            same = (both[1].argmax(-1) == both[0][:, 1:].argmax(-1)).cpu()
            for i, (q, row) in enumerate(zip(part, rows)):
                right += row == q["ids"]
                hits = dict(zip(range(2, len(row)), same[i, : len(row) - 2].tolist()))  # by position of the draft token
                span = [hits[j] for j in range(q["prompt"] + 1, len(row))]
                agreed, tokens = agreed + sum(span), tokens + len(span)
                step = walk(hits, q["prompt"], len(row) - 1)
                drafts, accepted = drafts + step[0], accepted + step[1]
    print(json.dumps({
        "right": right, "questions": len(questions), "agreement_of_all_tokens": agreed / max(tokens, 1), "drafts": drafts,
        "accepted": accepted, "acceptance": accepted / max(drafts, 1), "largest_difference_of_logits": worst}))


if __name__ == "__main__":
    main()
