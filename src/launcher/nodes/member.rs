//! A node other than 0: joins it, starts the executors it is ordered to, and ends with it.
//!
//! It answers nobody. Its executors speak to node 0 themselves; if node 0 is silent for too long they end, because it
//! has given them up by then and goes on without them.

use super::dial::{Dial, RETRY};
use super::{BEAT_INTERVAL, BODY_BYTES_MAX, EPOCH, OUTBOX_MESSAGES};
use crate::config::{Cluster, DeviceKind, Environment, ServeArgs};
use crate::launcher::executor::{ExecutorGroup, ExecutorProcess, Lifetime, Process};
use crate::launcher::model_files::ModelFiles;
use crate::launcher::shutdown::{FATAL, at_once};
use crate::launcher::silence::{SILENCE, heard};
use crate::launcher::{device, settings, signals};
use anyhow::{Context, Result, bail};
use executor::ExecutorConfig;
use protocol::link::{Beat, FrameReader, FrameWriter, Receiving, drain};
use protocol::{Epoch, FromNode, HostSettings, LinkOffer, Member, Rank, Replica, ToNode};
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// How long a link is tried for: longer than strangers may keep its place. Node 0 waits longer, and nothing else is heard meanwhile.
const LINK_TIME: Duration = Duration::from_secs(6);
/// How often a wait for node 0 is told of.
const TOLD_EVERY: Duration = Duration::from_secs(15);
/// Node 0 may wait for a predecessor of this node to be given up before it says a word.
const ACCEPT_WAIT: Duration = Duration::from_secs(15);
/// Time for the executors' last step, once node 0 has told them to stop.
const EXECUTOR_WAIT: Duration = Duration::from_secs(5);
/// A process is waited for by a thread of its own; the bound only keeps a lost wake-up from lasting.
const ENDLESS: Duration = Duration::from_hours(1);

/// Something the main thread must know.
enum Notice {
    Signal(i32),
    Order(ToNode),
    /// Node 0 is gone, and how that was noticed.
    Lost(String),
}

/// Runs this node's part until node 0 tells it to leave, or is gone. Returns the process's exit code.
pub fn run(
    args: &ServeArgs,
    environment: &Environment,
    cluster: &Cluster,
    runtime: &Runtime,
) -> Result<ExitCode> {
    let secret = args.nodes.secret(environment)?;
    {
        let _inside = runtime.enter();
        signals::survive(|| {}).context("cannot watch for signals")?;
    }
    let mut args = args.clone();
    if args.engine.device == DeviceKind::Auto {
        args.engine.device = device::found();
    }
    let files = ModelFiles::resolve(&args, environment)?;
    settings::check_world(&args, &files)?;
    let config = settings::executor(&args, &files, environment)?;
    let (sender, notices) = channel();
    {
        let _inside = runtime.enter();
        let sender = sender.clone();
        signals::forward(move |number| sender.send(Notice::Signal(number)).is_ok())
            .context("cannot watch for signals")?;
    }
    let dial = Dial::new(cluster, secret);
    let patience = args.engine.startup_timeout.0;
    let Some(accepted) = join(&dial, &member(cluster, &config), patience, &notices)? else {
        return Ok(ExitCode::SUCCESS); // Told to stop.
    };
    let lifetime = Lifetime { apart: true, log: args.log.log_format };
    let to_zero = connect(accepted, sender)?;
    let mut post =
        Post { config, lifetime, dial, to_zero, groups: BTreeMap::new(), node: cluster.node };
    Ok(post.serve(&notices, args.http.shutdown_timeout.0))
}

/// This node as it presents itself.
fn member(cluster: &Cluster, config: &ExecutorConfig) -> Member {
    Member {
        node: cluster.node,
        nodes: cluster.nodes,
        parallel: config.settings.parallel,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        manifest: config.manifest,
    }
}

/// A connection over which node 0 orders.
struct Accepted {
    stream: TcpStream,
    /// Orders may have arrived already.
    orders: FrameReader<TcpStream, ToNode>,
}

/// Reaches node 0, which may still be starting, and is accepted by it. `None` = a signal came first.
///
/// Errors: node 0 is not there in time, is no node 0 of this cluster, or does not take this node in.
fn join(
    dial: &Dial,
    member: &Member,
    patience: Duration,
    notices: &Receiver<Notice>,
) -> Result<Option<Accepted>> {
    let (began, mut told) = (Instant::now(), None::<Instant>);
    loop {
        let error = match dial.connect(FromNode::Join(member.clone())) {
            Ok(stream) => return accepted(stream).map(Some),
            Err(error) if !error.is_passing() => bail!(error),
            Err(error) => error,
        };
        if began.elapsed() > patience {
            let seconds = patience.as_secs();
            bail!("{error}, for {seconds} s; --startup-timeout sets this bound");
        }
        if told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
            told = Some(Instant::now());
            tracing::info!(%error, "waiting for node 0");
        }
        if let Ok(Notice::Signal(_)) = notices.recv_timeout(RETRY) {
            return Ok(None);
        }
    }
}

/// The connection, if node 0 takes this node in.
fn accepted(stream: TcpStream) -> Result<Accepted> {
    let mut orders = FrameReader::limited(stream.try_clone()?, EPOCH, BODY_BYTES_MAX);
    match orders.recv(ACCEPT_WAIT).context("node 0 hung up")? {
        Some(ToNode::Accepted) => Ok(Accepted { stream, orders }),
        Some(ToNode::Refused { text }) => bail!("node 0 refuses this node: {text}"),
        Some(_) => bail!("node 0 does not keep to the handshake"),
        None => bail!("node 0 did not answer within {} s", ACCEPT_WAIT.as_secs()),
    }
}

