//! Attacks on a server over loopback: a random mixture of hostile and faulty clients. Other clients send
//! requests with known outputs at the same time.
//!
//! `just attack MINUTES SEED KINDS` runs for the requested time; every test run takes some seconds. A run
//! passes if memory does not grow, no request gets a 5xx status, all health probes report the actual state,
//! and the known outputs do not change.

mod agents;
mod bodies;
mod bystander;
mod clients;
mod connections;
mod executors;
mod extremes;
mod floods;
mod grammars;
mod kv_subscribers;
mod memory;
mod model_folder;
mod probes;
mod signals;
mod target;

use crate::http::executor_process::wait_until;
use crate::http::server_process::{ServerProcess, command};
use crate::rng::SimRng;
use crate::soak::in_use;
use memory::MemorySampler;
use model_folder::ServedModelFolder;
use probes::HealthProbeChecker;
use serde_json::json;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use target::AttackTarget;

/// Number of attacking threads.
const ATTACKERS: u64 = 4;
/// Number of threads that send requests with known outputs.
const BYSTANDERS: u64 = 2;
/// Address-space limit of the server and of each executor in KiB.
const ADDRESS_SPACE_KIB: u64 = 6 << 20;
/// Maximum time for the server's shutdown.
const END: Duration = Duration::from_mins(1);

/// A named kind of attack with its function, which runs one random attack of at most a few seconds.
struct AttackKind {
    name: &'static str,
    attack: fn(&AttackTarget, &mut SimRng),
}

const KINDS: &[AttackKind] = &[
    AttackKind { name: "huge_bodies", attack: bodies::huge },
    AttackKind { name: "malformed_bodies", attack: bodies::malformed },
    AttackKind { name: "slow_headers", attack: connections::slow_headers },
    AttackKind { name: "slow_bodies", attack: connections::slow_bodies },
    AttackKind { name: "half_open", attack: connections::half_open },
    AttackKind { name: "half_closed", attack: connections::half_closed },
    AttackKind { name: "host_headers", attack: connections::host_headers },
    AttackKind { name: "kv_long_topics", attack: kv_subscribers::long_topics },
    AttackKind { name: "kv_many_topics", attack: kv_subscribers::many_topics },
    AttackKind { name: "kv_endless_frames", attack: kv_subscribers::endless_frames },
    AttackKind { name: "kv_replay_flood", attack: kv_subscribers::replay_flood },
    AttackKind { name: "tokenize_floods", attack: floods::tokenize },
    AttackKind { name: "metrics_floods", attack: floods::metrics },
    AttackKind { name: "hostile_schemas", attack: grammars::schemas },
    AttackKind { name: "hostile_tools", attack: grammars::tools },
    AttackKind { name: "hostile_templates", attack: grammars::templates },
    AttackKind { name: "leaving_clients", attack: clients::leave },
    AttackKind { name: "slow_readers", attack: clients::read_slowly },
    AttackKind { name: "extreme_fields", attack: extremes::fields },
    AttackKind { name: "many_choices", attack: extremes::choices },
    AttackKind { name: "harmless_signals", attack: signals::harmless },
    AttackKind { name: "stored_responses", attack: agents::responses },
    AttackKind { name: "conversations", attack: agents::conversations },
    AttackKind { name: "agent_messages", attack: agents::messages },
    AttackKind { name: "renders", attack: agents::renders },
    AttackKind { name: "executors_killed", attack: executors::kill },
    AttackKind { name: "executors_stopped", attack: executors::stop },
    AttackKind { name: "weights_replaced", attack: model_folder::replace_weights },
];

/// Duration, seed and attack kinds of a run.
#[derive(Debug, Clone)]
struct AttackPlan {
    seed: u64,
    time: Duration,
    /// Names of attack kinds; empty = all.
    kinds: Vec<String>,
}

/// Event counts of an attack run, and descriptions of the violated conditions.
#[derive(Debug)]
struct AttackReport {
    /// Number of attacks by kind.
    attacks: BTreeMap<&'static str, u64>,
    /// Number of executor outages by the kind of attack that caused them.
    outages: BTreeMap<&'static str, u64>,
    replies: u64,
    /// Number of requests with a known output that were rejected for load and repeated.
    rejected: u64,
    probes: u64,
    /// Number of executors that were replaced because they got too little processor time.
    executors_starved: u64,
    /// Descriptions of all violated conditions.
    violations: Vec<String>,
}

impl AttackPlan {
    fn kinds(&self) -> Vec<&'static AttackKind> {
        let named = |kind: &&AttackKind| {
            self.kinds.is_empty() || self.kinds.iter().any(|name| name == kind.name)
        };
        let kinds: Vec<_> = KINDS.iter().filter(named).collect();
        assert!(!kinds.is_empty(), "{:?}: no such kinds", self.kinds);
        kinds
    }
}

/// Runs one attacker thread: first the attack kinds that no other attacker thread has run yet, then random
/// attack kinds until the run time is over.
fn attack(
    plan: &AttackPlan,
    target: &AttackTarget,
    first: &Mutex<Vec<&'static AttackKind>>,
    number: u64,
) -> BTreeMap<&'static str, u64> {
    let mut rng = SimRng::new(plan.seed.wrapping_mul(1_000).wrapping_add(number));
    let (kinds, until) = (plan.kinds(), Instant::now() + plan.time);
    let mut counts = BTreeMap::new();
    loop {
        let next = first.lock().unwrap().pop();
        if next.is_none() && Instant::now() >= until || !target.is_alive() {
            return counts;
        }
        let kind = next.unwrap_or_else(|| rng.pick(&kinds));
        (kind.attack)(target, &mut rng);
        *counts.entry(kind.name).or_default() += 1;
    }
}

