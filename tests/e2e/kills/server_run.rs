//! One server of a drill: as many failures as it survives, then its own kill.

use super::load::{open, send_requests};
use super::logged_server::{GroupEvent, LogWatchedServer};
use super::report::{ObservedFailure, ServerRun};
use super::rng::KillDrillRng;
use super::topologies::{DrillModels, DrillTopology};
use crate::http::executor_process::{is_ready, is_zombie, wait_until};
use crate::http::parallel_ranks::ranks_of;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

const CLIENTS: usize = 3;
/// Timeout of operations that take seconds at most.
const TIMEOUT: Duration = Duration::from_mins(1);

/// Numbers of signals that a drill sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignalCounts {
    pub(super) kills: usize,
    pub(super) stops: usize,
    pub(super) stop_percent: u64,
    /// Failures of each group of a server, which survives three in ten minutes.
    pub(super) executor_failures: usize,
}

/// The group under test: the ranks of one group of a server.
struct TargetGroup<'a> {
    server: u32,
    ranks: &'a [u16],
    group_events: Receiver<(Instant, GroupEvent)>,
    chance: KillDrillRng,
}

/// Starts a server under load, kills and stops its groups, and kills the server.
pub(super) fn run_server(
    worlds: &DrillModels,
    world: DrillTopology,
    mut chance: KillDrillRng,
    wanted: SignalCounts,
) -> ServerRun {
    let replicas = world.groups().iter().map(|(replica, _)| *replica);
    let (server, mut news) = LogWatchedServer::start(&worlds.flags(world), replicas);
    let (at, questions) = (server.address, worlds.requests(world));
    let stop = AtomicBool::new(false);
    let mut life = ServerRun::default();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| KillDrillRng::new(chance.bits()))
            .map(|chance| scope.spawn(|| send_requests(at, questions, chance, &stop)))
            .collect();
        let groups: Vec<_> = world
            .groups()
            .iter()
            .map(|(replica, ranks)| TargetGroup {
                server: server.child.id(),
                ranks,
                group_events: news.remove(replica).unwrap(),
                chance: KillDrillRng::new(chance.bits()),
            })
            .map(|victims| scope.spawn(move || victims.fail_repeatedly(wanted)))
            .collect();
        let suffered: Vec<_> = groups.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            life.results.add(client.join().unwrap());
        }
        for seen in suffered {
            life.failures.extend(seen.unwrap());
        }
    });
    wait_until(TIMEOUT, "ready after all losses", || is_ready(at));
    let _streams: Vec<_> = questions.iter().take(CLIENTS).map(|q| open(at, q)).collect();
    life.orphans_exited_after = end(server, &mut chance);
    life
}

impl TargetGroup<'_> {
    /// Makes the group fail the wanted number of times.
    fn fail_repeatedly(mut self, wanted: SignalCounts) -> Vec<ObservedFailure> {
        let mut seen: Vec<ObservedFailure> = Vec::new();
        while seen.len() < wanted.executor_failures {
            thread::sleep(Duration::from_millis(self.chance.below(500)));
            let stops = self.chance.percent(wanted.stop_percent);
            let signal = if stops { Signal::STOP } else { Signal::KILL };
            seen.push(self.fail_once(signal));
            // The replacements may be killed before they serve.
            while seen.len() < wanted.executor_failures && self.chance.percent(15) {
                thread::sleep(Duration::from_millis(self.chance.below(200)));
                seen.push(self.fail_once(Signal::KILL));
            }
            let lost = seen.last().unwrap().failed_at;
            let back = self.wait_for(GroupEvent::Restored);
            seen.last_mut().unwrap().restored_after = Some(back - lost);
        }
        seen
    }

    /// Sends a signal to one rank, sometimes to all at once, and waits until the server has detected it.
    fn fail_once(&mut self, signal: Signal) -> ObservedFailure {
        let mut pids = Vec::new();
        wait_until(TIMEOUT, "the ranks are there", || {
            let ranks = ranks_of(self.server);
            pids = self.ranks.iter().filter_map(|rank| ranks.get(rank).copied()).collect();
            pids.len() == self.ranks.len()
        });
        if pids.len() > 1 && !self.chance.percent(15) {
            let one = self.chance.below(pids.len() as u64) as usize;
            pids = vec![pids[one]];
        }
        let since = Instant::now();
        let sent = pids.iter().filter(|pid| send(**pid, signal)).count();
        let lost = self.wait_for(GroupEvent::Failed);
        ObservedFailure { signal, sent, after: lost - since, failed_at: lost, restored_after: None }
    }

    /// Time of the next such event.
    fn wait_for(&self, wanted: GroupEvent) -> Instant {
        loop {
            let heard = self.group_events.recv_timeout(TIMEOUT);
            let (at, news) = heard.unwrap_or_else(|_| panic!("no {wanted:?} within {TIMEOUT:?}"));
            if news == wanted {
                return at;
            }
        }
    }
}

/// Whether the process existed and the signal was sent.
fn send(pid: u32, signal: Signal) -> bool {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).is_ok()
}

/// Kills the server, sometimes while an executor is stopped. Returns the time by which executors outlived it.
fn end(mut server: LogWatchedServer, chance: &mut KillDrillRng) -> Duration {
    let executors: Vec<u32> = ranks_of(server.child.id()).into_values().collect();
    assert!(!executors.is_empty(), "somebody computes");
    if chance.percent(25) {
        let one = chance.below(executors.len() as u64) as usize;
        assert!(send(executors[one], Signal::STOP), "it is there");
    }
    server.child.kill().unwrap();
    let lives = |pid: &u32| fs::exists(format!("/proc/{pid}")).unwrap() && !is_zombie(*pid);
    wait_until(TIMEOUT, "the end of all executors", || !executors.iter().any(lives))
}
