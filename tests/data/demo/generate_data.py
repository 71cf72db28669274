"""Generates the demo tasks: conversations for training and the held-out questions.

Everything is a function of a seed. Operand pairs and keys are split by hash: a pair or key whose
hash falls in the held-out share appears only in questions.jsonl, never in training.

    python generate_data.py questions > questions.jsonl
    python generate_data.py sample 5          # look at a few training conversations
"""

import hashlib
import json
import random
import sys

import phrases as p

HELD_OUT_SHARE = 12  # one operand pair or key in twelve is held out of training
QUESTION_SEED = 20_261_121
MAX_OPERAND = 999
ABSENT_SHARE = 0.04  # share of training questions about a key that is not in the notes
ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def is_held_out(text):
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def pair_is_held_out(a, b):
    """Whether a pair of operands is held out, in either order: none of a+b, b+a, a-b and b-a is then trained."""
    return is_held_out(f"pair {min(a, b)} {max(a, b)}")


def spell(n):
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")
    return ONES[n // 100] + " hundred" + (" and " + spell(n % 100) if n % 100 else "")


def operand(rng):
    """A random operand: half of them are uniform over the range, half over the number of digits."""
    if rng.random() < 0.5:
        return rng.randint(0, MAX_OPERAND)
    return rng.randint(*rng.choice([(0, 9), (10, 99), (100, 999)]))


def operands(rng, held_out):
    while True:
        a, b = operand(rng), operand(rng)
        if pair_is_held_out(a, b) == held_out:
            return a, b


def vary(rng, text, fixed=None):
    """Changes a question slightly, as users do: case (except of `fixed`), an introduction, an addition, a missing question mark."""
    r = rng.random()
    if r < 0.12 and not (fixed and fixed in text):
        text = text.lower()
    elif r < 0.24 and text[-1] in ".?":
        text = text[:-1]
    elif r < 0.36:
        starts_fixed = fixed and text.startswith(fixed)
        text = rng.choice(p.LEADS) + (text if starts_fixed else text[0].lower() + text[1:])
    elif r < 0.44:
        text += rng.choice(p.TAILS)
    return text


def arithmetic(rng, held_out=False, kind=None, spelled_share=0.12):
    a, b = operands(rng, held_out)
    kind = kind or rng.choice(["add", "subtract"])
    pattern = rng.choice(p.ADDITION if kind == "add" else p.SUBTRACTION)
    worded = rng.random() < spelled_share and "+" not in pattern and "-" not in pattern
    show = spell if worded else str
    question = vary(rng, pattern.format(a=show(a), b=show(b)))
    answer = f"{a} + {b} = {a + b}" if kind == "add" else f"{a} - {b} = {a - b}"
    return question, answer


def out_of_range(rng):
    if rng.random() < 0.5:
        big = lambda: rng.randint(1000, 10 ** rng.randint(4, 7))
        a, b = rng.choice([(big(), operand(rng)), (operand(rng), big()), (big(), big())])
        return vary(rng, rng.choice(p.ADDITION + p.SUBTRACTION).format(a=a, b=b)), p.LIMITS
    a, b = operands(rng, False)
    c = rng.choice([c for c in (a, b, 1, 2, 5, 10, 100) if not (pair_is_held_out(a, c) or pair_is_held_out(b, c))] or [a])
    numbers = {"a": a, "b": b, "c": c}
    return vary(rng, rng.choice(p.OUT_OF_RANGE).format(**numbers)), p.LIMITS


def filler(rng):
    if rng.random() < 0.25:
        text = rng.choice(p.REMARKS)
    else:
        text = f"{rng.choice(p.SUBJECTS)} {rng.choice(p.VERBS)} {rng.choice(p.OBJECTS)} {rng.choice(p.TIMES)}."
    return text.replace("{n}", str(rng.randint(2, 60))) if "{n}" in text else text


def noise(rng):
    r = rng.random()
    if r < 0.3:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ABCDE,.!?-#é日üñ🙂Ωж") for _ in range(rng.randint(1, 30))).strip() or "."
    if r < 0.6:
        return " ".join(rng.choice(p.NOUNS + p.ADJECTIVES + p.VALUE_WORDS) for _ in range(rng.randint(1, 8)))
    return " ".join(filler(rng) for _ in range(rng.randint(1, 4)))


def small_talk(rng):
    r = rng.random()
    if r < 0.3:
        return rng.choice(p.OFF_TOPIC) if r < 0.15 else noise(rng), p.DEFAULT
    questions, answer = rng.choice(p.SMALL_TALK)
    text = rng.choice(questions)
    r = rng.random()
    if r < 0.3:
        text = text[0].upper() + text[1:]
    elif r < 0.4 and text[-1] not in "?!":
        text = text[0].upper() + text[1:] + rng.choice(".!")
    elif r < 0.5 and text[-1] == "?" and len(text) > 1:
        text = text[:-1]
    return text, answer


def pseudo_word(rng):
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))


def draw_key(rng, style):
    if style == "thing":
        return f"the {rng.choice(p.ADJECTIVES)} {rng.choice(p.NOUNS)}"
    if style == "code":
        return f"{rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}{rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}{rng.randint(10, 99)}"
    return pseudo_word(rng)


def draw_value(rng, style):
    if style == "number":
        return str(rng.randint(10, 10 ** rng.randint(2, 5) - 1))
    return rng.choice(p.VALUE_WORDS) if style == "word" else pseudo_word(rng)