/// Starts a server with limited memory, so that an attack cannot exhaust the machine.
fn start(model: &ServedModelFolder) -> ServerProcess {
    let events = json!({"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0"});
    let events = events.to_string();
    let exact = ["--port", "0", "--executor", "process", "--threads", "1", "--dtype", "float32"];
    let bounds =
        ["--max-queued-bytes", "64MiB", "--shutdown-timeout", "2s", "--max-text-memory", "256MiB"];
    let more = ["--trust-request-chat-template", "--kv-events-config", &events];
    // Replies have the name of the model, and must not have paths of the server.
    let folder = [model.path().to_str().unwrap(), "--served-model-name", "demo"];
    let served = command(&[&folder[..], &exact[..], &bounds[..], &more[..]].concat());
    let limit = format!("ulimit -v {ADDRESS_SPACE_KIB}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limit]).arg(served.get_program()).args(served.get_args());
    command.current_dir("/").env("RUST_LOG", "error");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    ServerProcess::of(&mut command)
}

fn run(plan: &AttackPlan) -> AttackReport {
    println!("{plan:?}");
    let model = ServedModelFolder::new();
    let mut process = start(&model);
    let target = AttackTarget::new(&process, model);
    if plan.time >= memory::SLOPE_TIME_MIN {
        agents::fill_stores(&target);
        grammars::fill_cache(&target);
    }
    let first = Mutex::new(plan.kinds());
    let (over, counts) = (AtomicBool::new(false), Mutex::new(BTreeMap::new()));
    let memory = MemorySampler::new(process.id(), plan.time);
    std::thread::scope(|scope| {
        let probing = scope.spawn(|| HealthProbeChecker::run(&target, &over));
        for number in 0..BYSTANDERS {
            let (target, over) = (&target, &over);
            scope.spawn(move || target.known.compare(target, over, number));
        }
        let attackers: Vec<_> = (0..ATTACKERS)
            .map(|number| {
                let (target, first) = (&target, &first);
                scope.spawn(move || attack(plan, target, first, number))
            })
            .collect();
        while attackers.iter().any(|attacker| !attacker.is_finished()) {
            memory.sample();
            std::thread::sleep(memory.pause());
        }
        for attacker in attackers {
            for (kind, count) in attacker.join().unwrap() {
                *counts.lock().unwrap().entry(kind).or_default() += count;
            }
        }
        over.store(true, Ordering::Relaxed);
        target.probes.store(probing.join().unwrap(), Ordering::Relaxed);
    });
    end(&mut process, &target, &memory);
    target.violations.lock().unwrap().extend(memory.growth_violations());
    AttackReport {
        attacks: counts.into_inner().unwrap(),
        outages: target.outage_causes.into_inner().unwrap(),
        replies: target.replies.load(Ordering::Relaxed),
        rejected: target.rejected.load(Ordering::Relaxed),
        probes: target.probes.load(Ordering::Relaxed),
        executors_starved: target.starved.load(Ordering::Relaxed),
        violations: target.violations.into_inner().unwrap(),
    }
}

/// Checks that the server holds no resources of disconnected clients and that it exits on SIGTERM.
fn end(process: &mut ServerProcess, target: &AttackTarget, memory: &MemorySampler) {
    if !target.is_alive() {
        target.add_violation("the server has ended".to_owned());
        println!("{}", process.stderr_text());
        return;
    }
    wait_until(END, "an idle server", || in_use(target.address) == 0.0);
    let since = Instant::now();
    while !memory.has_closed() && since.elapsed() < END {
        std::thread::sleep(Duration::from_millis(100));
    }
    target.violations.lock().unwrap().extend(memory.open_descriptors());
    process.signal("TERM");
    let status = process.exits_within(END);
    if status.code() != Some(0) || process.stderr_text().contains("panicked") {
        target.add_violation(format!("{status}: {}", process.stderr_text()));
    }
}

fn judge(report: &AttackReport) {
    let AttackReport {
        attacks,
        outages,
        replies: answers,
        rejected: error,
        probes,
        executors_starved: starved,
        ..
    } = report;
    println!("attacks: {attacks:?}");
    println!("executor outages by attack: {outages:?}");
    println!(
        "known outputs: {answers}, rejected for load: {error}; probes: {probes}; executors starved: {starved}"
    );
    assert!(
        report.violations.is_empty(),
        "{} faults: {:#?}",
        report.violations.len(),
        report.violations
    );
    assert!(
        report.replies > 0 && report.probes > 0,
        "requests with known outputs and probes were sent"
    );
}

#[test]
fn short_attack_run_affects_no_bystander() {
    let plan = AttackPlan { seed: 3, time: Duration::from_secs(10), kinds: Vec::new() };
    let report = run(&plan);
    judge(&report);
    assert_eq!(report.attacks.len(), KINDS.len(), "every kind has run");
    assert_eq!(report.outages.values().sum::<u64>(), 2, "{:?}", report.outages);
}

/// Attacks a server for `HADRON_ATTACK_MINUTES` minutes.
#[test]
#[ignore = "takes an hour: `just attack MINUTES`"]
#[expect(clippy::disallowed_methods, reason = "length, seed and kinds come from `just`")]
fn long_attack_run() {
    let env_var = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let minutes =
        env_var("HADRON_ATTACK_MINUTES").map_or(60.0, |text| text.parse::<f64>().unwrap());
    let plan = AttackPlan {
        seed: env_var("HADRON_ATTACK_SEED").map_or(1, |text| text.parse().unwrap()),
        time: Duration::from_secs_f64(minutes * 60.0),
        kinds: env_var("HADRON_ATTACK_KINDS")
            .map_or(Vec::new(), |text| text.split(',').map(str::to_owned).collect()),
    };
    judge(&run(&plan));
}