/// Starts the threads that hear node 0 and speak to it; returns the road to it.
fn connect(accepted: Accepted, notices: Sender<Notice>) -> Result<SyncSender<FromNode>> {
    let Accepted { stream, mut orders } = accepted;
    let writer = FrameWriter::new(stream, EPOCH);
    let (to_zero, outbox) = sync_channel(OUTBOX_MESSAGES);
    thread::Builder::new().name("node-out".to_owned()).spawn(move || {
        let beat = Beat { every: BEAT_INTERVAL, message: || FromNode::Beat };
        let _ = drain(outbox, writer, Some(&beat)); // Its end is seen by who listens.
    })?;
    thread::Builder::new().name("node-in".to_owned()).spawn(move || {
        loop {
            let notice = match heard(&mut orders) {
                Ok(Some(ToNode::Beat)) => continue,
                Ok(Some(order)) => Notice::Order(order),
                Ok(None) => Notice::Lost(format!("no sign of life for {} s", SILENCE.as_secs())),
                Err(error) => Notice::Lost(error.to_string()),
            };
            let last = matches!(notice, Notice::Lost(_));
            if notices.send(notice).is_err() || last {
                return;
            }
        }
    })?;
    Ok(to_zero)
}

/// This node at work.
struct Post {
    node: u16,
    config: ExecutorConfig,
    lifetime: Lifetime,
    dial: Dial,
    to_zero: SyncSender<FromNode>,
    /// By replica.
    groups: BTreeMap<u16, ExecutorGroup>,
}

impl Post {
    /// Does what is ordered. `patience`: how long it goes on after a signal, should node 0 not end as well.
    fn serve(&mut self, notices: &Receiver<Notice>, patience: Duration) -> ExitCode {
        tracing::info!(node = self.node, "joined; node 0 orders, and answers clients");
        let mut until: Option<Instant> = None;
        loop {
            let left = until.map_or(ENDLESS, |at| at.saturating_duration_since(Instant::now()));
            match notices.recv_timeout(left) {
                Ok(Notice::Order(ToNode::Start { replica, epoch, ticket })) => {
                    self.start(replica, epoch, ticket);
                }
                Ok(Notice::Order(ToNode::Leave)) => {
                    tracing::info!("node 0 has ended the service");
                    return self.leave();
                }
                Ok(Notice::Signal(number)) if until.is_some() => return at_once(number),
                Ok(Notice::Signal(number)) => {
                    tracing::info!(number, "going on until node 0 has drained");
                    until = Some(Instant::now() + patience);
                }
                Ok(Notice::Lost(cause)) => {
                    tracing::error!(cause, "node 0 is gone: ending");
                    self.groups.values_mut().for_each(ExecutorGroup::kill);
                    return ExitCode::from(FATAL);
                }
                Err(RecvTimeoutError::Timeout) if until.is_some() => {
                    tracing::warn!("node 0 goes on without this node");
                    return ExitCode::SUCCESS;
                }
                // Nothing else is an order.
                Ok(Notice::Order(_)) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return ExitCode::from(FATAL),
            }
        }
    }

    /// Starts the executors of a replica, in place of those there may be.
    fn start(&mut self, replica: Replica, epoch: Epoch, ticket: u64) {
        let (config, lifetime) = (&self.config, self.lifetime);
        let new = || ExecutorGroup::new(config.clone(), replica.0..replica.0 + 1, lifetime);
        let group = self.groups.entry(replica.0).or_insert_with(new);
        let dial = |rank: Rank, meeting| {
            let own = config.settings.clone();
            let host = HostSettings {
                dir: own.dir,
                libraries: own.libraries,
                kernel_cache: own.kernel_cache,
                threads: own.threads,
                meeting,
            };
            let offer = LinkOffer { ticket, rank, host };
            Ok(self.dial.insist(&FromNode::Link(offer), LINK_TIME)?)
        };
        tracing::info!(replica = replica.0, epoch = epoch.0, "starting executors");
        let watched = group.start_linked(epoch, dial).and_then(|started| {
            started.into_iter().try_for_each(|(rank, process)| {
                watch(rank, epoch, process, self.to_zero.clone()).context("no thread is left")
            })
        });
        if let Err(error) = watched {
            group.kill();
            let text = format!("{error:#}");
            tracing::error!(text, "executors cannot be started");
            // If the road is gone, node 0 is.
            let _ = self.to_zero.send(FromNode::NotStarted { ticket, text });
        }
    }

    /// Ends the executors, which node 0 has told to stop.
    fn leave(&mut self) -> ExitCode {
        let deadline = Instant::now() + EXECUTOR_WAIT;
        for group in self.groups.values_mut() {
            group.shut_down(deadline.saturating_duration_since(Instant::now()));
        }
        ExitCode::SUCCESS
    }
}

/// Starts the thread that tells node 0 how an executor has ended.
fn watch(
    rank: Rank,
    epoch: Epoch,
    process: Arc<ExecutorProcess>,
    to_zero: SyncSender<FromNode>,
) -> std::io::Result<()> {
    let waiter = thread::Builder::new().name("executor-end".to_owned());
    let started = waiter.spawn(move || {
        while process.wait(ENDLESS).is_none() {}
        let text = process.ending();
        let _ = to_zero.send(FromNode::Ended { rank, epoch, text });
    });
    started.map(drop)
}
