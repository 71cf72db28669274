//! The kill test: executors are killed and stopped at random under load, and no client may miss a token or
//! get a wrong or repeated token.
//!
//! `just kills` runs the long kill test, every test run a short one; a failure prints the seed.

mod load;
mod logged_server;
mod report;
mod rng;
mod server_run;
mod topologies;

use report::KillTestReport;
use rng::KillTestRng;
use server_run::SignalCounts;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use topologies::{KillTestDevice, KillTestModels, KillTestTopology};

/// Kill test over many servers: its topologies, models and progress.
struct KillTest {
    seed: u64,
    /// Parallel topologies that consecutive servers use in turn.
    topologies: &'static [KillTestTopology],
    /// Models that the servers run, with the expected outputs.
    models: KillTestModels,
    /// Index of the next server.
    next: AtomicUsize,
    /// Maximum number of servers.
    servers: usize,
    signals: SignalCounts,
    report: Mutex<KillTestReport>,
}

impl KillTest {
    /// Runs servers with alternating topologies, up to `concurrency` at a time, until the wanted number of
    /// signals has been sent.
    fn run(
        device: KillTestDevice,
        topologies: &'static [KillTestTopology],
        seed: u64,
        wanted: SignalCounts,
        servers: usize,
        concurrency: usize,
    ) -> KillTestReport {
        println!("seed {seed}");
        let began = Instant::now();
        let test = Self {
            seed,
            topologies,
            models: KillTestModels::prepare(device),
            next: AtomicUsize::new(0),
            servers,
            signals: wanted,
            report: Mutex::default(),
        };
        std::thread::scope(|scope| {
            for _ in 0..concurrency {
                scope.spawn(|| test.run_servers());
            }
        });
        let mut report = test.report.into_inner().unwrap();
        report.duration = began.elapsed();
        report
    }

    fn run_servers(&self) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.servers || self.is_enough() {
                return;
            }
            let topology = self.topologies[number % self.topologies.len()];
            let seed = self.seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let rng = KillTestRng::new(seed);
            let server_run = server_run::run_server(&self.models, topology, rng, self.signals);
            let mut report = self.report.lock().unwrap();
            report.add(topology, server_run);
            println!("server {number}, {topology:?}: {}", report.line());
        }
    }

    fn is_enough(&self) -> bool {
        let (kills, stops) = self.report.lock().unwrap().signals();
        kills >= self.signals.kills && stops >= self.signals.stops
    }
}

#[test]
fn killed_and_hung_executors_lose_no_token() {
    let all = usize::MAX;
    let wanted = SignalCounts { kills: all, stops: all, stop_percent: 20, executor_failures: 2 };
    let topologies = KillTestTopology::for_devices(2);
    let servers = topologies.len();
    let report = KillTest::run(KillTestDevice::Cpu, topologies, 16, wanted, servers, servers);
    println!("{report}");
    report.check();
    let (kills, stops) = report.signals();
    assert!(kills >= 6 && stops >= 2, "{kills} kills, {stops} stops");
}

/// Sends `HADRON_KILLS` SIGKILL signals (default 200) and a quarter as many SIGSTOP signals. Executors run on
/// CPUs, or on the GPUs that `HADRON_GPU` selects: `HADRON_GPU_RANKS` GPUs (default 2).
#[test]
#[ignore = "takes minutes: `just kills`"]
#[allow(clippy::disallowed_methods, reason = "the seed of a replay and the GPUs come from `just`")]
fn long_kill_test() {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let env_var = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seed = env_var("HADRON_KILLS_SEED").unwrap_or_else(clock);
    let kills = env_var("HADRON_KILLS").unwrap_or(200) as usize;
    let wanted = SignalCounts { kills, stops: kills / 4, stop_percent: 22, executor_failures: 3 };
    let topologies = KillTestTopology::for_devices(env_var("HADRON_GPU_RANKS").unwrap_or(2));
    // On GPUs, servers run one after another: concurrent servers would need the memory of the same devices.
    let (device, concurrency) = match std::env::var("HADRON_GPU").as_deref() {
        Err(_) => (KillTestDevice::Cpu, 2),
        Ok("cuda") => (KillTestDevice::Cuda, 1),
        Ok("rocm") => (KillTestDevice::Rocm, 1),
        Ok(other) => panic!("HADRON_GPU={other} is not cuda or rocm"),
    };
    let report = KillTest::run(device, topologies, seed, wanted, usize::MAX, concurrency);
    println!("{report}");
    report.check();
}
