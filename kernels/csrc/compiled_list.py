"""compiled.txt: the kernel sources whose compilations for a GPU have succeeded, each with a hash of all inputs of these
compilations. The file is committed, so that a run on another machine skips sources whose inputs have not changed."""
import collections, hashlib, os

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compiled.txt")
# On average, one in this many unchanged sources is compiled in each turn.
TURNS = 8
Group = collections.namedtuple("Group", "jobs keys")


def digest(texts):
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def group_by_source(jobs, keys, root):
    """Returns the compilations of each source and target, with their hashes `keys`, by name."""
    groups = collections.defaultdict(lambda: Group([], []))
    for job in jobs:
        group = groups[f"{os.path.relpath(job.source, root)} {job.target}"]
        group.jobs.append(job)
        group.keys.append(keys[job])
    return dict(groups)


def read():
    """Returns the hash of each source and target in compiled.txt."""
    if not os.path.exists(PATH):
        return {}
    return dict(line.rsplit(" ", 1) for line in open(PATH).read().splitlines() if not line.startswith("#"))


def write(groups, existing, succeeded):
    """Writes the hashes of those `groups` of which every compilation is in `succeeded`, and keeps the other lines whose
    name is in `existing`."""
    listed = {name: value for name, value in read().items() if name in existing and name not in groups}
    listed |= {name: digest(group.keys) for name, group in groups.items() if succeeded.issuperset(group.keys)}
    with open(PATH, "w") as file:
        file.write("# Hashes of the inputs of successful compilations, written by gate.py: source, GPU, hash.\n")
        file.writelines(f"{name} {value}\n" for name, value in sorted(listed.items()))


def is_drawn(name, turn):
    """Whether a turn compiles an unchanged source. The draw is random, because the turns of successive runs may differ by
    any number."""
    return int(digest([name, str(turn)]), 16) % TURNS == 0


def skipped_in_turn(groups, turn):
    """Returns the compilations that a turn skips."""
    listed = read()
    return {job for name, group in groups.items() if listed.get(name) == digest(group.keys) and not is_drawn(name, turn)
            for job in group.jobs}