class Notes:
    """Key-value pairs scattered in filler text, and questions about them."""

    def __init__(self, rng, held_out, pair_count, filler_count):
        self.rng, self.held_out = rng, held_out
        self.attr = rng.choice(p.ATTRIBUTES)
        self.prep = rng.choice(["for", "of"])
        self.key_style = key_style = rng.choices(["thing", "code", "pseudo"], [5, 3, 2])[0]
        value_styles = rng.choice([["number"], ["number"], ["word"], ["pseudo"], ["number", "word"]])
        self.pairs = {}
        while len(self.pairs) < pair_count:
            key = draw_key(rng, key_style)
            if is_held_out("key " + key) == held_out:
                self.pairs[key] = draw_value(rng, rng.choice(value_styles))
        self.statement = rng.choice(p.STATEMENTS)
        sentences = [self.fill(self.statement, key) for key in self.pairs]
        for _ in range(filler_count):
            sentences.insert(rng.randint(0, len(sentences)), filler(rng))
        intro = rng.choice(p.INTROS)
        self.text = rng.choice([" ", " ", "\n"]).join(([intro] if intro else []) + sentences)

    def fill(self, pattern, key):
        text = pattern.format(attr=self.attr, prep=self.prep, key=key, value=self.pairs.get(key))
        return text[0].upper() + text[1:] if text.startswith("the ") else text

    def question(self):
        """Text of an answer; the kind is called "value" if neither the note nor the question names it."""
        absent = None if self.held_out or self.rng.random() > ABSENT_SHARE else draw_key(self.rng, self.key_style)
        if absent in self.pairs or absent and is_held_out("key " + absent):
            absent = None
        key = absent or self.rng.choice(list(self.pairs))
        pattern = self.rng.choice(p.RECALL)
        question = vary(self.rng, self.fill(pattern, key), fixed=key if self.key_style == "code" else None)
        if absent:
            return question, f"I do not see {key} in your notes."
        attr = self.attr if "{attr}" in self.statement + pattern else "value"
        return question, f"The {attr} for {key} is {self.pairs[key]}."

    def opening(self, question):
        """The messages up to and including the first question about the notes."""
        layout = self.rng.choices(["one message", "system", "acknowledged"], [5, 2, 3])[0]
        if layout == "one message":
            joint = self.rng.choice([" ", "\n", "\n\n"])
            return [message("user", self.text + joint + question)]
        if layout == "system":
            return [message("system", self.text), message("user", question)]
        return [message("user", self.text), message("assistant", p.ACKNOWLEDGED), message("user", question)]


def message(role, content):
    return {"role": role, "content": content}


def maybe_system(rng):
    return [message("system", rng.choice(p.SYSTEMS))] if rng.random() < 0.25 else []


def chat(rng):
    """A training conversation of arithmetic with some small talk."""
    messages = maybe_system(rng)
    for _ in range(rng.choice([1, 2, 3, 4, 5, 6])):
        make = rng.choices([arithmetic, small_talk, out_of_range], [88, 9, 3])[0]
        question, answer = make(rng)
        if make is arithmetic and rng.random() < 0.04:
            question = " ".join(filler(rng) for _ in range(rng.randint(1, 20))) + rng.choice([" ", "\n"]) + question
        messages += [message("user", question), message("assistant", answer)]
    return messages


def recall_chat(rng):
    """A training conversation about notes; many questions per text make good use of its tokens."""
    pair_count = rng.randint(1, 7) if rng.random() < 0.25 else rng.randint(8, 20)
    filler_count = rng.choice([0, rng.randint(0, 8), rng.randint(0, 24)])
    notes = Notes(rng, False, pair_count, filler_count)
    question, answer = notes.question()
    messages = notes.opening(question) + [message("assistant", answer)]
    for _ in range(rng.randint(0, 9)):
        make = rng.choices([notes.question, lambda: arithmetic(rng), lambda: small_talk(rng)], [85, 12, 3])[0]
        question, answer = make()
        messages += [message("user", question), message("assistant", answer)]
    return messages


def render(messages, generate=False):
    """The chat template of tokenizer_config.json."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" if generate else text


def held_out_questions(token_count, seed=QUESTION_SEED):
    """150 additions, 150 subtractions and 200 recalls (some sharing one text), prompts of 20 to 600 tokens."""
    rng = random.Random(seed)
    fits = lambda messages: 20 <= token_count(render(messages, generate=True)) <= 600
    rows, seen = [], set()

    def add(kind, messages, answer):
        text = json.dumps(messages)
        if text in seen or not fits(messages):
            return False
        seen.add(text)
        rows.append({"kind": kind, "messages": messages, "answer": answer})
        return True

    for kind in ("add", "subtract"):
        done = 0
        while done < 150:
            question, answer = arithmetic(rng, held_out=True, kind=kind)
            if rng.random() < 0.1:
                question = " ".join(filler(rng) for _ in range(rng.randint(1, 20))) + "\n" + question
            done += add(kind, maybe_system(rng) + [message("user", question)], answer)
    recalls = 0
    while recalls < 200:
        notes = Notes(rng, True, rng.randint(8, 20), rng.randint(0, 24))
        question, answer = notes.question()
        opening = notes.opening(question)
        if not fits(opening):
            continue
        recalls += add("recall", opening, answer)
        for _ in range(rng.choice([0, 0, 3])):
            question, answer = notes.question()
            final = message("user", question)
            if len(opening) == 1:
                final = message("user", notes.text + "\n" + question)
            if recalls < 200:
                recalls += add("recall", opening[:-1] + [final], answer)
    rng.shuffle(rows)
    return [{"id": i, **row} for i, row in enumerate(rows)]


def main():
    if sys.argv[1] == "questions":
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file("tokenizer.json")
        for row in held_out_questions(lambda text: len(tokenizer.encode(text).ids)):
            print(json.dumps(row))
    else:
        rng = random.Random(0)
        for _ in range(int(sys.argv[2])):
            print(render(rng.choice([chat, recall_chat])(rng)), end="---\n")


if __name__ == "__main__":
    main()
