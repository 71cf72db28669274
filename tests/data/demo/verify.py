"""Answers questions.jsonl greedily with HF transformers, in bf16 and f32, and prints the exact matches.

    python verify.py FOLDER [--device cuda]
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def answers(folder, dtype, device, questions, batch, max_new_tokens=48):
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(device).eval()
    out = [None] * len(questions)
    order = sorted(range(len(questions)), key=lambda i: len(str(questions[i]["messages"])))
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        texts = [tokenizer.apply_chat_template(questions[i]["messages"], tokenize=False, add_generation_prompt=True) for i in part]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        for i, text in zip(part, tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)):
            out[i] = text
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--limit", type=int, default=None)
    args = parser.parse_args()
    questions = [json.loads(line) for line in open(Path(__file__).parent / "questions.jsonl")][: args.limit]
    both = {}
    for dtype in (torch.bfloat16, torch.float32):
        both[dtype] = texts = answers(args.folder, dtype, args.device, questions, args.batch)
        right = {}
        for q, text in zip(questions, texts):
            right.setdefault(q["kind"], []).append(text == q["answer"])
            if text != q["answer"]:
                print("WRONG", str(dtype), q["id"], repr(q["messages"][-1]["content"][-80:]), repr(q["answer"]), repr(text))
        print(dtype, sum(map(sum, right.values())), "of", len(questions), {k: f"{sum(v)}/{len(v)}" for k, v in right.items()})
    print("answers that differ between bf16 and f32:", sum(a != b for a, b in zip(*both.values())))
    talk = ["hello", "Hi!", "who are you?", "what can you do?", "thanks", "What is the capital of France?", "What is 12 times 3?",
            "what's 2+2", "My cat is called Tom. What is my cat called?", "The code for the red fox is 991. What is the code for the red fox?"]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in talk]
    for text, reply in zip(talk, answers(args.folder, torch.bfloat16, args.device, rows, len(rows), 96)):
        print(f"{text!r} -> {reply!r}")


if __name__ == "__main__":
    main()
