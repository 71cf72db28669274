"""Runs two local tasks, and the same questions with `hadron eval`: outputs and log-probabilities must agree."""

import glob
import json
import math
import os
import subprocess
import sys
import tempfile

from transformers import AutoTokenizer

BINARY, DEMO, FOLDER = sys.argv[1:4]
URL, MODEL = os.environ["URL"], os.environ["MODEL"]
COUNT = 40
TOLERANCE = 1e-4

GENERATE = """\
task: demo_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["never said"], max_gen_toks: 32, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
LOGLIKELIHOOD = """\
task: demo_loglikelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def write_lines(path, items):
    with open(path, "w") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)


def read_lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def lm_eval(place, kind, task, route, arguments, *flags):
    """Logged samples of an lm_eval task, in the order of the task's documents."""
    command = [os.path.join(os.path.dirname(sys.executable), "lm_eval"), "--model", kind, "--tasks", task,
               "--include_path", place, "--output_path", f"{place}/{task}", "--log_samples", *flags,
               "--model_args", f"base_url={URL}{route},model={MODEL},num_concurrent=4,max_retries=1,{arguments}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    print(done.stdout.strip()[-400:])
    (samples,) = glob.glob(f"{place}/{task}/**/samples_*.jsonl", recursive=True)
    return sorted(read_lines(samples), key=lambda sample: sample["doc_id"])


def hadron(*words):
    subprocess.run([BINARY, "eval", *words, "--base-url", URL], check=True, stdout=subprocess.DEVNULL)


def generations(place, questions):
    samples = lm_eval(place, "local-chat-completions", "demo_generate", "/v1/chat/completions", "max_length=2048",
                      "--apply_chat_template")
    write_lines(f"{place}/same.jsonl", questions)
    hadron("tasks", "--data", f"{place}/same.jsonl", "--output", f"{place}/tasks.json")
    with open(f"{place}/tasks.json") as file:
        told = {answer["id"]: answer for answer in json.load(file)["answers"]}
    differ = [(s["resps"][0][0], told[s["doc"]["id"]]["given"]) for s in samples
              if s["resps"][0][0].strip() != told[s["doc"]["id"]]["given"].strip()]
    right = sum(sample["exact_match"] for sample in samples)
    ours = sum(answer["right"] for answer in told.values())
    print(f"generate_until: {len(samples)} questions, {right:.0f} right for lm_eval, {ours} for hadron eval")
    if differ or len(samples) != COUNT or right != ours:
        sys.exit(f"answers differ: {differ[:3]}")


def log_likelihoods(place, questions):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids, lens = [], []
    for question in questions:
        context = tokenizer.encode(question["question"], add_special_tokens=False)
        whole = tokenizer.encode(f"{question['question']} {question['answer']}", add_special_tokens=False)
        ids.append(whole)
        lens.append(len(whole) - len(context))
    write_lines(f"{place}/ids.jsonl", ids)
    hadron("logprobs", "--data", f"{place}/ids.jsonl", "--output", f"{place}/logprobs.jsonl")
    expected = [sum(line["token_logprobs"][-n:]) for line, n in zip(read_lines(f"{place}/logprobs.jsonl"), lens)]
    for tokenized in ("True", "False"):
        samples = lm_eval(place, "local-completions", "demo_loglikelihood", "/v1/completions",
                          f"tokenizer={DEMO},tokenizer_backend=huggingface,tokenized_requests={tokenized},max_length=2048")
        # Each entry is (log-probability, whether greedy); some versions of lm_eval write both as strings.
        told = [float(s["filtered_resps"][0][0]) for s in samples]
        worst = max(abs(a - b) for a, b in zip(told, expected))
        print(f"loglikelihood, tokenized_requests={tokenized}: {len(told)} pairs, largest difference {worst:.2e}")
        if len(told) != COUNT or not math.isfinite(worst) or worst > TOLERANCE:
            sys.exit("log-probabilities differ")
        subprocess.run(["rm", "-rf", f"{place}/demo_loglikelihood"], check=True)


with tempfile.TemporaryDirectory(dir=FOLDER) as place:
    asked = [q for q in read_lines(f"{DEMO}/questions.jsonl") if len(q["messages"]) == 1][:COUNT]
    documents = [dict(id=q["id"], question=q["messages"][0]["content"], answer=q["answer"]) for q in asked]
    write_lines(f"{place}/data.jsonl", documents)
    for name, text in [("generate", GENERATE), ("loglikelihood", LOGLIKELIHOOD)]:
        with open(f"{place}/{name}.yaml", "w") as file:
            file.write(text.format(data=f"{place}/data.jsonl"))
    generations(place, asked)
    log_likelihoods(place, documents)
