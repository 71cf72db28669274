//! The kill drill: executors die and hang at random under load, and no client loses, repeats or misses a token.
//!
//! `just kills` runs the long form, every test run a short one; a failure names the seed.

mod chance;
mod life;
mod load;
mod report;
mod server;
mod worlds;

use chance::Chance;
use life::Wanted;
use report::Report;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use worlds::{Device, World, Worlds};

/// The lives of servers that are still to come.
struct Drill {
    seed: u64,
    /// Those that servers live in, in turn, and what is served there.
    turns: &'static [World],
    worlds: Worlds,
    /// Number of the next server, and how many there are at most.
    next: AtomicUsize,
    lives: usize,
    wanted: Wanted,
    report: Mutex<Report>,
}

impl Drill {
    /// Lives in worlds in turn until so many signals are sent; as many servers at a time as there are lanes.
    fn run(
        (device, turns): (Device, &'static [World]),
        seed: u64,
        wanted: Wanted,
        lives: usize,
        lanes: usize,
    ) -> Report {
        println!("seed {seed}");
        let began = Instant::now();
        let drill = Self {
            seed,
            turns,
            worlds: Worlds::prepare(device),
            next: AtomicUsize::new(0),
            lives,
            wanted,
            report: Mutex::default(),
        };
        std::thread::scope(|scope| {
            for _ in 0..lanes {
                scope.spawn(|| drill.lane());
            }
        });
        let mut report = drill.report.into_inner().unwrap();
        report.took = began.elapsed();
        report
    }

    fn lane(&self) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.lives || self.is_enough() {
                return;
            }
            let world = self.turns[number % self.turns.len()];
            let seed = self.seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let chance = Chance::new(seed);
            let told = life::live(&self.worlds, world, chance, self.wanted);
            let mut report = self.report.lock().unwrap();
            report.add(world, told);
            println!("life {number}, {world:?}: {}", report.line());
        }
    }

    fn is_enough(&self) -> bool {
        let (kills, stops) = self.report.lock().unwrap().signals();
        kills >= self.wanted.kills && stops >= self.wanted.stops
    }
}

#[test]
fn executors_that_die_or_hang_cost_no_client_a_token() {
    let all = usize::MAX;
    let wanted = Wanted { kills: all, stops: all, stops_of_a_hundred: 20, losses: 2 };
    let turns = World::on(2);
    let report = Drill::run((Device::Cpu, turns), 16, wanted, turns.len(), turns.len());
    println!("{report}");
    report.check();
    let (kills, stops) = report.signals();
    assert!(kills >= 6 && stops >= 2, "{kills} kills, {stops} stops");
}

/// Two hundred kills and fifty stops, or as many as HADRON_KILLS asks for, on CPUs or GPUs that HADRON_GPU names, two or as many as
/// HADRON_GPU_RANKS says.
#[test]
#[ignore = "minutes: `just kills`"]
#[allow(clippy::disallowed_methods, reason = "the seed of a replay and the GPUs come from `just`")]
fn two_hundred_kills_and_fifty_stops() {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let said = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seed = said("HADRON_KILLS_SEED").unwrap_or_else(clock);
    let kills = said("HADRON_KILLS").unwrap_or(200) as usize;
    let wanted = Wanted { kills, stops: kills / 4, stops_of_a_hundred: 22, losses: 3 };
    let turns = World::on(said("HADRON_GPU_RANKS").unwrap_or(2));
    // On GPUs servers would share the memory of the same ones.
    let (device, lanes) = match std::env::var("HADRON_GPU").as_deref() {
        Err(_) => (Device::Cpu, 2),
        Ok("cuda") => (Device::Cuda, 1),
        Ok("rocm") => (Device::Rocm, 1),
        Ok(other) => panic!("HADRON_GPU={other} is neither cuda nor rocm"),
    };
    let report = Drill::run((device, turns), seed, wanted, usize::MAX, lanes);
    println!("{report}");
    report.check();
}
