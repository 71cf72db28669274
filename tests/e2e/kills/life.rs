//! One server of a drill: as many losses as it survives, then its own death.

use super::chance::Chance;
use super::load::{ask_on, open};
use super::report::{Life, Seen};
use super::server::{News, Watched};
use super::worlds::{World, Worlds};
use crate::http::executor_process::{is_ready, is_zombie, within};
use crate::http::ranks::ranks_of;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

const CLIENTS: usize = 3;
/// For what takes seconds at most.
const PATIENCE: Duration = Duration::from_mins(1);

/// Signals that a drill is to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) kills: usize,
    pub(super) stops: usize,
    pub(super) stops_of_a_hundred: u64,
    /// Of each group of a server, which survives three in ten minutes.
    pub(super) losses: usize,
}

/// Who suffers: the ranks of one group of a server.
struct Victims<'a> {
    server: u32,
    ranks: &'a [u16],
    news: Receiver<(Instant, News)>,
    chance: Chance,
}

/// Starts a server under load, has its groups die and hang, and kills it.
pub(super) fn live(worlds: &Worlds, world: World, mut chance: Chance, wanted: Wanted) -> Life {
    let replicas = world.groups().iter().map(|(replica, _)| *replica);
    let (server, mut news) = Watched::start(&worlds.flags(world), replicas);
    let (at, questions) = (server.address, worlds.questions(world));
    let stop = AtomicBool::new(false);
    let mut life = Life::default();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| Chance::new(chance.bits()))
            .map(|chance| scope.spawn(|| ask_on(at, questions, chance, &stop)))
            .collect();
        let groups: Vec<_> = world
            .groups()
            .iter()
            .map(|(replica, ranks)| Victims {
                server: server.child.id(),
                ranks,
                news: news.remove(replica).unwrap(),
                chance: Chance::new(chance.bits()),
            })
            .map(|victims| scope.spawn(move || victims.suffer(wanted)))
            .collect();
        let suffered: Vec<_> = groups.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            life.answers.add(client.join().unwrap());
        }
        for seen in suffered {
            life.seen.extend(seen.unwrap());
        }
    });
    within(PATIENCE, "ready after all losses", || is_ready(at));
    let _streams: Vec<_> = questions.iter().take(CLIENTS).map(|q| open(at, q)).collect();
    life.orphans_gone = end(server, &mut chance);
    life
}

impl Victims<'_> {
    /// Loses the group as often as wanted.
    fn suffer(mut self, wanted: Wanted) -> Vec<Seen> {
        let mut seen: Vec<Seen> = Vec::new();
        while seen.len() < wanted.losses {
            thread::sleep(Duration::from_millis(self.chance.below(500)));
            let stops = self.chance.percent(wanted.stops_of_a_hundred);
            let signal = if stops { Signal::STOP } else { Signal::KILL };
            seen.push(self.lose(signal));
            // Its successors may die before they serve.
            while seen.len() < wanted.losses && self.chance.percent(15) {
                thread::sleep(Duration::from_millis(self.chance.below(200)));
                seen.push(self.lose(Signal::KILL));
            }
            let lost = seen.last().unwrap().lost;
            let back = self.next(News::Back);
            seen.last_mut().unwrap().back = Some(back - lost);
        }
        seen
    }

    /// Sends a signal to a rank, now and then to all at once, and waits until the server has noticed.
    fn lose(&mut self, signal: Signal) -> Seen {
        let mut pids = Vec::new();
        within(PATIENCE, "the ranks are there", || {
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
        let lost = self.next(News::Lost);
        Seen { signal, sent, after: lost - since, lost, back: None }
    }

    /// When the server next said this.
    fn next(&self, wanted: News) -> Instant {
        loop {
            let heard = self.news.recv_timeout(PATIENCE);
            let (at, news) = heard.unwrap_or_else(|_| panic!("no {wanted:?} within {PATIENCE:?}"));
            if news == wanted {
                return at;
            }
        }
    }
}

/// Whether the signal reached anyone.
fn send(pid: u32, signal: Signal) -> bool {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).is_ok()
}

/// Kills the server, now and then while an executor stands still. Returns how long executors outlived it.
fn end(mut server: Watched, chance: &mut Chance) -> Duration {
    let executors: Vec<u32> = ranks_of(server.child.id()).into_values().collect();
    assert!(!executors.is_empty(), "somebody computes");
    if chance.percent(25) {
        let one = chance.below(executors.len() as u64) as usize;
        assert!(send(executors[one], Signal::STOP), "it is there");
    }
    server.child.kill().unwrap();
    let lives = |pid: &u32| fs::exists(format!("/proc/{pid}")).unwrap() && !is_zombie(*pid);
    within(PATIENCE, "the end of all executors", || !executors.iter().any(lives))
}
